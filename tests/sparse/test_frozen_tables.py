"""Nothing is computed or sent for the backward of frozen tables, and training is as in the plain loop."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import MODES

from ..support.cases import SEQUENCE, TABLE_WISE, TWO_COLLECTIONS, WEIGHTED, Case, TableSpec
from ..support.ranks import Ranks
from . import frozen_tables
from .callers import BY_ROWS, COPIES, NUM_STEPS, SERVED

# Tables that nobody trains are never stale; those of a second collection are trained.
FITS = [
    *((TABLE_WISE, mode) for mode in ("base", "fused_sparse_dist", "semi_sync_deferred")),
    *((COPIES, mode) for mode in ("base", "fused_sparse_dist", "async_lookup")),
    *((SEQUENCE, mode) for mode in ("semi_sync", "split_backward")),
    *((BY_ROWS, mode) for mode in ("prefetch", "sparse_dist")),
    *((TWO_COLLECTIONS, mode) for mode in ("fused_sparse_dist", "split_backward")),
]


@pytest.mark.parametrize(("case", "pipeline"), FITS, ids=lambda value: getattr(value, "name", value))
def test_a_backward_leaves_frozen_tables_out(two_ranks: Ranks, case: Case, pipeline: str) -> None:
    expected = two_ranks.run_once(frozen_tables.by_hand, case)
    for mine, theirs in zip(two_ranks.run(frozen_tables.fit, case, pipeline), expected, strict=True):
        differences = mine.result.differences(theirs)
        assert [one for one in differences if not one.startswith("fused_state")] == []  # frozen tables have none
        assert mine.graphs["ebc"] == [False] * len(theirs.losses)
        assert all(all(graphs) for name, graphs in mine.graphs.items() if name != "ebc")
        assert not any(mine.gradients)
        assert mine.early == (0 if pipeline == "base" else SERVED * len(case.collections))


def test_weights_of_their_ids_are_trained_on_one_rank(get_ranks: Callable[..., Ranks]) -> None:
    [(scale, graphs)] = get_ranks(1).run(frozen_tables.trained_weights, WEIGHTED, "fused_sparse_dist")
    assert scale != 1.0
    assert all(graphs["ebc"])


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_batch_sizes_that_differ_by_feature(two_ranks: Ranks, pipeline: str) -> None:
    """Else a rank with several kernels would send gradients that the other does not receive."""
    assert two_ranks.run(frozen_tables.fit_varying_sizes, pipeline) == [[False] * NUM_STEPS] * 2


SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
FEATURES = (("f0",), ("f1",), ("f1", "f2"), ("f3",))
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 2.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 1.0, "eps": 1e-8}),
}
KINDS = {"bags": {}, "weighted": {"weighted": True}, "sequences": {"sequence": True}}


def case_of(places: list[tuple[str, bool]], kind: str, optimizer: str) -> tuple[Case, list[str]]:
    """Return a case with a table for each place, (sharding, whether frozen), and the frozen ones."""
    kept = {"data_parallel": "row_wise"} if kind == "sequences" else {}  # TorchRec makes bags of their sequences
    tables = tuple(
        TableSpec(f"t{at}", features, kept.get(sharding, sharding))
        for at, ((sharding, _), features) in enumerate(zip(places, FEATURES, strict=False))
    )
    frozen = [table.name for table, (_, is_frozen) in zip(tables, places, strict=True) if is_frozen]
    return Case("drawn", tables, optimizer=OPTIMIZERS[optimizer], **KINDS[kind]), frozen


PLACES = st.lists(st.tuples(st.sampled_from(SHARDINGS), st.booleans()), min_size=2, max_size=4)
FACTORS = st.one_of(st.just([1.0]), st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=2, max_size=NUM_STEPS))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=PLACES,
    kind=st.sampled_from([*KINDS]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    pipeline=st.sampled_from([*MODES]),
    factors=FACTORS,
    num_ranks=st.sampled_from([2, 2, 1]),
)
@example([("table_wise", True), ("table_wise", False)], "bags", "sgd", "fused_sparse_dist", [1.0], 2)
@example([("row_wise", True), ("table_wise", False)], "sequences", "adagrad", "split_backward", [1.0], 2)
@example([("data_parallel", True), ("row_wise", False)], "weighted", "rowwise_adagrad", "semi_sync", [1.0, 0.3], 2)
@example([("table_wise", True), ("row_wise", False)], "bags", "sgd", "semi_sync_deferred", [0.3, 1.0], 2)
def test_frozen_tables_beside_trained_ones(
    get_ranks: Callable[..., Ranks],
    places: list[tuple[str, bool]],
    kind: str,
    optimizer: str,
    pipeline: str,
    factors: list[float],
    num_ranks: int,
) -> None:
    """They stay to the bit, no kernel of theirs has a backward, and the rest trains as in a plain loop at rate 0."""
    ranks, (case, frozen) = get_ranks(num_ranks), case_of(places, kind, optimizer)
    found = ranks.run(frozen_tables.fit_beside, case, frozen, pipeline, factors)
    expected = ranks.run(frozen_tables.by_hand_beside, case, frozen, MODES[pipeline].staleness, factors)
    for (mine, wrong), theirs in zip(found, expected, strict=True):
        assert wrong == []
        assert mine.differences(theirs) == []


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_a_backward_that_waits_for_other_ranks_is_filled_as_without_them(two_ranks: Ranks, sharding: str) -> None:
    case, frozen = case_of([(sharding, True), ("table_wise", False)], "bags", "sgd")
    expected = two_ranks.run(frozen_tables.fills, case, [], "semi_sync")
    assert all(map(any, expected))
    assert two_ranks.run(frozen_tables.fills, case, frozen, "semi_sync") == expected
