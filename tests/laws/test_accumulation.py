"""Accumulated dense gradients equal the plain loop bit for bit; each batch's backward updates the tables."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_overlap import MODES

from ..sparse.update_rates import TWO_RATES, factor
from ..support.cases import NUM_STEPS, SEQUENCE, TABLE_WISE, Case
from ..support.pairs import pairwise
from ..support.ranks import Ranks
from ..support.reference import differences
from ..support.windows import Window, train_windows, windows_of
from . import accumulated
from .accumulated import ALL_KINDS

EXACT = [name for name, mode in MODES.items() if not mode.staleness and not mode.prefetches]
CASES = {case.name: case for case in (ALL_KINDS, SEQUENCE)}


def _check(ranks: Ranks, actual: list[Any], case: Case, expected: list[Window], **kwargs: Any) -> None:
    reference = ranks.run_once(train_windows, case, expected, **kwargs)
    assert differences(actual, reference) == [[]] * ranks.world_size


@pytest.mark.parametrize(("pipeline", "name", "model"), pairwise(EXACT, CASES, ["plain", "makes_input"]))
def test_equals_the_plain_loop(ranks: Ranks, pipeline: str, name: str, model: str) -> None:
    """The last window of four has two batches."""
    actual = ranks.run(accumulated.train, CASES[name], 4, pipeline=pipeline, model=model)
    _check(ranks, actual, CASES[name], windows_of(NUM_STEPS, 4))


EVERY_EPOCHS_OWN = GradientAccumulationScheduler({0: 2, 1: 4})
FITS: dict[str, tuple[Case, int, dict[str, Any], list[Window], dict[str, Any]]] = {
    "between_hosts": (ALL_KINDS, 4, {}, windows_of(NUM_STEPS, 4), {}),
    "every_epochs_own": (
        *(TABLE_WISE, 1, {"callbacks": [EVERY_EPOCHS_OWN], "lengths": (10,), "max_epochs": 3}),
        *([*windows_of(10, 2), *windows_of(10, 4), *windows_of(10, 4)], {}),
    ),
    "max_steps": (TABLE_WISE, 3, {"max_steps": 3}, windows_of(9, 3), {}),
    # The last batch that all ranks have ends its window.
    "unequal_data": (TABLE_WISE, 4, {"lengths": (11, 7)}, windows_of(7, 4), {}),
    "rates_by_step": (TWO_RATES, 3, {"model": "scheduled"}, windows_of(NUM_STEPS, 3), {"factor": factor}),
}
"""A case, the length of a window, arguments of the fit, what the loop by hand trains, its arguments."""


@pytest.mark.parametrize(("name", "pipeline"), pairwise(FITS, ["fused_sparse_dist", "split_backward"]))
def test_other_fits(get_ranks: Callable[..., Ranks], name: str, pipeline: str) -> None:
    case, k, kwargs, expected, by_hand = FITS[name]
    ranks = get_ranks(2, num_nodes=2 if name == "between_hosts" else 1)
    _check(ranks, ranks.run(accumulated.train, case, k, pipeline=pipeline, **kwargs), case, expected, **by_hand)
