"""Staged methods: called before their batch's step, served only where the step's own call would give the same."""

from collections.abc import Callable

import pytest
import torch

from lightning_overlap import Schedule, staged
from lightning_overlap.testing import check_module

from ..sparse import caller_fits
from ..sparse.callers import SERVED
from ..support.ranks import RankError, Ranks
from . import staged_fits
from .staged_models import REFUSED

NUM_MODULES = 2  # sharded ones of TorchRec's model


@pytest.mark.parametrize(
    ("model", "early", "said"),
    [
        ("staged", SERVED, ""),
        ("staged_checkpointed", SERVED, ""),
        ("staged_salt_moves", 3, "module state that it reads was changed after the early call"),
        ("staged_other_arguments", 0, "it was called with other arguments"),
        ("staged_changes_the_batch", 3, "its arguments were changed after the early call"),
    ],
)
def test_trains_as_the_plain_loop_does(two_ranks: Ranks, model: str, early: int, said: str) -> None:
    expected = two_ranks.run_once(caller_fits.by_hand, model)
    actual = two_ranks.run(caller_fits.train, model, "fused_sparse_dist")
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.result.differences(theirs) == []
    assert actual[0].early == early
    messages = actual[0].messages  # the first is that of the staged method
    assert [said in text for text in messages[:1]] == [True] * bool(said)


def test_torchrecs_model_with_preprocessing_equals_the_plain_loop(two_ranks: Ranks, mode: Schedule) -> None:
    """With a staleness: as where the hook after the transfer makes the inputs, which the plain loop does not know."""
    if mode.staleness:
        in_hook = two_ranks.run(staged_fits.with_preproc, mode, staged_fits.PreprocessesInHook)
        expected = [outcome.result for outcome in in_hook]
    else:
        expected = two_ranks.run_once(staged_fits.with_preproc_by_hand)
    for rank, outcome in enumerate(two_ranks.run(staged_fits.with_preproc, mode)):
        assert outcome.result.differences(expected[rank]) == []
        assert outcome.messages == []
        assert outcome.early == (NUM_MODULES * (staged_fits.NUM_STEPS - 1) if mode.has_sparse_stages else 0)


def test_torchrecs_model_keeps_the_laws() -> None:
    """Among them: no race of streams, and lookups that are late by exactly one batch."""
    batches = [staged_fits.make_input(index, 0) for index in range(6)]
    report = check_module(staged_fits.WithPreproc, batches, "semi_sync", find_unused_parameters=True)
    assert report.holds, report
    assert report.plain == {}


@pytest.mark.parametrize("model", REFUSED)
def test_what_would_be_another_input_is_refused_by_name(get_ranks: Callable[..., Ranks], model: str) -> None:
    [error] = get_ranks(1).run(caller_fits.fails, model, "fused_sparse_dist")
    assert f"rank 0: 'make_input' is @staged, that is, called before its batch's step, but it {REFUSED[model]}" in error
    assert "remove the decorator" in error


def test_a_batch_that_one_rank_changes_is_an_error_not_a_hang(two_ranks: Ranks) -> None:
    """The other one is served what was staged."""
    with pytest.raises(RankError, match=r"rank 1: the early embeddings of 'ebc' do not fit its call in \w+ of batch 4"):
        two_ranks.run(caller_fits.train, "staged_one_rank_changes", "fused_sparse_dist")


def test_an_error_names_the_method_the_stage_and_the_batch(get_ranks: Callable[..., Ranks]) -> None:
    [error] = get_ranks(1).run(caller_fits.fails, "staged_fails", "fused_sparse_dist")
    assert "the user's own error" in error
    assert "raised in the staged method 'make_input'" in error
    assert "raised in stage input_splits_dist of batch 3 on rank 0" in error


@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused_sparse_dist"])
def test_evaluations_are_staged_apart_and_nothing_stays_in_memory(two_ranks: Ranks, pipeline: str) -> None:
    expected = two_ranks.run_once(staged_fits.evaluating, "base")
    actual = two_ranks.run(staged_fits.evaluating, pipeline)
    for (mine, seen, num_made, num_left), (theirs, seen_in_base, *_) in zip(actual, expected, strict=True):
        assert mine.result.differences(theirs.result) == []
        assert len(seen) == 1 + 2 * 2  # before the fit, within it
        assert all(map(torch.equal, seen, seen_in_base))
        assert mine.early == staged_fits.NUM_STEPS - 1
        assert mine.messages == []
        assert num_made == staged_fits.NUM_STEPS + len(seen)  # each input once
        assert num_left == 0


def test_what_can_be_decorated() -> None:
    def method(self: object) -> None: ...

    assert staged(method) is method
    module = torch.nn.Linear(1, 1)
    assert staged(module) is module
    with pytest.raises(TypeError, match=r"staged takes a method or a module, got 3\. Write @staged above"):
        staged(3)
