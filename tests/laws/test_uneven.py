"""Law 8: when one rank's data ends first, or one rank is told to stop, all end after the same step and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..support.pairs import pairwise
from ..support.ranks import RankError, Ranks
from ..support.reference import differences
from . import uneven

PIPELINES = ["base", "sparse_dist", "fused_sparse_dist", "semi_sync"]


def _epochs(num_batches: int, val_every: int | None = None) -> list[Any]:
    """What two epochs of a rank look like, with a validation at their end, or every so many batches."""
    seen: list[Any] = []
    for epoch in range(2):
        for index in range(num_batches):
            last = index + 1 == num_batches
            seen.append((epoch, index, index, last))
            if last if val_every is None else (index + 1) % val_every == 0:
                seen.append("validation")
    return seen


@pytest.mark.parametrize(
    ("pipeline", "lengths", "sized"),
    pairwise(PIPELINES, [(7, 5), (5, 7), (5, 6), (1, 9), (6, 6)], [True, False]),
    ids=str,
)
def test_ranks_end_together(two_ranks: Ranks, pipeline: str, lengths: tuple[int, ...], sized: bool) -> None:
    for rank, (seen, said) in enumerate(two_ranks.run(uneven.train, pipeline, lengths, sized)):
        assert seen == _epochs(min(lengths))
        if lengths[rank] > min(lengths):
            assert f"Rank {rank} has" in said[0]
        else:
            assert said == []


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_ranks_without_lengths_end_together_past_batches_that_are_none(two_ranks: Ranks, pipeline: str) -> None:
    layouts = [
        ((12, 12), ((), ())),
        ((12, 12), ((4, 5, 11), ())),
        ((9, 12), ((), (9, 10, 11))),
        ((12, 8), ((10, 11), (0, 3, 6, 7))),
        ((6, 9), ((), (1, 2, 4))),
    ]
    for lengths, nones in layouts:
        real = [[index for index in range(lengths[rank]) if index not in nones[rank]] for rank in range(2)]
        fewest = min(map(len, real))
        runs = two_ranks.run(uneven.train_past_nones, pipeline, lengths, nones)
        assert [trained for trained, _ in runs] == [one[:fewest] for one in real], (lengths, nones)
        num_asked = {num for _, num in runs}
        assert len(num_asked) == 1
        if nones == ((), ()):
            assert num_asked.pop() <= fewest / 2 + 2


def test_the_last_step_comes_after_a_batch_that_is_none_on_one_rank(two_ranks: Ranks) -> None:
    """The ranks agree on how many batches are left, though one of them begins its epoch with none to train."""
    nones = ((0, 3), ())
    runs = two_ranks.run(uneven.train_past_nones, "fused_sparse_dist", (9, 6), nones, max_steps=7, max_epochs=3)
    assert [trained for trained, _ in runs] == [[1, 2, 4, 5, 6, 7, 1], [0, 1, 2, 3, 4, 5, 0]]


SKIPPED = {
    "by_one": ((9, 9), ((2,), ())),
    "other_numbers": ((9, 6), ((4,), (1, 4))),
    "other_places": ((9, 9), ((2,), (5,))),
    "the_last": ((9, 9), ((5, 6, 7, 8), ())),
    "many_last": ((40, 40), ((5, *range(28, 40)), ())),
    "past_the_end_of_another": ((8, 8), ((4,), (0, 1, 2, 4, 6, 7))),
}
"""Lengths, and the batches of each rank that are None."""


@pytest.mark.parametrize(("pipeline", "name", "sized"), pairwise([*PIPELINES, "auto"], SKIPPED, [True, False]))
def test_ranks_that_skip_other_batches_validate_together(
    two_ranks: Ranks, pipeline: str, name: str, sized: bool
) -> None:
    """At the end of their epoch, which no rank's count of batches tells the others."""
    lengths, nones = SKIPPED[name]
    shortest = min(lengths) if sized else max(lengths)
    real = [[index for index in range(min(lengths[rank], shortest)) if index not in nones[rank]] for rank in range(2)]
    fewest = min(map(len, real))
    seen = two_ranks.run(uneven.train_and_validate_past_nones, pipeline, lengths, nones, sized, timeout_s=30)
    assert seen == [[*one[:fewest], "validation"] * 2 for one in real]


