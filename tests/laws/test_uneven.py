"""Law 8: when one rank's data ends first, or one rank is told to stop, all end after the same step and say so."""

from typing import Any

import pytest

from ..support.pairs import pairwise
from ..support.ranks import RankError, Ranks
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


@pytest.mark.parametrize(("pipeline", "sized"), pairwise(PIPELINES, [True, False]))
def test_ranks_that_skip_the_same_batches_end_together(two_ranks: Ranks, pipeline: str, sized: bool) -> None:
    """The epoch of the one with fewer batches counts; None batches past its end are neither trained nor compared."""
    for lengths, nones in [((9, 7), ((2, 5), (2, 5))), ((9, 6), ((0, 6), (0,))), ((9, 6), ((0, 5, 8), (0, 5)))]:
        expected = [index for index in range(min(lengths)) if index not in nones[1]]
        for seen, _ in two_ranks.run(uneven.train, pipeline, lengths, sized, nones, max_epochs=1):
            assert [one[2] for one in seen if one != "validation"] == expected
            assert seen[-1] == "validation"


WITHOUT = "data loader of rank 1 has no batch in epoch"


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync_deferred"])
def test_a_fit_in_which_one_rank_has_no_batch_fails_on_every_rank(two_ranks: Ranks, pipeline: str) -> None:
    for num_trained, failed, _ in two_ranks.run(uneven.train_without_batches, pipeline, 0, False):
        assert num_trained == 0
        assert f"{WITHOUT} 0" in failed


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_a_rank_that_may_be_without_batches_is_named_on_every_rank(two_ranks: Ranks, sized: bool) -> None:
    for num_trained, failed, said in two_ranks.run(uneven.train_without_batches, "fused_sparse_dist", 0, True, sized):
        assert (num_trained, failed) == (0, "")
        assert f"{WITHOUT} 0" in said[0]


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_an_epoch_after_the_first_in_which_one_rank_has_no_batch(two_ranks: Ranks, pipeline: str) -> None:
    """It is an uneven end: what was trained before counts, and every rank names the one that has ended."""
    for num_trained, failed, said in two_ranks.run(uneven.train_without_batches, pipeline, 1, False):
        assert (num_trained, failed) == (5, "")
        assert f"{WITHOUT} 1" in said[0]


SO_FAR = "the last one so far is batch"
NONE_ALONE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the_first": (((0,), ()), {}, f"{SO_FAR} 0 on rank 0, none on rank 1"),
    "in_the_middle": (((2,), (2, 4)), {}, f"{SO_FAR} 4 on rank 1, batch 2 on rank 0"),
    "at_other_places": (((3,), (5,)), {}, f"{SO_FAR} 3 on rank 0, none on rank 1"),
    "before_a_validation": (((3,), ()), {"val_check_interval": 4}, f"{SO_FAR} 3 on rank 0, none on rank 1"),
    "in_a_window": (((), (3,)), {"accumulate_grad_batches": 2}, f"{SO_FAR} 3 on rank 1, none on rank 0"),
    "in_one_window": (((4,), (5,)), {"accumulate_grad_batches": 8}, f"{SO_FAR} 4 on rank 0, none on rank 1"),
    "the_last": (((), (8,)), {}, "batch 8 is None on rank 1, not on rank 0"),
    "the_last_ones": (((7, 8), (8,)), {"accumulate_grad_batches": 2}, "batch . is None on rank 0, not on rank 1"),
}
"""The batches of each rank that are None, of nine; the Trainer's arguments; what is said."""


@pytest.mark.parametrize(("pipeline", "name", "sized"), pairwise([*PIPELINES, "auto"], NONE_ALONE, [True, False]))
def test_a_batch_that_is_none_on_one_rank_ends_all(two_ranks: Ranks, pipeline: str, name: str, sized: bool) -> None:
    """With plain DDP they would wait for each other, or train other batches of an optimizer step."""
    nones, kwargs, said = NONE_ALONE[name]
    with pytest.raises(RankError, match=f"{said}.*drop samples in the dataset"):
        two_ranks.run(uneven.train, pipeline, (9, 9), sized, nones, timeout_s=30, **kwargs)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_none_batches_count_in_the_window_of_an_optimizer_step(two_ranks: Ranks, pipeline: str) -> None:
    """As Lightning counts: a window of three has a batch less. Rates move with the optimizer steps."""
    for sized in (True, False):
        assert two_ranks.run(uneven.accumulate, pipeline, sized) == [[], []]


def test_a_rank_that_has_hardly_anything_to_train_says_so(two_ranks: Ranks) -> None:
    """The ranks ask each other now and then, where they know how many batches there are."""
    nones = (tuple(range(3, 20)), ())
    with pytest.raises(RankError, match="rank 0 has only 3 batches to train of the 20"):
        two_ranks.run(uneven.train, "fused_sparse_dist", (20, 20), True, nones, timeout_s=30)


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


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_a_loader_that_breaks_its_word_is_told(two_ranks: Ranks, pipeline: str) -> None:
    for text in two_ranks.run(uneven.break_off, pipeline):
        assert "the data loader ended after 5 batches, its length says 9" in text
