"""What a step leaves out of Lightning's has no effect: logged values, hooks and signatures are as under DDPStrategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.plugin import shortcuts

from ..support.ranks import Ranks
from . import logs

EARLY = "fused_sparse_dist"


@pytest.mark.smoke
def test_logged_values_are_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """By step and by epoch, reduced in every way, synchronized, metrics of all kinds, resumed in an epoch's middle."""
    expected, actual = (
        ranks.run(logs.logged_in_every_manner, p, logs.folder_of(tmp_path / str(p))) for p in (None, EARLY)
    )
    for (shown, pages), (theirs, their_pages) in zip(actual, expected, strict=True):
        assert len(theirs) > 60
        assert {"both_epoch", "val_both_epoch", "synced_step", "b", "mean_epoch"} <= theirs[-2][1].keys()
        assert shown == theirs
        assert pages == their_pages


def test_values_are_moved_when_they_first_come(get_ranks: Any) -> None:
    ranks = get_ranks(1)
    [(num, steps)], [(quick, same)] = (ranks.run(logs.num_moves, p) for p in (None, EARLY))
    assert steps == same == logs.NUM_BATCHES
    assert num >= 2 * steps
    assert quick <= 4


def test_values_of_another_device_are_moved() -> None:
    where = logs.moved_between_devices(quick=True)
    assert where == logs.moved_between_devices(quick=False)
    assert [set(one) for one in where] == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


@pytest.mark.smoke
def test_hooks_that_come_in_the_middle_of_a_run_are_called(get_ranks: Any) -> None:
    ranks = get_ranks(1)
    [expected], [actual] = (ranks.run(logs.hooks_that_come_late, p) for p in (None, EARLY))
    assert actual == expected
    assert len([name for name, _ in actual if name.startswith("profiler")]) > 10
    kinds = {name.rsplit(" ", 1)[0] for name, _ in actual}
    assert kinds == {
        "callback's instance",
        "in the same hook",
        "module's instance",
        "module's class",
        "strategy",
        "profiler",
    }


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_lightning_gets_everything_back(get_ranks: Any, fails: bool) -> None:
    assert get_ranks(1).run(logs.left_behind, fails) == [[]]


def test_a_trainer_that_says_itself_whether_it_trains_is_asked(get_ranks: Any) -> None:
    assert get_ranks(1).run(logs.asked_of_a_subclass) == [True]


@pytest.mark.smoke
def test_only_hooks_that_do_nothing_are_left_out() -> None:
    names = {hook.__qualname__ for hook in shortcuts._empty_hooks()}
    in_each_step = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end")
    assert {f"{cls}.{hook}" for cls in ("Callback", "ModelHooks") for hook in in_each_step} <= names
    assert "Strategy.on_train_batch_start" in names
    assert not {name for name in names if "transfer" in name or "optimizer_step" in name} - {
        "Callback.on_before_optimizer_step",
        "ModelHooks.on_before_optimizer_step",
    }