def test_a_rank_that_has_hardly_anything_to_train_says_so(two_ranks: Ranks) -> None:
    """The ranks ask each other now and then, where they know how many batches there are."""
    args = ("fused_sparse_dist", (20, 20), (tuple(range(3, 20)), ()), True)
    with pytest.raises(RankError, match="rank 0 has only 3 batches to train of the 20"):
        two_ranks.run(uneven.train_and_validate_past_nones, *args, timeout_s=30)


def test_limited_ranks_that_skip_other_batches_validate_together(two_ranks: Ranks) -> None:
    for pipeline in PIPELINES:
        args = (pipeline, (13, 11), ((2,), (0, 1, 2)), False)
        seen = two_ranks.run(uneven.train_and_validate_past_nones, *args, limit_train_batches=4, timeout_s=30)
        assert seen == [[0, "validation"] * 2, [3, "validation"] * 2]


@pytest.mark.parametrize(("pipeline", "sized"), [(one, sized) for one in PIPELINES[::2] for sized in (True, False)])
def test_ranks_that_skip_alike_validate_as_lightning_counts(two_ranks: Ranks, pipeline: str, sized: bool) -> None:
    """A batch that is None is one of the interval, also where it is another one on each rank."""
    run, lengths = uneven.train_and_validate_past_nones, (10, 10)
    v = "validation"
    expected = [0, 1, v, 4, 5, 6, 7, v, 8, 9]
    assert two_ranks.run(run, pipeline, lengths, ((2, 3), (2, 3)), sized, val_check_interval=4) == [expected * 2] * 2
    over = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    over_epochs = [0, 1, v, 4, 5, 6, 7, v, 8, 9, 0, 1, v, 4, 5, v, 6, 7, 8, 9, v]
    assert two_ranks.run(run, pipeline, lengths, ((2, 3), (2, 3)), sized, **over) == [over_epochs] * 2
    first, second = two_ranks.run(run, pipeline, lengths, ((1,), (0,)), sized, val_check_interval=4, max_epochs=1)
    assert first == [0, 2, 3, v, 4, 5, 6, 7, v, 8, 9]
    assert second == [1, *first[1:]]


@pytest.mark.parametrize(
    ("pipeline", "sized", "nones"), pairwise(PIPELINES[::2], [True, False], [((2,), (5,)), ((3,), ()), ((), (1, 2))])
)
def test_ranks_that_skip_others_are_told_before_a_validation(
    two_ranks: Ranks, pipeline: str, sized: bool, nones: tuple[tuple[int, ...], ...]
) -> None:
    """With plain DDP they wait for each other, at a broadcast that Lightning makes with each batch."""
    args = (pipeline, (10, 10), nones, sized)
    rank, num = (1, 2) if nones[1] == (1, 2) else (0, 1)
    said = f"rank {rank} comes to a validation after {4 - num} batches of an epoch and {num} that are None, "
    with pytest.raises(RankError, match=f"{said}rank {1 - rank} has skipped 0 by then"):
        two_ranks.run(uneven.train_and_validate_past_nones, *args, val_check_interval=4, timeout_s=30)


def _windows(
    lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], k: int, max_epochs: int, max_steps: int
) -> list[tuple[list[int], ...]]:
    """Each rank's batches of each optimizer step: a None counts in it where every rank has skipped as many."""
    real = [[index for index in range(lengths[rank]) if index not in nones[rank]] for rank in range(2)]
    fewest, steps = min(map(len, real)), []
    for _ in range(max_epochs):
        window: list[int] = []
        for place in range(fewest):
            number = place + min(one[place] - place for one in real)
            assert (number % k == 0) == (not window), "a None of all ranks takes a step's place"
            window = [*window, place]
            if (number + 1) % k == 0 or place + 1 == fewest:
                steps.append(tuple([one[index] for index in window] for one in real))
                window = []
    return steps[:max_steps] if max_steps > 0 else steps


