"""Random fits against a loop by hand: whatever a user combines, the strategy trains what plain training does."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ..support.ranks import Ranks
from . import random_loops
from .random_fits import Fit, Part, Table, of_seed
from .random_loops import NOT_DRAWN


def _check(get_ranks: Callable[..., Ranks], fit: Fit) -> None:
    for found in get_ranks(fit.num_ranks, num_nodes=fit.num_hosts).run(random_loops.differences, fit):
        assert found == [] or NOT_DRAWN in found[0], f"{fit}\nagain: make fuzz SEED={fit.seed}"


@pytest.mark.parametrize("seed", range(30))
def test_a_fit_equals_the_loop_by_hand(get_ranks: Callable[..., Ranks], seed: int) -> None:
    _check(get_ranks, of_seed(seed))


def _with(use: str = "by_name", pipeline: str = "fused_sparse_dist", again: str = "", **settings: Any) -> Fit:
    tables = (Table("t0", ("f0",), 4, "table_wise", 1), Table("t1", ("f1",), 4, "table_wise", 0))
    part = Part("c0", bool(again) and use == "by_name", "x", tables, use, checkpoint=again)
    return Fit(0, 2, (part,), pipeline, **settings)


_ROWS = (
    Table("t0", ("f0",), 4, "row_wise", 0, "mean"),
    Table("t1", ("f3",), 8, "row_wise", 0),
    Table("t2", ("f3", "f1"), 4, "table_wise", 1),
    Table("t3", ("f1",), 4, "row_wise", 0, "mean"),
)


def _with_means(pipeline: str, use: str = "values", **settings: Any) -> Fit:
    return Fit(0, 2, (Part("c0", False, "x", _ROWS, use),), pipeline, **settings)


FOUND = {
    "columns_in_the_order_of_the_configs": _with("values"),
    "no_grad": _with("no_grad"),
    "first_used_without_a_gradient": _with("statistic"),
    "ids_changed_in_place": _with(change="ids"),
    "weights_changed_in_place": _with(change="weights", weighted=True),
    "another_layout_on_another_rank": _with(layout="either"),
    "another_layout_from_the_first_batch_on": _with(layout="by_rank"),
    "everything_differs_by_rank": _with(layout="either", sizes="by_rank", empty=True, late_rank=1, num_hosts=2),
    "checkpoint_around_the_lookup": _with(again="checkpoint"),
    "values_in_a_reentrant_checkpoint": _with("values", again="checkpoint_reentrant"),
    "dropout": _with(dropout=0.3, epochs=2, shuffled=True),
    # The early embeddings get no gradient, so nothing of their backward tells when to look up the next batch's.
    "reentrant_checkpoint_in_a_stale_mode": _with(pipeline="semi_sync", again="checkpoint_reentrant"),
    "means_by_rows_beside_other_tables": _with_means("fused_sparse_dist"),
    "means_by_rows_with_deferred_updates": _with_means("semi_sync_deferred", "by_name"),
    "means_by_rows_of_empty_bags_and_in_an_evaluation": _with_means("split_backward", empty=True, validate_every=3),
}
"""What random fits have found, each as simple as it gets."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(get_ranks: Callable[..., Ranks], name: str) -> None:
    _check(get_ranks, FOUND[name])


def _stale_by_one(fit: Fit) -> list[str]:
    return random_loops.train(fit, 1).differences(random_loops.train(fit))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise"])
def test_a_lookup_that_is_one_update_late_shows(ranks: Ranks, optimizer: str) -> None:
    """Guards the tests above."""
    fit = dataclasses.replace(_with(), num_ranks=ranks.world_size, optimizer=optimizer)
    for found in ranks.run(_stale_by_one, fit):
        assert any(text.startswith("losses from step") for text in found)
