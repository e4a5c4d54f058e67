"""A preemption signal ends a step on all ranks: one whole checkpoint, one requeue, and the next start goes on."""

import dataclasses
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap import MODES

from ..checkpoint import object_store, stores
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from .preempted import IN_STORE, JOB, Life, Signal, live, live_and_break_a_save, live_in_store, live_with_own_handler

TERM = signal.SIGTERM
EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]


def requeued(folder: Path) -> list[str]:
    """Return how `scontrol` was called."""
    log = folder / "scontrol.log"
    return log.read_text().splitlines() if log.exists() else []


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "hpc" in path.name)


def differences(whole: Life, part: Life) -> list[str]:
    """Name what differs in a life that ends as an undisturbed one does, wherever it begins."""
    assert whole.result is not None
    assert part.result is not None
    losses = whole.result.losses[len(whole.seen) - len(part.seen) :] if part.seen else part.result.losses
    found = part.result.differences(dataclasses.replace(whole.result, losses=losses))
    for name in ("seen", "epochs", "validations"):
        mine, theirs = getattr(part, name), getattr(whole, name)
        if mine != theirs[len(theirs) - len(mine) :]:
            found.append(f"{name}: {mine} are not the last of {theirs}")
    if part.progress != whole.progress:
        found.append(f"progress: {part.progress} against {whole.progress}")
    return found


def assert_preempted(
    ranks: Ranks,
    folder: Path,
    pipeline: str,
    signals: list[Signal],
    *,
    starts_at: int | None = None,
    terminates: bool = False,
    calls: tuple[str, ...] = (f"requeue {JOB}",),
    **kwargs: Any,
) -> int:
    """Send signals; the fit goes on (unless it is terminated) and so does the next start. Return where that begins."""
    quiet = {name: value for name, value in kwargs.items() if name not in ("requeue_signal", "variables")}
    whole = ranks.run_once(live, None, pipeline, **quiet)
    first = ranks.run(live, str(folder), pipeline, signals, **kwargs)
    assert {life.handlers_are_back for life in first} == {True}
    assert {life.ended_by for life in first} == {"SIGTERMException" if terminates else ""}
    if not terminates:
        assert [differences(*pair) for pair in zip(whole, first, strict=True)] == [[]] * ranks.world_size
    assert (saved(folder), requeued(folder)) == (["hpc_ckpt_1.ckpt"] * len(calls), list(calls))
    again = ranks.run(live, str(folder), pipeline, **kwargs)
    if MODES[pipeline].staleness == 0:
        assert [differences(*pair) for pair in zip(whole, again, strict=True)] == [[]] * ranks.world_size
    assert requeued(folder) == list(calls)
    num_before = len(whole[0].seen) - len(again[0].seen)
    assert starts_at in (None, num_before)
    return num_before


@pytest.mark.parametrize(("pipeline", "rank"), in_turn(list(MODES), [0, 1]))
def test_every_mode(two_ranks: Ranks, pipeline: str, rank: int, tmp_path: Path) -> None:
    assert_preempted(two_ranks, tmp_path, pipeline, [Signal((rank,), "on_train_batch_start", 4)])


