"""Which input feeds which module: found by identity, checked at every call (law 4), else the plain forward."""

from collections.abc import Callable

import pytest
import torch

from ..support.ranks import RankError, Ranks
from . import variants
from .variants import NUM_STEPS, STRUCTURES


def _compare(ranks: Ranks, model: str, structure: str = "dataclass") -> list[variants.Report]:
    """Run a variant in the fused mode; its losses equal those of base, bit for bit."""
    expected = ranks.run_once(variants.run, model, "base")
    actual = ranks.run(variants.run, model, "fused_sparse_dist", structure)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine.losses, theirs.losses)
        assert len(mine.losses) == NUM_STEPS
        assert theirs.early == 0
    assert all(report.messages == [] for report in actual[1:])  # one rank speaks
    return actual


@pytest.mark.parametrize(
    ("model", "structure"), [*(("any_structure", structure) for structure in STRUCTURES), ("keyword", "dataclass")]
)
def test_finds_the_input_in_any_structure(get_ranks: Callable[..., Ranks], model: str, structure: str) -> None:
    for report in _compare(get_ranks(1), model, structure):
        assert report.early == NUM_STEPS - 1  # all but the first batch, which shows what feeds what
        assert report.messages == []


@pytest.mark.parametrize(
    ("model", "early", "reason"),
    [
        ("made_in_step", 0, "its input (KeyedJaggedTensor) is made inside training_step"),
        ("gives_tensor_dict", 0, "its input is a TensorDict, and only a KeyedJaggedTensor can be sent early"),
        ("called_twice", 0, "it was called more than once in a step"),
        # What was looked up before the reason showed may still be used.
        ("called_twice_later", 5, "it was called more than once in a step"),
        ("other_ids_from_5", 4, "it was called with another input than the one in the batch"),
    ],
)
def test_runs_plain_and_says_why_once(two_ranks: Ranks, model: str, early: int, reason: str) -> None:
    report = _compare(two_ranks, model)[0]
    assert report.early == early
    [message] = report.messages
    assert "'ebc'" in message
    assert reason in message
    assert "on_after_batch_transfer" in message  # what to do
    assert "@lightning_overlap.staged" in message


def test_a_module_that_is_not_always_called(two_ranks: Ranks) -> None:
    report = _compare(two_ranks, "not_always_called")[0]
    [message] = report.messages
    assert "'second'" in message
    assert "not called for a batch" in message
    assert report.early >= NUM_STEPS - 1  # the other module's lookups


def test_a_call_that_differs_on_one_rank_is_an_error_not_a_hang(two_ranks: Ranks) -> None:
    """The others take their early embeddings and issue no collective: this rank's own forward would wait for them."""
    with pytest.raises(
        RankError,
        match=r"rank 1: the early embeddings of 'ebc' do not fit its call in training_step of batch 3: it was called "
        r"with another input than the one in the batch\. Other ranks took theirs",
    ):
        two_ranks.run(variants.run, "one_rank_differs", "fused_sparse_dist")


def test_a_rank_without_an_input_that_makes_one_trains_as_in_base(two_ranks: Ranks) -> None:
    actual, expected = (
        two_ranks.run(variants.one_rank_lacks_an_input, pipeline, makes_input=True)
        for pipeline in ("fused_sparse_dist", "base")
    )
    assert all(map(torch.equal, actual, expected))


def test_a_rank_that_lacks_an_input_is_an_error_not_a_hang(two_ranks: Ranks) -> None:
    with pytest.raises(
        RankError, match=r"rank 0 calls 'second' in training_step of batch 4, another rank does not: its batch has no"
    ):
        two_ranks.run(variants.one_rank_lacks_an_input, "fused_sparse_dist", makes_input=False)


def test_cached_tables_start_early_where_they_are_prefetched(get_ranks: Callable[..., Ranks]) -> None:
    [(reason, unlocked, locked)] = get_ranks(1).run(variants.reasons_of_cached_tables)
    assert reason == "its tables have compute kernel fused_uvm_caching, which keeps rows in a cache"
    assert "the plan's cache_params of t0 lack prefetch_pipeline" in str(unlocked)
    assert locked is None
