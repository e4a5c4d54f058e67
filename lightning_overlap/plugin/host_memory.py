"""Keep freed memory in the process: on a CPU the next step asks for the same blocks again."""

from __future__ import annotations

import ctypes
import os
from typing import Any

# From glibc's malloc.h. By default blocks of more than 128 KiB (later up to 32 MiB) are mapped anew at each use, and
# the kernel fills each of their pages with zeros.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
MMAP_THRESHOLD = 32 << 20
"""Blocks up to this size, in bytes, come from the heap: the most that glibc accepts."""
TRIM_THRESHOLD = (1 << 31) - 1
"""The heap keeps this many free bytes."""
TOP_PAD = 64 << 20
"""The heap grows by this many bytes at once."""


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory, for the whole process; return whether it does.

    Does nothing if another library provides `malloc` (jemalloc, tcmalloc), or if the environment configures malloc
    already (`MALLOC_...`, `GLIBC_TUNABLES`).
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    process: Any = ctypes.CDLL(None)
    if not (hasattr(process, "mallopt") and hasattr(process, "dladdr")):
        return False
    found = _Symbol()
    if not process.dladdr(ctypes.cast(process.malloc, ctypes.c_void_p), ctypes.byref(found)):
        return False
    if not os.path.basename(os.fsdecode(found.file or b"")).startswith("libc."):
        return False
    settings = ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, TRIM_THRESHOLD), (_M_TOP_PAD, TOP_PAD))
    accepted = [process.mallopt(name, value) for name, value in settings]
    return all(accepted)
