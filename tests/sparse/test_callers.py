"""What a module does with its tables: the mode of the call, its input, its order, its writes (laws 10 and 11)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap import Schedule
from lightning_overlap.sparse import note_lengths

from ..support.ranks import RankError, Ranks
from . import caller_fits
from .caller_fits import same_as_in
from .callers import NUM_STEPS, SERVED


def _same_as_by_hand(ranks: Ranks, model: str, pipeline: str, reference: str = "") -> caller_fits.Outcome:
    """Train by the strategy and in a plain loop: equal bit for bit. Return rank 0's outcome."""
    expected = ranks.run_once(caller_fits.by_hand, reference or model)
    actual = ranks.run(caller_fits.train, model, pipeline)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.result.differences(theirs) == []
        assert len(mine.result.losses) == NUM_STEPS
    return actual[0]


_CALLS = [
    ("no_grad", "", SERVED),
    ("inference_mode", "no_grad", SERVED),  # which FBGEMM lacks on a CPU
    ("detached_sometimes", "", SERVED),
    ("looks_first", "plain", SERVED),  # a statistic changes nothing, whereas it costs plain TorchRec the gradient
    ("scales_in_place", "", SERVED),
    ("checkpointed_step", "", SERVED),
    ("checkpointed_lookup", "", SERVED),
    ("reentrant_lookup", "", SERVED),
    ("hashes_in_place", "", 0),
    ("hashes_raw_ids", "", 0),
    ("weighs_in_place", "", 0),
    ("shifts_lengths", "", 0),
    ("hashes_sometimes", "", 3),
    ("one_of_two_tasks", "", 2),
    ("two_tasks_at_once", "", 5),  # batch 6 had been sent when batch 5 was called with the other one
]


_REASONS = {  # why a module ran in its own forward
    "hashes_in_place": "its input was changed in place after its ids had been sent",
    "two_tasks_at_once": "it was called with another input",
}


@pytest.mark.parametrize(("model", "reference", "early"), _CALLS, ids=[call[0] for call in _CALLS])
def test_trains_as_the_plain_loop_does(two_ranks: Ranks, model: str, reference: str, early: int) -> None:
    outcome = _same_as_by_hand(two_ranks, model, "fused_sparse_dist", reference)
    assert outcome.early == early
    if model in _REASONS:
        [message] = outcome.messages
        assert _REASONS[model] in message


_DEFERRED = ["no_grad", "detached_sometimes", "checkpointed_lookup", "reentrant_lookup", "one_of_two_tasks"]


@pytest.mark.parametrize("model", [*_DEFERRED, "two_backwards", "schedules_by_hand"])
def test_deferred_updates_are_those_of_the_same_staleness(two_ranks: Ranks, model: str) -> None:
    same_as_in(two_ranks, model, "semi_sync_deferred", "semi_sync")


def test_a_frozen_teacher_is_not_trained_in_any_mode(two_ranks: Ranks, mode: Schedule) -> None:
    """Embeddings without a graph carry no gradient, however early they were looked up."""
    [before, *_] = two_ranks.run_once(caller_fits.train, "no_grad", "base", limit_train_batches=1)
    [after, *_] = two_ranks.run(caller_fits.train, "no_grad", mode)
    assert all(torch.equal(after.result.tables[name], table) for name, table in before.result.tables.items())


def test_deferred_updates_let_embeddings_be_changed_in_place(two_ranks: Ranks) -> None:
    """Though the graph is cut there."""
    same_as_in(two_ranks, "scales_in_place", "semi_sync_deferred", "semi_sync")


@pytest.mark.parametrize(("model", "num_steps"), [("raises_after_the_step", 6), ("raises_before_the_step", 5)])
def test_an_error_leaves_the_dense_step_and_its_deferred_update_or_neither(
    two_ranks: Ranks, model: str, num_steps: int
) -> None:
    expected = two_ranks.run(caller_fits.train, "plain", "semi_sync", max_steps=num_steps)
    for mine, theirs in zip(two_ranks.run(caller_fits.train, model, "semi_sync_deferred"), expected, strict=True):
        assert [name for name in mine.result.differences(theirs.result) if not name.startswith("losses")] == []


@pytest.mark.parametrize("model", ["clamps", "clamps_data", "clamps_state", "clamps_before_the_step", "trains_between"])
def test_the_next_lookup_sees_tables_written_at_the_end_of_a_batch(two_ranks: Ranks, model: str) -> None:
    outcome = _same_as_by_hand(two_ranks, model, "fused_sparse_dist")
    [message] = outcome.messages
    assert "tables are written between two steps again and again" in message


def test_tables_that_nobody_writes_stay_early(two_ranks: Ranks) -> None:
    outcome = _same_as_by_hand(two_ranks, "clamps_one_of_two", "fused_sparse_dist")
    [message] = outcome.messages
    assert message.startswith("The lookup of 'ebc' ")
    assert "write its tables seldom" in message  # it is called as it should be
    assert "call it once" not in message
    # Of the other collection: all but the first batch, three drops, and the batch whose ids were sent by then.
    assert outcome.early == NUM_STEPS - 5


