"""Keep freed memory in the process: on a CPU the next step asks for the same blocks again."""

import ctypes
import os
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
