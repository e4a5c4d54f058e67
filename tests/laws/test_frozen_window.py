"""`frozen_window` equals the plain loop that looks up k batches, updates in order, and steps: bit for bit."""

from __future__ import annotations

import pytest

from ..support.cases import ROWWISE_ADAGRAD, SEQUENCE, Case
from ..support.ranks import Ranks
from ..support.windows import train_windows, windows_of
from . import windows
from .windows import ALL_KINDS


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("case", [ALL_KINDS, SEQUENCE, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_equals_the_plain_loop(ranks: Ranks, case: Case, k: int) -> None:
    expected = ranks.run_once(train_windows, case, windows_of(30, k), k)
    actual = ranks.run(windows.train, case, k)
    assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[]] * ranks.world_size
