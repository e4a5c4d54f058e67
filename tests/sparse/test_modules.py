"""Which input feeds which module: found by identity, checked at every call (law 4), else the plain forward."""

from collections.abc import Callable

import pytest
from torchrec.distributed.types import CacheParams

from lightning_overlap.tables.supported_modules import why_never_early

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import RankError, Ranks
from . import caller_fits
from .callers import SERVED


@pytest.mark.parametrize("model", ["takes_own_class", "keyword"])
def test_finds_the_input(get_ranks: Callable[..., Ranks], model: str) -> None:
    [outcome] = caller_fits.same_as_in(get_ranks(1), model, "fused_sparse_dist", "base")
    assert outcome.early == SERVED
    assert outcome.messages == []


@pytest.mark.parametrize(
    ("model", "early", "reason"),
    [
        ("made_in_step", 0, "its input (KeyedJaggedTensor) is made inside training_step"),
        ("gives_tensor_dict", 0, "its input is a TensorDict, and only a KeyedJaggedTensor can be sent early"),
        ("called_twice", 0, "it was called more than once in a step"),
        # What was looked up before the reason showed may still be used.
        ("other_ids_from_5", 4, "it was called with another input than the one in the batch"),
    ],
)
def test_runs_plain_and_says_why_once(two_ranks: Ranks, model: str, early: int, reason: str) -> None:
    one, other = caller_fits.same_as_in(two_ranks, model, "fused_sparse_dist", "base")
    assert one.early == early
    [message] = one.messages
    assert "'ebc'" in message
    assert reason in message
    assert "on_after_batch_transfer" in message  # what to do
    assert other.messages == []  # one rank speaks


def test_a_module_that_is_not_always_called(two_ranks: Ranks) -> None:
    outcome, _ = caller_fits.same_as_in(two_ranks, "not_always_called", "fused_sparse_dist", "base")
    [message] = outcome.messages
    assert "'second'" in message
    assert "not called for a batch" in message
    assert outcome.early >= SERVED  # the other module's lookups


def test_a_call_that_differs_on_one_rank_is_an_error_not_a_hang(two_ranks: Ranks) -> None:
    """The others take their early embeddings and issue no collective: this rank's own forward would wait for them."""
    with pytest.raises(
        RankError,
        match=r"rank 1: the early embeddings of 'ebc' do not fit its call in training_step of batch 3: it was called "
        r"with another input than the one in the batch\. Other ranks took theirs",
    ):
        two_ranks.run(caller_fits.train, "one_rank_differs", "fused_sparse_dist")


def test_a_rank_that_lacks_an_input_is_an_error_not_a_hang(two_ranks: Ranks) -> None:
    said = "rank 0 calls 'second' in training_step of batch 4, another rank does not: its batch has no"
    with pytest.raises(RankError, match=said):
        two_ranks.run(caller_fits.train, "takes_parts", "fused_sparse_dist")


def test_a_rank_without_an_input_that_makes_one_trains_as_in_base(two_ranks: Ranks) -> None:
    caller_fits.same_as_in(two_ranks, "makes_an_empty_part", "fused_sparse_dist", "base")


def _reasons_of_cached_tables() -> list[str | None]:
    """Why tables in a UVM cache do not start early. FBGEMM has it on CUDA only, so the plan says it afterwards."""
    model = Model(TABLE_WISE)
    make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, 1))
    table = model.ebc.module_sharding_plan["t0"]
    table.compute_kernel = "fused_uvm_caching"
    reasons = [why_never_early(model.ebc), why_never_early(model.ebc, prefetches=True)]
    table.cache_params = CacheParams(prefetch_pipeline=True)
    return [*reasons, why_never_early(model.ebc, prefetches=True)]


def test_cached_tables_start_early_where_they_are_prefetched(get_ranks: Callable[..., Ranks]) -> None:
    [(reason, unlocked, locked)] = get_ranks(1).run(_reasons_of_cached_tables)
    assert reason == "its tables have compute kernel fused_uvm_caching, which keeps rows in a cache"
    assert "the plan's cache_params of t0 lack prefetch_pipeline" in str(unlocked)
    assert locked is None
