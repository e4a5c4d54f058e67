"""`pipeline="auto"` trains as the plain loop does, bit for bit, across its switches; all ranks choose alike."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap import MODES
from lightning_overlap.tuning import TRIED, Arm, Auto

from ..laws.accumulated import ALL_KINDS
from ..support.cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case
from ..support.ranks import Ranks
from ..support.reference import Result, train
from ..support.windows import Window, train_windows, windows_of
from . import autos
from .autos import NUM_STEPS

MS: dict[str, tuple[float, ...]] = {
    "fused_sparse_dist": (8.0,),
    "fused_sparse_dist_after_optimizer": (9.0,),
    "split_backward": (8.5,),
    "sparse_dist": (6.0,),
    "base": (10.0,),
}  # what a batch takes in each mode, as the clock says
ONE_ROUND = Auto(warm_up=1, settle=1, block=2, rounds=1)  # too few blocks to compare: there is one more round


def _two_rounds(ranks: Ranks, *, splits: bool = True, block: int = 3) -> list[str]:
    """The modes of the warm-up and of two rounds; one rank on a CPU waits for nobody, so it splits no backward."""
    tried = [mode for mode in MS if mode != "split_backward" or (splits and ranks.world_size > 1)]
    return ["fused_sparse_dist", *[mode for mode in [*tried, *tried[1:], *tried[:1]] for _ in range(block)]]


def _chosen(ranks: Ranks, mode: str = "sparse_dist", *, splits: bool = True) -> list[str]:
    modes = _two_rounds(ranks, splits=splits)
    return [*modes, *[mode] * (NUM_STEPS - len(modes))]


def _trained(ranks: Ranks, case: Case) -> list[Result]:
    return ranks.run_once(train, case, num_steps=NUM_STEPS)


def _check(ranks: Ranks, fits: list[autos.Fit], expected: list[Result], modes: list[str] | None = None) -> None:
    for fit, theirs in zip(fits, expected, strict=True):
        assert fit.result.differences(theirs) == []
        assert fit.modes == fits[0].modes
        if modes is not None:
            assert fit.modes == modes
    assert len(fits) == ranks.world_size


@pytest.mark.parametrize("case", [ALL_KINDS, SEQUENCE, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_equals_the_plain_loop_across_its_switches(ranks: Ranks, case: Case) -> None:
    fits = ranks.run(autos.train, case, MS)
    _check(ranks, fits, _trained(ranks, case), _chosen(ranks))


@pytest.mark.parametrize("model", ["manual", "makes_input"])
def test_manual_optimization_and_modules_that_run_their_own_forward(two_ranks: Ranks, model: str) -> None:
    fits = two_ranks.run(autos.train, MIXED, MS, model=model)
    assert fits[0].modes == _chosen(two_ranks, splits=model != "manual")
    if model == "makes_input":
        _check(two_ranks, fits, _trained(two_ranks, MIXED))


def test_accumulated_gradients(ranks: Ranks) -> None:
    """Blocks are as long as whole optimizer steps: 4 batches in the place of 2, so that nothing is chosen here."""
    fits = ranks.run(autos.train, ALL_KINDS, MS, accumulate_grad_batches=4)
    expected = ranks.run_once(train_windows, ALL_KINDS, windows_of(NUM_STEPS, 4))
    modes = _two_rounds(ranks, block=5)
    _check(ranks, fits, expected, modes[:NUM_STEPS])
    assert fits[0].state == {}
    assert f"training ended before a mode was chosen. A choice takes {len(modes)} batches of a fit" in fits[0].log
    assert "7 blocks of 5 batches were finished, 0 of them disturbed" in fits[0].log


def test_evaluations_and_ends_of_epochs_void_blocks_and_change_nothing(ranks: Ranks) -> None:
    """Three epochs of ten batches, an evaluation after every fifth one: both blocks of two of four modes are void."""
    whole = {"find_unused_parameters": True}  # no backward is split
    kwargs: dict[str, Any] = {"num_steps": 10, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    ms = {**MS, "base": (1.0,)}
    fits = ranks.run(autos.train, ALL_KINDS, ms, auto=ONE_ROUND, val_check_interval=5, options=whole, **kwargs)
    expected = ranks.run_once(train, ALL_KINDS, num_steps=30)
    _check(ranks, fits, expected, _chosen(ranks, splits=False)[:30])
    counted = [line.split()[4] for line in fits[0].log.splitlines()[4:]]
    assert counted == ["2", "0", "2", "0"]


def test_batches_that_are_none_are_skipped_and_count_in_no_block(two_ranks: Ranks) -> None:
    nones, num_steps = (3, 20), NUM_STEPS + 2
    fits = two_ranks.run(autos.train, ALL_KINDS, MS, num_steps=num_steps, nones=nones)
    windows = [Window((index,), 1) for index in range(num_steps) if index not in nones]
    expected = two_ranks.run_once(train_windows, ALL_KINDS, windows)
    for fit, theirs in zip(fits, expected, strict=True):
        assert fit.result.differences(theirs) == []
        assert fit.modes == fits[0].modes
        assert fit.state["mode"] == "sparse_dist"


def test_all_ranks_choose_alike_though_they_measure_different_times(two_ranks: Ranks) -> None:
    """Each rank alone would take another mode; the slowest rank's time counts."""
    ms = dict(zip(MS, [(8.0, 8.0), (3.0, 10.0), (9.0, 2.0), (7.0, 7.0), (10.0, 3.0)], strict=True))
    fits = two_ranks.run(autos.train, TABLE_WISE, ms)
    _check(two_ranks, fits, _trained(two_ranks, TABLE_WISE), _chosen(two_ranks))
    assert [bool(fit.log) for fit in fits] == [True, False]
    _, words, _, _, *rows = fits[0].log.splitlines()
    assert words.startswith("pipeline='auto': sparse_dist, stream data_dist: it is the fastest.")
    assert rows[2].split() == ["split_backward", "data_dist", "9.00", "0.00", "2", "3"]
    assert rows[3].split() == ["sparse_dist", "data_dist", "7.00", "0.00", "2", "3", "chosen"]


