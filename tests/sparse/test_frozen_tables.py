"""Nothing is computed or sent for the backward of frozen tables, and training is as in the plain loop."""

from collections.abc import Callable

import pytest

from ..support.cases import SEQUENCE, TABLE_WISE, TWO_COLLECTIONS, WEIGHTED, Case
from ..support.ranks import Ranks
from . import frozen_tables
from .callers import BY_ROWS, COPIES, SERVED

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