IN_BOTH = (0, 1)
PLACES: dict[str, tuple[list[Signal], dict[str, Any]]] = {
    "before the first step": ([Signal((1,), "on_train_start")], {}),
    "in the sanity check": ([Signal((0,), "sanity check")], {}),
    "far apart": ([Signal((0,), "on_train_batch_start", 2), Signal((1,), "on_train_batch_start", 13)], {}),
    "twice": ([Signal((0,), "on_train_batch_start", 2), Signal((0,), "on_train_batch_start", 5)], {}),
    "in a validation": ([Signal((1,), "on_validation_batch_end", 3)], {"num_validation": 12}),
    "in the validation at an epoch's end": (
        [Signal((1,), "on_validation_batch_end", 8)],
        {"val_check_interval": None, "num_validation": 12},
    ),
    "before the validation at an epoch's end": ([Signal((0,), "on_train_batch_end", 8)], {"val_check_interval": None}),
    "after a validation": ([Signal((1,), "on_validation_end", 6)], {}),
    "at every step a validation": ([Signal((1,), "on_train_batch_start", 3)], {"val_check_interval": 1}),
    "at an epoch's end": ([Signal((0,), "on_train_epoch_end", 8)], {}),
    "in the last step": ([Signal((0,), "on_train_batch_end", 16)], {}),
    "after the last step": ([Signal((1,), "on_train_end")], {}),
    "in a save of one rank": ([Signal((1,), "on_save_checkpoint", 4)], {"saves_every": 2}),
    "with asynchronous saves": (
        [Signal((1,), "on_save_checkpoint", 4)],
        {"saves_every": 2, "strategy": {"async_checkpoint": True}},
    ),
    "full files": ([Signal((0,), "on_train_batch_start", 2)], {"strategy": {"checkpoint_format": "full"}}),
    "in an accumulation": ([Signal((1,), "on_train_batch_start", 1)], {"accumulate_grad_batches": 3}),
    "without lengths": ([Signal((1,), "on_train_batch_start", 4)], {"loader": "own-unsized", "val_check_interval": 4}),
    "without epochs": ([Signal((1,), "on_train_epoch_end", 8)], {"max_steps": 12, "max_epochs": -1}),
    "at an early stop": ([Signal((1,), "on_train_batch_start", 5)], {"stops_after": 6}),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place(two_ranks: Ranks, place: str, tmp_path: Path) -> None:
    signals, kwargs = PLACES[place]
    assert_preempted(two_ranks, tmp_path, "fused_sparse_dist", signals, **kwargs)


def test_a_long_validation_is_not_awaited_but_repeated(two_ranks: Ranks, tmp_path: Path) -> None:
    signals, kwargs = PLACES["in a validation"]
    assert_preempted(two_ranks, tmp_path, "fused_sparse_dist", signals, starts_at=3, **kwargs)


@pytest.mark.parametrize(
    "place", ["in an accumulation", "in a validation", "after the last step", "with asynchronous saves"]
)
def test_one_rank(get_ranks: Callable[..., Ranks], place: str, tmp_path: Path) -> None:
    signals, kwargs = PLACES[place]
    signals = [one._replace(ranks=(0,)) for one in signals]
    assert_preempted(get_ranks(1), tmp_path, "fused_sparse_dist", signals, **kwargs)


TERMINATED: dict[str, list[Signal]] = {
    "later": [Signal((0,), "on_train_batch_start", 3), Signal(IN_BOTH, "on_train_batch_start", 6, TERM)],
    "at once": [Signal((0,), "on_train_batch_start", 4), Signal((0,), "on_train_batch_start", 4, TERM)],
    "on the other rank": [Signal((0,), "on_train_batch_start", 4), Signal((1,), "on_train_batch_start", 4, TERM)],
    "in a validation": [Signal((0,), "on_validation_batch_end", 3), Signal((1,), "on_validation_batch_end", 3, TERM)],
    "in the sanity check": [Signal((1,), "sanity check"), Signal(IN_BOTH, "sanity check", 0, TERM)],
    "at an epoch's end": [Signal((0,), "on_train_epoch_end", 8), Signal((1,), "on_train_epoch_end", 8, TERM)],
}


@pytest.mark.parametrize(
    ("when", "limits"),
    [
        *((when, {}) for when in TERMINATED),
        *((when, {"max_steps": 12, "max_epochs": -1}) for when in ("in the sanity check", "at an epoch's end")),
    ],
)
def test_sigterm_after_it(two_ranks: Ranks, when: str, limits: dict[str, int], tmp_path: Path) -> None:
    """A requeued job gets SIGTERM at once; no rank ends before the checkpoint is saved."""
    kwargs: dict[str, Any] = {"num_validation": 12, **limits}
    assert_preempted(two_ranks, tmp_path, "fused_sparse_dist", TERMINATED[when], terminates=True, **kwargs)


@pytest.mark.parametrize("when", ["at once", "at an epoch's end"])
def test_sigterm_after_it_on_one_rank(get_ranks: Callable[..., Ranks], when: str, tmp_path: Path) -> None:
    signals = [one._replace(ranks=(0,)) for one in TERMINATED[when]]
    assert_preempted(get_ranks(1), tmp_path, "fused_sparse_dist", signals, terminates=True)


def test_any_signal_and_jobs_of_an_array(two_ranks: Ranks, tmp_path: Path) -> None:
    signals = [Signal((1,), "on_train_batch_start", 2, signal.SIGUSR2)]
    variables = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
    options = {"requeue_signal": signal.SIGUSR2, "variables": variables, "calls": ("requeue 9_3",)}
    assert_preempted(two_ranks, tmp_path, "fused_sparse_dist", signals, **options)


def test_a_requeue_by_sigterm(two_ranks: Ranks, tmp_path: Path) -> None:
    signals = [Signal((1,), "on_train_batch_start", 2, TERM)]
    assert_preempted(two_ranks, tmp_path, "fused_sparse_dist", signals, terminates=True, requeue_signal=TERM)


def test_a_handler_of_the_user_is_left_in_place(two_ranks: Ranks, tmp_path: Path) -> None:
    """Lightning then requeues nothing."""
    signals = [Signal((0,), "on_train_batch_start", 4)]
    told = two_ranks.run(live_with_own_handler, str(tmp_path), "fused_sparse_dist", signals)
    assert told == [(True, [signal.SIGUSR1]), (True, [])]
    assert (saved(tmp_path), requeued(tmp_path)) == ([], [])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("entry", "batch"), [("test", 1), ("validate", 0)])
