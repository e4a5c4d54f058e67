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


@pytest.mark.slow
@pytest.mark.parametrize(("marker", "at_least", "at_most"), [("gpu", 300, 2000), ("gpu_first", 15, 30)])
def test_tests_for_a_gpu_are_found(python: list[str], marker: str, at_least: int, at_most: int) -> None:
    command = [*python, "-m", "pytest", "-m", marker, "-W", "default", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert at_least <= len(found) <= at_most
    assert all(line.startswith("tests/gpu/") for line in found)


@pytest.mark.slow
def test_ranks_start_forked_and_anew(python: list[str]) -> None:
    done = subprocess.run([*python, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.returncode) == ("2 ranks\n2 ranks\n", 0), done.stderr
