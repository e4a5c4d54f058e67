"""`frozen_window` equals the plain loop that looks up k batches, updates in order, and steps: bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


def test_batches_that_are_none(two_ranks: Ranks) -> None:
    """Lightning counts them and steps at none of them: an epoch that ends with one loses what came before it."""
    actual = two_ranks.run(windows.train, TABLE_WISE, 4, lengths=(12,), data={"nones": (1, 11)})
    mine = [dataclasses.replace(result, losses=result.losses[:7]) for result in actual]
    _check(two_ranks, mine, TABLE_WISE, [Window((0, 2, 3), 4), Window((4, 5, 6, 7), 4)])


def test_between_two_steps_tables_are_those_of_the_last_step(ranks: Ranks) -> None:
    """An evaluation and a callback see them so, and an evaluation changes nothing."""
    kwargs = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    for result, seen in ranks.run(windows.watched, TABLE_WISE, 4, **kwargs):
        assert [what for what, _, _ in seen].count("validation") == 3
        assert all(version == step + 1 for _, step, version in seen)
        assert len(result.losses) == NUM_STEPS


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
    runs = ranks.run(windows.save_and_go_on, ROWWISE_ADAGRAD, 4, stop, str(tmp_path), **kwargs)
    _check(ranks, [whole for whole, _, _ in runs], ROWWISE_ADAGRAD, windows_of(14, 4))
    reference = ranks.run_once(train_windows, ROWWISE_ADAGRAD, rest)
    for (_, resumed, counts), theirs in zip(runs, reference, strict=True):
        expected = dataclasses.replace(theirs, losses=theirs.losses[-(14 - stop) :])
        assert resumed.differences(expected) == []
        assert set(counts) <= {stop // 4 * 4}


def test_a_stop_in_a_window_leaves_its_batches_out(ranks: Ranks) -> None:
    """Lightning makes no step for them: their updates are left out with it."""
    actual = ranks.run(windows.stopped, TABLE_WISE, 4, 6)
    reference = ranks.run_once(train_windows, TABLE_WISE, windows_of(4, 4))
    for mine, theirs in zip(actual, reference, strict=True):
        assert len(mine.losses) == 6
        assert dataclasses.replace(mine, losses=mine.losses[:4]).differences(theirs) == []


@pytest.mark.parametrize(("place", "batch"), [("issue embedding_lookup", 7), ("issue embedding_update", 4)])
def test_an_error_in_a_window_leaves_all_of_its_step_or_nothing(ranks: Ranks, place: str, batch: int) -> None:
    """The step of batches 4 to 7: made where the error comes in the middle of its updates."""
    num = 8 if place == "issue embedding_update" else 4
    reference = ranks.run_once(train_windows, TABLE_WISE, windows_of(num, 4))
    runs = ranks.run(windows.failing, TABLE_WISE, 4, place, batch)
    for (left, num_trained), theirs in zip(runs, reference, strict=True):
        assert dataclasses.replace(left, losses=theirs.losses).differences(theirs) == []
        assert num_trained == 6


@pytest.mark.parametrize(("after", "message"), [(6, "between two batches of one optimizer step"), (8, "trained")])
def test_tables_are_written_between_steps_only(two_ranks: Ranks, after: int, message: str) -> None:
    for text in two_ranks.run(windows.writing, TABLE_WISE, 4, after):
        assert message in text


@pytest.mark.parametrize(
    ("model", "k", "message"),
    [
        ("manual", 1, "with manual optimization"),
        ("asks_twice", 2, "runs several forwards in a step"),
        ("asks_twice", 1, "trained"),
    ],
)
def test_what_has_no_window_is_refused(get_ranks: Callable[..., Ranks], model: str, k: int, message: str) -> None:
    [text] = get_ranks(1).run(windows.message_of, TABLE_WISE, k, model=model)
    assert message in text
