"""A machine with a GPU, stood in for on a CPU: packages are reached through PYTHONPATH alone, and some are missing."""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from .interpreters import ROOT

MISSING = ("torchdata", "redis", "pyarrow", "isal", "nbclient", "nbformat", "jupyter", "ipykernel", "mkdocs")
PROGRAM = """
import os, subprocess
from tests.support import interpreters, ranks

def start_anew(command, *, cwd, pass_fds, launches):  # as ranks on GPUs are
    return subprocess.Popen(command, cwd=cwd, pass_fds=pass_fds, env=dict(os.environ))

for start in (interpreters.Popen, start_anew):
    interpreters.Popen = start
    pool = ranks.Ranks(2)
    print(len(set(pool.run(os.getpid))), "ranks")
    pool.close()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", symlinks=True)
    (folder / "packages").mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.lower().startswith(MISSING):
            (folder / "packages" / entry.name).symlink_to(entry)
    paths = os.pathsep.join([str(ROOT), str(folder / "packages")])
    return ["env", f"PYTHONPATH={paths}", str(folder / "venv" / "bin" / "python")]


COLLECT = """
import pytest
for marker in ("gpu", "gpu_first"):
    print(marker, pytest.main(["-m", marker, "-W", "default", "--collect-only", "-q"]) or "found")
"""


@pytest.mark.slow
def test_tests_for_a_gpu_are_found(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=100)
    of_gpu, found, of_first = done.stdout.partition("\ngpu found\n")
    assert found, done.stdout + done.stderr
    assert "\ngpu_first found\n" in of_first, done.stdout + done.stderr
    for text, at_least, at_most in ((of_gpu, 300, 2000), (of_first, 15, 30)):
        tests = [line for line in text.splitlines() if "::" in line]
        assert at_least <= len(tests) <= at_most
        assert all(line.startswith("tests/gpu/") for line in tests)


@pytest.mark.slow
def test_ranks_start_forked_and_anew(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.returncode) == ("2 ranks\n2 ranks\n", 0), done.stderr
