"""`stash_gradients` equals a plain loop that applies the dense gradients of k steps before, and loses none."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import Mode

from ..support import reference
from ..support.cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case
from ..support.ranks import Ranks
from ..support.reference import Delayed, Result, Seen, Switching, Waiting, Waits, differences
from . import asyncs, caller_fits


def _expected(ranks: Ranks, case: Case, seen: Seen, waiting: Waiting, **options: Any) -> list[Result]:
    options = {"num_steps": asyncs.NUM_STEPS, **options}
    return ranks.run_once(reference.train_delayed, case, seen, waiting=waiting, **options)


@pytest.mark.parametrize("case", [TABLE_WISE, MIXED, SEQUENCE], ids=lambda case: case.name)
@pytest.mark.parametrize("staleness", [1, 3])
def test_equals_a_plain_loop_that_steps_as_late(ranks: Ranks, case: Case, staleness: int) -> None:
    actual = ranks.run(asyncs.fit, case, staleness=staleness, stash_gradients=True)
    seen = Delayed(staleness)
    assert differences(actual, _expected(ranks, case, seen, Waits(staleness))) == [[]] * ranks.world_size
    for other in (staleness - 1, staleness + 1):  # and one step earlier or later is seen
        for found in differences(actual, _expected(ranks, case, seen, Waits(other))):
            assert any(text.startswith("losses from step") for text in found)


def test_the_last_gradients_are_not_lost(ranks: Ranks) -> None:
    """As many batches as are stashed: all that the dense part learns, it learns at the end."""
    actual = ranks.run(asyncs.fit, TABLE_WISE, staleness=4, stash_gradients=True, num_steps=4)
    expected = _expected(ranks, TABLE_WISE, Delayed(4), Waits(4), num_steps=4)
    assert differences(actual, expected) == [[]] * ranks.world_size
    untrained = _expected(ranks, TABLE_WISE, Delayed(4), Waits(4), num_steps=1)
    assert any(not torch.equal(actual[0].dense[name], untrained[0].dense[name]) for name in actual[0].dense)


@pytest.mark.parametrize(
    "options", [{"defer_update": True}, {"gradient_as_bucket_view": True}, {"gradient_clip_val": 0.01}], ids=str
)
def test_with_other_options(ranks: Ranks, options: dict[str, Any]) -> None:
    """Gradients are clipped where they are applied."""
    clip = options.get("gradient_clip_val")
    actual = ranks.run(asyncs.fit, MIXED, staleness=2, stash_gradients=True, **options)
    assert differences(actual, _expected(ranks, MIXED, Delayed(2), Waits(2), clip=clip)) == [[]] * ranks.world_size
    assert clip is None or all(differences(actual, _expected(ranks, MIXED, Delayed(2), Waits(2))))


@pytest.mark.parametrize(("start", "end"), [(5, 10), (0, 2), (13, 14)])
def test_at_once_before_the_start_and_after_the_end(ranks: Ranks, start: int, end: int) -> None:
    actual = ranks.run(asyncs.fit, MIXED, staleness=4, stash_gradients=True, start_batch=start, end_batch=end)
    expected = _expected(ranks, MIXED, Switching(4, start, end), Waits(4, start, end))
    assert differences(actual, expected) == [[]] * ranks.world_size


def test_an_epoch_does_not_begin_anew(ranks: Ranks) -> None:
    actual = ranks.run(asyncs.fit_epochs, MIXED, 6, 3, staleness=3, stash_gradients=True)
    expected = _expected(ranks, MIXED, Delayed(3, fresh=(6, 12)), Waits(3), num_steps=18)
    assert differences(actual, expected) == [[]] * ranks.world_size


@pytest.mark.parametrize("case", [MIXED, ROWWISE_ADAGRAD], ids=lambda case: case.name)
@pytest.mark.parametrize("goes_on", [True, False], ids=["stashing", "at once"])
def test_a_checkpoint_holds_what_waits(ranks: Ranks, case: Case, goes_on: bool, tmp_path: Path) -> None:
    """And a run that stashes nothing applies it, in its first step."""
    stop = 6
    waiting = Waits(3) if goes_on else Waits(3, end=stop + 1)
    expected = _expected(ranks, case, Delayed(3, fresh=(0, stop)), waiting, num_steps=16)
    ranks.run(asyncs.fit_and_save, case, 16, stop, str(tmp_path), staleness=3, stash_gradients=True)
    resumed = ranks.run(asyncs.go_on, case, 16, stop, str(tmp_path), staleness=3, stash_gradients=goes_on)
    rest = [dataclasses.replace(whole, losses=whole.losses[stop:]) for whole in expected]
    assert differences(resumed, rest) == [[]] * ranks.world_size


def test_an_optimizer_that_asks_twice_is_refused(get_ranks: Any) -> None:
    [text] = get_ranks(1).run(caller_fits.fails, "two_closures", "async_lookup", stash_gradients=True)
    assert "Twice asks for its gradients several times" in text


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "prefetch"])
def test_a_mode_without_staleness_is_refused(pipeline: str) -> None:
    with pytest.raises(ValueError, match=f"stash_gradients: '{pipeline}' has a staleness of 0.*semi_sync"):
        Mode(pipeline, stash_gradients=True)
