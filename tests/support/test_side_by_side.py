"""Three runs of pytest at once end with one closing line, and fail if any does."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import side_by_side
from .side_by_side import PROGRAMS, RANKS_IN_OTHERS, closing, counts, main, run_of

CONFTEST = """
import pytest
def pytest_configure(config):
    for run in ("first_run", "second_run", "third_run"):
        config.addinivalue_line("markers", run)
"""
TESTS = """
import pytest
@pytest.mark.first_run
def test_in_ranks(): assert {0}
@pytest.mark.second_run
def test_of_programs(): assert {1}
@pytest.mark.third_run
def test_alone(): assert {2}
@pytest.mark.third_run
def test_left_out(): pytest.skip("not here")
"""


def test_the_counts_of_all_are_one() -> None:
    lines = [
        "= 1 failed, 20 passed, 3 skipped, 7 deselected in 61.20s (0:01:01) =",
        "==== 2 passed, 1 error, 24 deselected in 1s ====",
    ]
    assert counts(lines[0]) == {"failed": 1, "passed": 20, "skipped": 3, "deselected": 7}
    assert closing(lines, 3725.5).strip("= ") == "1 failed, 22 passed, 3 skipped, 1 error in 3725.50s (1:02:05)"


def test_each_test_is_in_one_run() -> None:
    for folder in (*RANKS_IN_OTHERS, *PROGRAMS):
        assert list((Path(__file__).parents[1] / folder).glob("test_*.py"))
    folders = ("laws", "sparse", "tables")
    assert [run_of(folder, ranks=True) for folder in folders] == ["first_run", "second_run", "third_run"]
    assert [run_of(folder, ranks=False) for folder in folders] == ["second_run", "third_run", "third_run"]


def test_each_quick_test_is_in_one_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []
    monkeypatch.setattr(side_by_side, "run_at_once", lambda *given: runs.extend(given) or 5)
    assert main(["--quick", "-x"]) == 5
    root = Path(__file__).parents[2]
    assert [run[:3] for run in runs] == [["-m", side_by_side.QUICK, "-x"]] * 2
    assert [f"--ignore={path}" for path in runs[0][3:]] == runs[1][3:]
    assert all(list((root / path).glob("test_*.py")) for path in runs[0][3:])


@pytest.mark.slow
@pytest.mark.parametrize("fails", [None, 0, 1, 2])
def test_any_that_fails_fails_all(
    fails: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than all else here
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS.format(*(run != fails for run in range(3))), encoding="utf-8")
    code = main([str(tmp_path), "--rootdir", str(tmp_path), "-c", "/dev/null", "-p", "no:cacheprovider"])
    assert (code == 0) == (fails is None)
    last = capfd.readouterr().out.splitlines()[-1]
    expected = "3 passed, 1 skipped in" if fails is None else "1 failed, 2 passed, 1 skipped in"
    assert last.strip("= ").startswith(expected)