@pytest.mark.parametrize("stop", [8, 33], ids=["in the trial", "after the choice"])
def test_a_resumed_run_goes_on_with_the_choice(ranks: Ranks, stop: int, tmp_path: Path) -> None:
    """Of two ranks a split backward, where it is the fastest."""
    ms, chosen = ({**MS, "split_backward": (5.0,)}, "split_backward") if ranks.world_size > 1 else (MS, "sparse_dist")
    expected = _trained(ranks, ALL_KINDS)
    runs = ranks.run(autos.save_and_go_on, ALL_KINDS, ms, stop, str(tmp_path))
    modes = _chosen(ranks, chosen)
    _check(ranks, [whole for whole, _ in runs], expected, modes if stop == 33 else None)  # a save voids a block
    for (whole, rest), theirs in zip(runs, expected, strict=True):
        assert rest.result.differences(dataclasses.replace(theirs, losses=theirs.losses[stop:])) == []
        if stop == 33:
            assert rest.modes == [chosen] * 3
            assert rest.state == whole.state
        else:
            assert rest.modes == modes[: NUM_STEPS - stop], "tried anew"
    if stop == 33:
        told = runs[0][1].log.splitlines()
        assert told[1] == f"pipeline='auto': {chosen}, stream data_dist, chosen before the checkpoint."
        assert told[2:] == runs[0][0].log.splitlines()[2:]


def test_streams_are_tried_after_the_modes(two_ranks: Ranks) -> None:
    """Between two streams one batch is trained under a table that looks nothing up ahead; lookups are moved then."""
    ms = {**MS, "fused_sparse_dist": (4.0,), "fused_sparse_dist/dedicated": (3.0,)}
    runs = two_ranks.run(autos.train_on_streams, TABLE_WISE, ms, num_steps=66)
    streams = ["data_dist", "current", "dedicated", "current", "dedicated", "data_dist", "dedicated"]
    bridged = ["sparse_dist", *["fused_sparse_dist"] * 3]
    kept = ["sparse_dist", *["fused_sparse_dist"] * 11]
    modes = [*_two_rounds(two_ranks), *["fused_sparse_dist"] * 3, *bridged * 5, *kept]
    names = {"data_dist": "data_dist", "current": "compute", "dedicated": "lookup"}
    _check(two_ranks, [fit for fit, _ in runs], two_ranks.run_once(train, TABLE_WISE, num_steps=66), modes)
    for fit, moves in runs:
        assert moves == [names[stream] for stream in streams]
        assert (fit.state["mode"], fit.state["stream"]) == ("fused_sparse_dist", "dedicated")
    # An evaluation before the batch between two streams voids a block, too.
    [(fit, _), _] = two_ranks.run(autos.train_on_streams, TABLE_WISE, ms, num_steps=42, val_check_interval=34)
    assert fit.modes[33:36] == ["fused_sparse_dist", "sparse_dist", "fused_sparse_dist"]
    assert "3 blocks of 3 batches were finished, 1 of them disturbed" in fit.log


@pytest.mark.parametrize("choice", ["base", None])
def test_only_a_choice_is_kept_and_not_for_another_module(two_ranks: Ranks, choice: str | None) -> None:
    tried = _two_rounds(two_ranks)[:8]
    own = tried if choice is None else [choice] * 8
    assert two_ranks.run(autos.train_again, TABLE_WISE, choice) == [[own, own, tried]] * 2


def test_where_every_block_is_disturbed_nothing_is_chosen(two_ranks: Ranks) -> None:
    fits = two_ranks.run(autos.train, TABLE_WISE, MS, auto=ONE_ROUND, val_check_interval=1)
    _check(two_ranks, fits, _trained(two_ranks, TABLE_WISE), _chosen(two_ranks, "fused_sparse_dist"))
    assert fits[0].state == {}
    assert "no choice was made, because evaluations, saves, ends of epochs or data loading disturbed" in fits[0].log


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="block of Auto must be a number >= 1, got 0"):
        Auto(block=0)


def test_what_is_tried_is_exact() -> None:
    assert set(TRIED) == {name for name, mode in MODES.items() if not mode.staleness} - {"prefetch"}
    assert [Arm(mode, "current").schedule.staleness for mode in TRIED] == [0] * len(TRIED)