ACCUMULATED = {
    "hardly_any": ((9, 1), ((1, 2, 3, 4, 6, 7, 8), ()), 3, 2, 2),
    "by_one": ((9, 9), ((2,), ()), 3, 1, -1),
    "other_numbers": ((9, 6), ((4,), (1, 4)), 2, 2, -1),
    "in_one_window": ((9, 9), ((1,), (2,)), 4, 1, -1),
    "the_last": ((9, 9), ((5, 6, 7, 8), ()), 2, 2, -1),
    "the_first": ((9, 12), ((0, 1), (4,)), 3, 3, 5),
    "many": ((12, 12), ((1, 3, 5, 7), (2, 9)), 4, 2, 3),
}
"""Lengths, each rank's batches that are None, batches for an optimizer step, epochs, steps."""


@pytest.mark.parametrize("name", ACCUMULATED)
def test_ranks_that_skip_other_batches_step_together(two_ranks: Ranks, name: str) -> None:
    lengths, nones, k, max_epochs, max_steps = ACCUMULATED[name]
    limits = {"max_epochs": max_epochs, "max_steps": max_steps, "timeout_s": 30}
    for pipeline, swap, frozen in [("base", 1, False), ("sparse_dist", -1, True), ("fused_sparse_dist", 1, False)]:
        windows = _windows(lengths[::swap], nones[::swap], k, max_epochs, max_steps)
        args = (pipeline, lengths[::swap], nones[::swap], windows, k)
        runs = two_ranks.run(uneven.accumulate_past_nones, *args, frozen_window=frozen, **limits)
        assert runs == [([], len(windows))] * 2


def test_ranks_that_skip_a_whole_window_catch_up_together(two_ranks: Ranks) -> None:
    """More batches are needed than `max_steps` let them look ahead for, and the data of one ends meanwhile."""
    limits = {"accumulate_grad_batches": 2, "max_epochs": 2, "max_steps": 2, "timeout_s": 30}
    for pipeline in ("base", "fused_sparse_dist"):
        nones = ((0, 1, 2, 4), (1, 2, 3, 8))
        runs = two_ranks.run(uneven.train_past_nones, pipeline, (7, 9), nones, **limits)
        assert [trained for trained, _ in runs] == [[3, 5, 6] * 2, [0, 4, 5] * 2]


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_ranks_with_lengths_that_skip_other_batches_are_told_before_a_step(two_ranks: Ranks, pipeline: str) -> None:
    """They ask each other now and then. What they skip alike, or in one window, they count as Lightning does."""
    for nones, k in [(((6,), (6,)), 4), (((5,), (6,)), 4)]:
        windows = _windows((20, 20), nones, k, 1, -1)
        args = (pipeline, (20, 20), nones, windows, k)
        assert two_ranks.run(uneven.accumulate_past_nones, *args, sized=True) == [([], len(windows))] * 2
    said = "rank 1 has taken 4 batches of an epoch and skipped 1 that are None, rank 0 has skipped 0 by then"
    args = (pipeline, (20, 20), ((), (3,)), [], 4)
    with pytest.raises(RankError, match=said):
        two_ranks.run(uneven.accumulate_past_nones, *args, sized=True, timeout_s=30)


def _decayed(
    lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], k: int, frequency: int, max_epochs: int
) -> list[tuple[int, tuple[list[int], ...]]]:
    """Each optimizer step: how often the scheduler has stepped before it, and each rank's batches."""
    real = [[index for index in range(lengths[rank]) if index not in nones[rank]] for rank in range(2)]
    fewest, steps, num_decays = min(map(len, real)), [], 0
    before = [min(one[place] - place for one in real) for place in range(fewest)]  # None that all ranks have skipped
    at_end = min(lengths[rank] - 1 - one[-1] if len(one) == fewest else 0 for rank, one in enumerate(real))
    events: list[int | None] = [None] * before[0]
    for place, end in enumerate([*before[1:], before[-1] + at_end]):
        events += [place, *[None] * (end - before[place])]
    for _ in range(max_epochs):
        window: list[int] = []
        for number, place in enumerate(events, 1):
            window += [] if place is None else [place]
            if number % k == 0 or number == len(events):
                if place is not None:
                    steps.append((num_decays, tuple([one[index] for index in window] for one in real)))
                window, num_decays = [], num_decays + (number % frequency == 0)
    return steps