def test_a_collection_that_is_called_after_the_first_backward_is_looked_up_early(two_ranks: Ranks) -> None:
    outcome, _ = same_as_in(two_ranks, "second_phase", "fused_sparse_dist", "base")
    assert outcome.messages == []
    assert outcome.early == 2 * SERVED


def test_each_backward_of_several_closures_looks_up_again(two_ranks: Ranks) -> None:
    for pipeline in ("sparse_dist", "fused_sparse_dist"):
        same_as_in(two_ranks, "recomputes_in_every_closure", pipeline, "base")


def test_a_rate_that_is_set_by_hand_is_that_of_its_batch(two_ranks: Ranks) -> None:
    [message] = _same_as_by_hand(two_ranks, "rates_by_hand", "fused_sparse_dist").messages
    assert "only combined_optimizer can move" in message


def test_writes_that_begin_late_are_refused_before_anything_is_wrong(two_ranks: Ranks) -> None:
    for message in two_ranks.run(caller_fits.fails, "clamps_later", "fused_sparse_dist"):
        assert "were written between two steps, after the next batch had been looked up" in message
        assert "trainer.strategy.tables_changed()" in message
        assert "after batch 4" in message


@pytest.mark.parametrize(("model", "num_ranks"), [("clamps_later_and_says_so", 2), ("clamps_later", 1)])
def test_writes_that_begin_late_are_seen_where_all_ranks_say_so(get_ranks: Any, model: str, num_ranks: int) -> None:
    _same_as_by_hand(get_ranks(num_ranks), model, "fused_sparse_dist", "clamps_later")


def test_writes_where_the_ids_are_gone_are_refused(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(caller_fits.fails, "clamps_released", "fused_sparse_dist", release_features=True)
    assert "Train with release_features=False" in message


def test_writes_under_an_update_that_is_still_to_come_are_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(caller_fits.fails, "clamps", "semi_sync_deferred"):
        assert "while an update of theirs is still to come" in message


@pytest.mark.parametrize(
    ("model", "pipeline", "what"),
    [
        *(("types_differ", pipeline, "features f0, f1, f2") for pipeline in ("base", "semi_sync")),
        *(("makes_other_types", pipeline, "'ebc'") for pipeline in ("base", "fused_sparse_dist")),
        *(("types_differ_later", pipeline, "'ebc'") for pipeline in ("sparse_dist", "fused_sparse_dist")),
    ],
)
def test_ids_of_another_type_on_another_rank_are_an_error(
    two_ranks: Ranks, model: str, pipeline: str, what: str
) -> None:
    """gloo alone ends the process, without a word of which input."""
    for message in two_ranks.run(caller_fits.fails, model, pipeline):
        assert f"the input of {what} has different types on different ranks" in message
        assert "rank 0 has lengths of int64, ids of int64; rank 1 has lengths of int64, ids of int32" in message


def test_another_type_in_an_own_forward_is_an_error_before_anything_is_sent(get_ranks: Any) -> None:
    """In `base` nobody compares sizes; the rank whose input has changed asks the others, which go on."""
    said = "rank 1 calls 'ebc' in training_step of batch 4 with lengths of int64, ids of int32, before that with "
    with pytest.raises(RankError, match=said):
        get_ranks(2).run(caller_fits.train, "types_differ_later", "base", timeout_s=60)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
@pytest.mark.parametrize("model", ["types_change", "two_types_in_a_step", "types_differ_later_replicated"])
def test_other_types_of_all_ranks_train_on(two_ranks: Ranks, model: str, pipeline: str) -> None:
    """A rank that comes late to its second call is not taken for another; nothing is sent of inputs of replicas."""
    _same_as_by_hand(two_ranks, model, pipeline)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_gradients_of_tables_but_by_their_lookups_are_refused(ranks: Ranks, pipeline: str) -> None:
    for message in ranks.run(caller_fits.fails, "penalizes_all", pipeline):
        of_parts = "would take a part of the table for the whole" in message
        assert of_parts if ranks.world_size > 1 else "the loss uses the weight of t" in message
        assert "in_backward_optimizer_filter" in message


def test_weights_of_ids_are_trained_on_one_rank_alone(ranks: Ranks) -> None:
    for message in ranks.run(caller_fits.fails, "trains_weights", "fused_sparse_dist"):
        is_refused = "the weights of the ids passed to 'ebc' are trained" in message
        assert message == "no error" if ranks.world_size == 1 else is_refused


def test_ids_are_counted_anew_where_a_loader_yields_an_input_again_with_other_lengths() -> None:
    kjt = KeyedJaggedTensor(["f0", "f1"], torch.arange(4), lengths=torch.tensor([1, 0, 2, 1]))
    note_lengths([kjt])
    kjt.lengths().copy_(torch.tensor([1, 2, 0, 1]))
    note_lengths([kjt])
    assert kjt.length_per_key() == [3, 1]
