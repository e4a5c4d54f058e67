"""malloc keeps freed memory, unless the user has set it or it is not glibc's."""

import os
import subprocess
import sys

import pytest

from lightning_overlap.plugin import host_memory

_ALLOCATES = """
import ctypes, resource, runpy, sys
kept = runpy.run_path(sys.argv[1])["keep_freed_memory"]()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [malloc(4 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks:
        free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touched()
print(kept, touched())
"""


@pytest.mark.parametrize(
    ("variables", "keeps"),
    [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False)],
)
def test_freed_memory_is_used_again(variables: dict[str, str], keeps: bool) -> None:
    """The second time that a process touches 32 MiB it gets pages that it has had."""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _ALLOCATES, host_memory.__file__]
    done = subprocess.run(command, env={**free, **variables}, capture_output=True, text=True, check=True, timeout=120)
    kept, num_faults = done.stdout.split()
    assert kept == str(keeps)
    assert (int(num_faults) < 100) == keeps