def test_an_evaluation_without_a_fit(
    get_ranks: Callable[..., Ranks], num_ranks: int, entry: str, batch: int, tmp_path: Path
) -> None:
    place = {"test": "on_test_batch_end", "validate": "on_validation_batch_end"}[entry]
    get_ranks(num_ranks).run(live, str(tmp_path), "fused_sparse_dist", [Signal((0,), place, batch)], entry=entry)
    assert (saved(tmp_path), requeued(tmp_path)) == (["hpc_ckpt_1.ckpt"], [f"requeue {JOB}"])


def test_a_save_that_was_killed_is_not_taken_for_a_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    """Lightning's search for the checkpoints of requeued jobs takes every name with "hpc_ckpt_" in it."""
    how = str(tmp_path), "fused_sparse_dist"
    assert_preempted(two_ranks, tmp_path, how[1], [Signal((0,), "on_train_batch_start", 2)])
    second = two_ranks.run(live_and_break_a_save, *how, [Signal((0,), "on_train_batch_start", 6)])
    assert {life.ended_by for life in second} == {"OSError"}
    assert len(list(tmp_path.glob(".*.unfinished"))) == 1
    third = two_ranks.run(live, *how)
    assert [life.seen[0] for life in third] == [life.seen[0] for life in second]
    assert requeued(tmp_path) == [f"requeue {JOB}"]


@pytest.mark.parametrize(
    "strategy",
    [{}, {"async_checkpoint": True}, {"checkpoint_format": "incremental"}, {"checkpoint_format": "full"}],
    ids=str,
)
def test_a_job_whose_checkpoints_are_in_an_object_store(
    two_ranks: Ranks, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """It goes on from the newest whole one, also after a second preemption that the store did not let save."""
    store, where = str(tmp_path / "store"), str(tmp_path)
    mode, options = "fused_sparse_dist", {"strategy": strategy}
    whole = two_ranks.run_once(live, None, mode, **options)
    first = two_ranks.run(live_in_store, store, where, "", mode, [Signal((1,), "on_train_batch_start", 2)], **options)
    assert [differences(*pair) for pair in zip(whole, first, strict=True)] == [[], []]
    with object_store.store_in(store):
        assert stores.names_in(IN_STORE) == ["hpc_ckpt_1.ckpt"]
    assert (saved(tmp_path), requeued(tmp_path)) == ([], [f"requeue {JOB}"])
    again = [Signal((0,), "on_train_batch_start", 6)], "hpc_ckpt_2"
    ends = [life.ended_by for life in two_ranks.run(live_in_store, store, where, again[1], mode, again[0], **options)]
    assert ends == ["OSError"] * 2
    third = two_ranks.run(live_in_store, store, where, "", mode, **options)
    assert [differences(*pair) for pair in zip(whole, third, strict=True)] == [[], []]
    assert [len(of_whole.seen) - len(life.seen) for of_whole, life in zip(whole, third, strict=True)] == [3, 3]
    assert requeued(tmp_path) == [f"requeue {JOB}"]


RANDOM: tuple[dict[str, Any], ...] = (
    {},
    {"saves_every": 2, "strategy": {"async_checkpoint": True}},
    {"val_check_interval": None},
    {"loader": "own-unsized", "val_check_interval": 4},
    {"max_steps": 13, "max_epochs": -1},
    {"accumulate_grad_batches": 2},
)


@pytest.mark.slow
def test_random_pairs_of_times(two_ranks: Ranks, tmp_path: Path) -> None:
    draw, num_saved = random.Random(7), 0
    for number in range(6):
        pipeline, kwargs = EXACT[number % len(EXACT)], {**RANDOM[number % len(RANDOM)], "step_s": 0.004}
        whole = two_ranks.run_once(live, None, pipeline, **kwargs)
        whole_s = max(life.seconds for life in whole)
        first_s = draw.uniform(0, 0.7 * whole_s)
        times = [first_s, first_s + draw.choice([0.0, 0.002, 0.13, draw.uniform(0, 0.5 * whole_s)])]
        draw.shuffle(times)
        folder = tmp_path / str(number)
        folder.mkdir()
        signals = [Signal((rank,), after_s=time_s) for rank, time_s in enumerate(times)]
        for given in (signals, []):
            lives = two_ranks.run(live, str(folder), pipeline, given, **kwargs)
            assert [differences(*pair) for pair in zip(whole, lives, strict=True)] == [[], []], (number, times)
        assert len(saved(folder)) == len(requeued(folder)) <= 1
        num_saved += len(saved(folder))
    assert num_saved > 2  # the other signals came after the last step
