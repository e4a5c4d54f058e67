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
    return all(libc.mallopt(name, value) for name, value in settings)


class GrowthLimit:
    """Gives free memory back to the kernel whenever the process has grown by `LEAST` bytes and by half.

    Small blocks that steps leave (losses, say) split what is freed, and glibc takes new memory (its bug 14581).
    """

    EVERY, LEAST = 64, 256 << 20  # batches between two looks at the resident memory; bytes

    def __init__(self) -> None:
        self._num_batches = self._usual = 0  # `_usual`: resident bytes after the first batches; 0: not known

    def note_batch(self) -> None:
        """Count a batch; after some, compare the resident memory with the usual."""
        self._num_batches += 1
        if self._num_batches % self.EVERY:
            return
        with suppress(OSError, AttributeError):  # no /proc, or another C library
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if not self._usual:
                self._usual = resident
            elif resident - self._usual > max(self.LEAST, self._usual // 2):
                ctypes.CDLL(None).malloc_trim(0)
                self._usual = 0  # the next steps take back the memory that they need
