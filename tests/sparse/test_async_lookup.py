"""`async_lookup` equals a plain loop whose lookups see the updates up to k batches before, and no others."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import Mode

from ..laws import uneven
from ..support import reference
from ..support.cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case
from ..support.pairs import pairwise
from ..support.ranks import Ranks
from ..support.reference import Delayed, Seen, Switching, differences
from . import asyncs
from .asyncs import NUM_STEPS

BY_NAME = {case.name: case for case in (TABLE_WISE, MIXED, SEQUENCE, ROWWISE_ADAGRAD)}
deferred = pytest.mark.parametrize("defer_update", [False, True], ids=["in_backward", "deferred"])


def _expected(ranks: Ranks, case: Case, seen: Seen, num_steps: int = NUM_STEPS) -> list[reference.Result]:
    return ranks.run_once(reference.train_delayed, case, seen, num_steps=num_steps)


def _fit(ranks: Ranks, case: Case, seen: Seen, num_steps: int = NUM_STEPS, **options: Any) -> list[reference.Result]:
    """Train; equal to the plain loop whose lookups see these updates."""
    actual = ranks.run(asyncs.fit, case, num_steps=num_steps, **options)
    assert differences(actual, _expected(ranks, case, seen, num_steps)) == [[]] * ranks.world_size
    return actual


@pytest.mark.parametrize(
    ("name", "staleness", "defer_update", "num_ranks"), pairwise(BY_NAME, [1, 2, 4], [False, True], [1, 2])
)
def test_equals_the_plain_loop_with_updates_delayed_by_as_much(
    get_ranks: Callable[..., Ranks], name: str, staleness: int, defer_update: bool, num_ranks: int
) -> None:
    case, ranks = BY_NAME[name], get_ranks(num_ranks)
    actual = _fit(ranks, case, Delayed(staleness), staleness=staleness, defer_update=defer_update)
    for other in (staleness - 1, staleness + 1):  # and one update more or less is seen
        for found in differences(actual, _expected(ranks, case, Delayed(other))):
            assert any(text.startswith("losses from step") for text in found)


@pytest.mark.parametrize(("num_steps", "defer_update", "num_ranks"), pairwise([1, 2, 4, 5, 6], [False, True], [1, 2]))
def test_no_more_batches_than_are_looked_up_ahead(
    get_ranks: Callable[..., Ranks], num_steps: int, defer_update: bool, num_ranks: int
) -> None:
    _fit(get_ranks(num_ranks), MIXED, Delayed(5), num_steps, staleness=5, defer_update=defer_update)


@pytest.mark.parametrize(
    ("name", "staleness", "defer_update", "num_ranks"), pairwise(BY_NAME, [1, 4], [False, True], [1, 2])
)
def test_exact_until_the_start_and_after_the_end(
    get_ranks: Callable[..., Ranks], name: str, staleness: int, defer_update: bool, num_ranks: int
) -> None:
    case, ranks = BY_NAME[name], get_ranks(num_ranks)
    switches = {"start_batch": 5, "end_batch": 10, "defer_update": defer_update}
    actual = _fit(ranks, case, Switching(staleness, 5, 10), staleness=staleness, **switches)
    for mine, exact in zip(actual, _expected(ranks, case, Delayed(0)), strict=True):
        # The rows of the first batch of the stale part are fresh too.
        assert torch.equal(mine.losses[: 5 + 1], exact.losses[: 5 + 1])
        assert not torch.equal(mine.losses[5 + 1 : 5 + 3], exact.losses[5 + 1 : 5 + 3])


@pytest.mark.parametrize(
    ("switches", "defer_update", "num_ranks"),
    pairwise([(1, 2), (2, 3), (0, 1), (3, 5), (13, 14), (12, 13), (40, 50)], [False, True], [1, 2]),
    ids=str,
)
def test_switches_close_to_each_other_and_to_the_ends(
    get_ranks: Callable[..., Ranks], switches: tuple[int, int], defer_update: bool, num_ranks: int
) -> None:
    """Shorter than the staleness, at the first batches (which show what feeds which module), at the last one."""
    start, end = switches
    options = {"staleness": 4, "start_batch": start, "end_batch": end, "defer_update": defer_update}
    _fit(get_ranks(num_ranks), MIXED, Switching(4, start, end), **options)


@deferred
def test_an_epoch_begins_anew_and_a_warm_up_does_not(ranks: Ranks, defer_update: bool) -> None:
    """Batches are counted over the epochs: the switch comes in the middle of the second of three."""
    for fresh, switches in (((6, 12), {}), ((*range(9), 12), {"start_batch": 8})):
        actual = ranks.run(asyncs.fit_epochs, MIXED, 6, 3, staleness=3, defer_update=defer_update, **switches)
        assert differences(actual, _expected(ranks, MIXED, Delayed(3, fresh), 18)) == [[]] * ranks.world_size


@pytest.mark.parametrize(
    "switches", [{}, {"defer_update": True}, {"start_batch": 4}, {"start_batch": 9, "defer_update": True}], ids=str
)
def test_going_on_from_a_checkpoint_begins_anew_there(ranks: Ranks, switches: Any, tmp_path: Path) -> None:
    """The lookups ahead are not in a checkpoint; where a warm-up stands is."""
    stop = 6
    seen = Delayed(3, fresh=(*range(switches.get("start_batch", 0) + 1), stop))
    expected = _expected(ranks, ROWWISE_ADAGRAD, seen, 16)
    ranks.run(asyncs.fit_and_save, ROWWISE_ADAGRAD, 16, stop, str(tmp_path), staleness=3, **switches)
    resumed = ranks.run(asyncs.go_on, ROWWISE_ADAGRAD, 16, stop, str(tmp_path), staleness=3, **switches)
    rest = [dataclasses.replace(whole, losses=whole.losses[stop:]) for whole in expected]
    assert differences(resumed, rest) == [[]] * ranks.world_size


_SWITCHES = {"staleness": 4, "start_batch": 5, "end_batch": 10}


@deferred
@pytest.mark.parametrize(
    ("options", "seen", "num_steps"),
    [
        ({**_SWITCHES, "val_check_interval": 3, "limit_val_batches": 2}, Switching(4, 5, 10), NUM_STEPS),
        ({"staleness": 5, "start_batch": 2, "max_steps": 9, "max_epochs": -1}, Delayed(5, fresh=(0, 1, 2)), 9),
    ],
    ids=["validation", "max_steps"],
)
def test_what_comes_between_leaves_training_alone(
    two_ranks: Ranks, options: dict[str, Any], seen: Seen, num_steps: int, defer_update: bool
) -> None:
    assert len(_fit(two_ranks, MIXED, seen, num_steps, defer_update=defer_update, **options)) == 2


@pytest.mark.parametrize("lengths", [(7, 5), (3, 9), (1, 9)], ids=str)
def test_ranks_with_unequal_data_end_together(two_ranks: Ranks, lengths: tuple[int, int]) -> None:
    num = min(lengths)
    for options in ({}, {"defer_update": True}, {"start_batch": 2}, {"start_batch": num}):
        for seen, _ in two_ranks.run(uneven.train, Mode("async_lookup", staleness=6, **options), lengths, True):
            steps = [entry[:2] for entry in seen if entry != "validation"]
            assert steps == [(epoch, index) for epoch in range(2) for index in range(num)]
