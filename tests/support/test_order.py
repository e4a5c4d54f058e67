"""The order of the tests: a worker that runs all tests of a file begins the longest files first."""

from itertools import groupby
from pathlib import Path

import pytest

from ..conftest import seconds_of


def test_the_longest_files_come_first(request: pytest.FixtureRequest) -> None:
    by_file = [(path, list(items)) for path, items in groupby(request.session.items, key=lambda item: item.path)]
    assert len({path for path, _ in by_file}) == len(by_file), "the tests of a file are not together"
    seconds = [sum(map(seconds_of, items)) for _, items in by_file]
    assert seconds == sorted(seconds, reverse=True)


def test_the_makefile_keeps_this_order() -> None:
    """By itself pytest-xdist begins with the files of most tests, and ends with those of one that takes minutes."""
    makefile = Path(__file__).parents[2] / "Makefile"
    runs = [line for line in makefile.read_text(encoding="utf-8").splitlines() if "--numprocesses" in line]
    assert len(runs) == 2
    assert all("--dist=loadfile --no-loadscope-reorder" in line for line in runs)