DECAYED = {
    "by_one": ((9, 9), ((2,), ()), 1, 1),
    "by_one_in_windows": ((9, 9), ((2,), ()), 2, 1),
    "one_later": ((9, 12), ((0, 1), (5,)), 1, 2),
    "one_later_in_windows": ((9, 12), ((0, 1), (4, 5)), 2, 1),
    "alike": ((8, 8), ((2, 3), (2, 3)), 1, 3),
    "alike_in_windows": ((8, 8), ((2, 3), (2, 3)), 2, 1),
    "the_last_of_one": ((9, 9), ((8,), ()), 1, 1),
    "other_numbers_of_last": ((9, 9), ((6, 7, 8), (2, 8)), 1, 1),
    "no_windows_end": ((7, 8), ((5, 6), (5, 7)), 4, 1),
    "after_the_last_window": ((6, 6), ((4, 5), (3, 5)), 4, 1),
}
"""Lengths, each rank's batches that are None, batches for an optimizer step, the frequency of the scheduler."""


@pytest.mark.parametrize("name", DECAYED)
def test_the_rates_of_ranks_that_skip_other_batches_move_alike(two_ranks: Ranks, name: str) -> None:
    lengths, nones, k, frequency = DECAYED[name]
    steps = _decayed(lengths, nones, k, frequency, 2)
    for swap in (1, -1):
        expected = two_ranks.run(uneven.decay_by_hand, [(num, batches[::swap]) for num, batches in steps], k)
        for pipeline in ("base", "fused_sparse_dist"):
            args = (pipeline, lengths[::swap], nones[::swap], k, frequency)
            actual = two_ranks.run(uneven.decay_past_nones, *args, max_epochs=2, timeout_s=30)
            assert differences(actual, expected) == [[], []], pipeline


@pytest.mark.parametrize(("pipeline", "ks_of_error"), [("base", (1, 8)), ("fused_sparse_dist", (1,))])
def test_ranks_with_lengths_whose_rates_would_differ_are_told_before_a_step(
    two_ranks: Ranks, get_ranks: Callable[..., Ranks], pipeline: str, ks_of_error: tuple[int, ...]
) -> None:
    """What they skip alike, or after the last batch of all, moves the rates of all."""
    for nones, k in [(((2, 3, 7), (2, 3, 7)), 1), (((5,), (5,)), 4), (((19,), ()), 1), (((2, 18, 19), (2, 19)), 1)]:
        expected = two_ranks.run_once(uneven.decay_by_hand, _decayed((20, 20), nones, k, 1, 2), k)
        args = (pipeline, (20, 20), nones, k, 1)
        actual = two_ranks.run(uneven.decay_past_nones, *args, sized=True, max_epochs=2, timeout_s=30)
        assert differences(actual, expected) == [[], []], nones
    said = "rank 1 has taken 4 batches of an epoch and skipped 1 that are None, rank 0 has skipped 0 by then: "
    for k in ks_of_error:
        args = (pipeline, (20, 20), ((), (3,)), k, 1)
        with pytest.raises(RankError, match=f"{said}.*learning rates"):
            get_ranks(2).run(uneven.decay_past_nones, *args, sized=True, timeout_s=30)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_validation_in_the_middle_of_uneven_epochs(two_ranks: Ranks, sized: bool) -> None:
    kwargs = {"val_check_interval": 2} if not sized else {"val_check_interval": 0.5}
    for seen, _ in two_ranks.run(uneven.train, "fused_sparse_dist", (7, 4), sized, **kwargs):
        assert seen == _epochs(4, val_every=2)


@pytest.mark.parametrize(("pipeline", "rank", "sized"), pairwise(PIPELINES, [0, 1], [True, False]))
def test_sigterm_on_one_rank_ends_all_after_the_same_step(
    two_ranks: Ranks, pipeline: str, rank: int, sized: bool
) -> None:
    first, second = two_ranks.run(uneven.terminate, pipeline, rank, sized)
    assert first == second
    # Soon, but for what had been agreed on before. Where lengths are certain the ranks ask each other now and then: an
    # interval is no longer than twice the one before it.
    assert 6 <= first <= (20 if sized else 9)


def test_a_loader_that_breaks_its_word_is_told(two_ranks: Ranks) -> None:
    for text in two_ranks.run(uneven.break_off):
        assert "the data loader ended after 5 batches, its length says 9" in text
