"""Two runs of pytest at once end with one closing line, and fail if either does."""

from __future__ import annotations

from pathlib import Path

import pytest

from .side_by_side import IN_SECOND_RUN, closing, counts, is_in_first_run, main

CONFTEST = """
import pytest
def pytest_configure(config):
    config.addinivalue_line("markers", "first_run: in rank processes")
"""
TESTS = """
import pytest
@pytest.mark.first_run
def test_in_ranks(): assert {ranks}
def test_alone(): assert {alone}
def test_left_out(): pytest.skip("not here")
"""


def test_the_counts_of_both_are_one() -> None:
    lines = [
        "= 1 failed, 20 passed, 3 skipped, 7 deselected in 61.20s (0:01:01) =",
        "==== 2 passed, 1 error, 24 deselected in 1s ====",
    ]
    assert counts(lines[0]) == {"failed": 1, "passed": 20, "skipped": 3, "deselected": 7}
    assert closing(lines, 3725.5).strip("= ") == "1 failed, 22 passed, 3 skipped, 1 error in 3725.50s (1:02:05)"


def test_listed_folders_have_their_ranks_in_the_second_run() -> None:
    for folder in IN_SECOND_RUN:
        assert list((Path(__file__).parents[1] / folder).glob("test_*.py"))
        assert not is_in_first_run(folder, ranks=True)
    assert is_in_first_run("sparse", ranks=True)
    assert not is_in_first_run("sparse", ranks=False)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "alone"), [(True, True), (False, True), (True, False)])
def test_either_that_fails_fails_both(
    ranks: bool, alone: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than all else here
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS.format(ranks=ranks, alone=alone), encoding="utf-8")
    code = main([str(tmp_path), "--rootdir", str(tmp_path), "-c", "/dev/null", "-p", "no:cacheprovider"])
    assert (code == 0) == (ranks and alone)
    last = capfd.readouterr().out.splitlines()[-1]
    expected = "2 passed, 1 skipped in" if ranks and alone else "1 failed, 1 passed, 1 skipped in"
    assert last.strip("= ").startswith(expected)
