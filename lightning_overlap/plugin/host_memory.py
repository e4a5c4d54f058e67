"""Keep freed memory in the process: on a CPU the next step asks for the same blocks again."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

# From glibc's malloc.h. By default blocks of more than 128 KiB (later up to 32 MiB) are mapped anew at each use, and
# the kernel fills each of their pages with zeros.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
MMAP_THRESHOLD = 32 << 20  # blocks up to this size, in bytes, come from the heap: the most that glibc accepts
TRIM_THRESHOLD = (1 << 31) - 1  # the heap keeps this many free bytes
TOP_PAD = 64 << 20  # the heap grows by this many bytes at once


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory, unless the environment configures malloc; return whether it does."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    process: Any = ctypes.CDLL(None)
    try:
        libc: Any = ctypes.CDLL("libc.so.6")
    except OSError:  # not glibc
        return False
    if len({ctypes.cast(one.malloc, ctypes.c_void_p).value for one in (process, libc)}) > 1:
        return False  # another library provides malloc: jemalloc, tcmalloc
    settings = ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, TRIM_THRESHOLD), (_M_TOP_PAD, TOP_PAD))
    accepted = [libc.mallopt(name, value) for name, value in settings]
    return all(accepted)


class GrowthLimit:
    """Gives free memory back to the kernel whenever the process has grown too far.

    A block that a step leaves behind (its loss, say) can lie where larger blocks were freed. These cannot be joined
    again, and glibc takes new memory for the next block of their size, in each step anew. Source: glibc's bug 14581.
    """

    EVERY = 64  # batches between two looks at the resident memory
    LEAST = 256 << 20  # bytes; below this, and below half of what was resident, the process may grow

    def __init__(self) -> None:
        self._num_batches = 0
        self._usual: int | None = None  # resident bytes after the first batches; None: not known yet

    def note_batch(self) -> None:
        """Count a batch; after some, compare the resident memory with the usual."""
        self._num_batches += 1
        if self._num_batches % self.EVERY:
            return
        with suppress(OSError, AttributeError):  # no /proc, or another C library
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if self._usual is None:
                self._usual = resident
            elif resident - self._usual > max(self.LEAST, self._usual // 2):
                ctypes.CDLL(None).malloc_trim(0)
                self._usual = None  # the next steps take back the memory that they need
