"""`frozen_window` equals the plain loop that looks up k batches, updates in order, and steps: bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from ..sparse.update_rates import TWO_RATES, factor
from ..support.cases import NUM_STEPS, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case
from ..support.ranks import Ranks
from ..support.reference import Result, differences
from ..support.windows import Window, train_windows, windows_of
from . import windows
from .windows import ALL_KINDS


def _check(ranks: Ranks, actual: list[Result], case: Case, expected: list[Window], **kwargs: Any) -> None:
    reference = ranks.run_once(train_windows, case, expected, **kwargs)
    assert differences(actual, reference) == [[]] * ranks.world_size


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("case", [ALL_KINDS, SEQUENCE, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_equals_the_plain_loop(ranks: Ranks, case: Case, k: int) -> None:
    """The last window of four has two batches."""
    _check(ranks, ranks.run(windows.train, case, k), case, windows_of(NUM_STEPS, k))


def test_updates_in_every_backward_would_be_seen(ranks: Ranks) -> None:
    """They are what accumulation does to the tables without the option."""
    without = ranks.run(windows.train, ALL_KINDS, 4, options={"frozen_window": False})
    _check(ranks, without, ALL_KINDS, windows_of(NUM_STEPS, 4), updates_in_backward=True)
    for found in differences(without, ranks.run_once(train_windows, ALL_KINDS, windows_of(NUM_STEPS, 4))):
        assert {"losses from step 1", "tables t0 [0, 0]"} & set(found)


@pytest.mark.parametrize("case", [ALL_KINDS, SEQUENCE], ids=lambda case: case.name)
def test_modules_that_run_their_own_forward(ranks: Ranks, case: Case) -> None:
    actual = ranks.run(windows.train, case, 4, model="makes_input")
    _check(ranks, actual, case, windows_of(NUM_STEPS, 4))


EVERY_EPOCHS_OWN = GradientAccumulationScheduler({0: 2, 1: 4})
AFTER_OPTIMIZER = "fused_sparse_dist_after_optimizer"
FITS: dict[str, tuple[Case, int, dict[str, Any], list[Window], dict[str, Any]]] = {
    "sparse_dist": (ALL_KINDS, 3, {"pipeline": "sparse_dist"}, windows_of(NUM_STEPS, 3), {}),
    "after_optimizer": (ALL_KINDS, 3, {"pipeline": AFTER_OPTIMIZER}, windows_of(NUM_STEPS, 3), {}),
    "between_hosts": (ALL_KINDS, 4, {}, windows_of(NUM_STEPS, 4), {}),
    "every_epochs_own": (
        *(TABLE_WISE, 1, {"callbacks": [EVERY_EPOCHS_OWN], "lengths": (10,), "max_epochs": 3}),
        *([*windows_of(10, 2), *windows_of(10, 4), *windows_of(10, 4)], {}),
    ),
    "max_steps": (TABLE_WISE, 3, {"max_steps": 3}, windows_of(9, 3), {}),
    # The last batch that all ranks have ends its window.
    "unequal_data": (TABLE_WISE, 4, {"lengths": (11, 7)}, windows_of(7, 4), {}),
    "updates_at_the_rate_of_their_step": (
        *(TWO_RATES, 3, {"model": "scheduled"}, windows_of(NUM_STEPS, 3), {"factor": factor}),
    ),
}
"""A case, the length of a window, arguments of the fit, what the loop by hand trains, its arguments."""


@pytest.mark.parametrize("name", FITS)
def test_other_fits(get_ranks: Callable[..., Ranks], name: str) -> None:
    case, k, kwargs, expected, by_hand = FITS[name]
    ranks = get_ranks(2, num_nodes=2 if name == "between_hosts" else 1)
    _check(ranks, ranks.run(windows.train, case, k, **kwargs), case, expected, **by_hand)


def test_between_two_steps_tables_are_those_of_the_last_step(ranks: Ranks) -> None:
    """An evaluation and a callback see them so, and an evaluation changes nothing."""
    kwargs = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    for seen in ranks.run(windows.watched, TABLE_WISE, 4, **kwargs):
        of_step = dict(seen)
        assert len(seen) == NUM_STEPS + 3
        assert all(torch.equal(tables, of_step[step]) for step, tables in seen)
        assert len({tables.sum().item() for tables in of_step.values()}) == len(of_step) == 4


@pytest.mark.parametrize(
    ("stop", "rest"),
    [
        (8, windows_of(14, 4)),
        # In the middle of the window of batches 4 to 7: batches 4 and 5 are in neither the tables nor the dense part.
        (6, [*windows_of(4, 4), *windows_of(14, 4, first=6)]),
    ],
    ids=["border", "middle"],
)
def test_a_checkpoint_holds_the_last_optimizer_step(
    ranks: Ranks, stop: int, rest: list[Window], tmp_path: Path
) -> None:
    kwargs = {"lengths": (14,), "data": {"stateful": True}}
    path = str(tmp_path / "window.ckpt")
    whole = ranks.run(windows.train, ROWWISE_ADAGRAD, 4, callbacks=[windows.After(stop, "save", path)], **kwargs)
    _check(ranks, whole, ROWWISE_ADAGRAD, windows_of(14, 4))
    resumed = ranks.run(windows.train, ROWWISE_ADAGRAD, 4, ckpt_path=path, **kwargs)
    for mine, theirs in zip(resumed, ranks.run_once(train_windows, ROWWISE_ADAGRAD, rest), strict=True):
        assert mine.differences(dataclasses.replace(theirs, losses=theirs.losses[-(14 - stop) :])) == []


def test_a_stop_in_a_window_leaves_its_batches_out(ranks: Ranks) -> None:
    """Lightning makes no step for them: their updates are left out with it."""
    actual = ranks.run(windows.train, TABLE_WISE, 4, callbacks=[windows.After(6, "stop")])
    assert all(len(result.losses) == 6 for result in actual)
    mine = [dataclasses.replace(result, losses=result.losses[:4]) for result in actual]
    _check(ranks, mine, TABLE_WISE, windows_of(4, 4))


@pytest.mark.parametrize(("place", "batch"), [("issue embedding_lookup", 7), ("issue embedding_update", 4)])
def test_an_error_in_a_window_leaves_all_of_its_step_or_nothing(ranks: Ranks, place: str, batch: int) -> None:
    """The step of batches 4 to 7: made where the error comes in the middle of its updates."""
    num = 8 if place == "issue embedding_update" else 4
    reference = ranks.run_once(train_windows, TABLE_WISE, windows_of(num, 4))
    runs = ranks.run(windows.failing, TABLE_WISE, 4, place, batch)
    for (left, num_trained), theirs in zip(runs, reference, strict=True):
        assert dataclasses.replace(left, losses=theirs.losses).differences(theirs) == []
        assert num_trained == 6


AFTER_6, AFTER_8 = ({"callbacks": [windows.After(num, "write")]} for num in (6, 8))


@pytest.mark.parametrize(
    ("k", "kwargs", "message"),
    [
        (4, AFTER_6, "between two batches of one optimizer step"),
        (4, AFTER_8, "trained"),
        (1, {"model": "manual"}, "with manual optimization"),
        (2, {"model": "asks_twice"}, "runs several forwards in a step"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_what_a_window_refuses(two_ranks: Ranks, k: int, kwargs: dict[str, Any], message: str) -> None:
    for text in two_ranks.run(windows.message_of, TABLE_WISE, k, **kwargs):
        assert message in text
