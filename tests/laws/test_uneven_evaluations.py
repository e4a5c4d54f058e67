"""Ranks with unequal data evaluate all of it, as under DDP: no sample is lost, whatever module, mode and loader."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES

from ..support.ranks import Ranks
from ..tables.supported_modules import CASES, OTHERS
from . import uneven_evaluations
from .uneven_evaluations import Drawn

ENTRIES = ["validate", "test", "predict", "fit"]
KINDS = [name for name in (*OTHERS, *CASES) if name != "variable_batch_sequences"]


@pytest.mark.timeout(300)
def test_all_batches_of_all_ranks_are_evaluated(get_ranks: Callable[..., Ranks]) -> None:
    @settings(max_examples=20)
    @given(
        drawn=st.builds(
            Drawn,
            kind=st.sampled_from(KINDS),
            pipeline=st.sampled_from(list(MODES)),
            entry=st.sampled_from(ENTRIES),
            lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
            sized=st.booleans(),
            balanced=st.just(False),
        )
    )
    @example(Drawn("bags", "fused_sparse_dist", "predict", (1, 9), sized=True))
    @example(Drawn("bags", "base", "predict", (9, 1), sized=False))
    @example(Drawn("managed_bags", "semi_sync", "fit", (2, 6), sized=True))
    @example(Drawn("two_managed_collections", "sparse_dist", "validate", (7, 2), sized=True))
    @example(Drawn("bags", "fused_sparse_dist", "validate", (3, 6), sized=True, balanced=True))
    @example(Drawn("variable_batch", "sparse_dist", "fit", (1, 2), sized=True))  # sent before the last step of its rank
    def holds(drawn: Drawn) -> None:
        assert get_ranks(2).run(uneven_evaluations.differences, drawn) == [[], []]

    holds()


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_predictions_are_those_of_ddp(two_ranks: Ranks, sharding: str) -> None:
    """Lightning's sampler of predictions repeats no sample: the ranks' last batches differ, and one may lack it."""
    for num, batch_size in ((9, 2), (9, 1), (13, 4), (8, 2)):
        expected = two_ranks.run(uneven_evaluations.predict_samples, num, batch_size, sharding, True)
        found = two_ranks.run(uneven_evaluations.predict_samples, num, batch_size, sharding, False)
        assert found == expected
        assert sorted(one for of_rank in found for one in of_rank) == list(range(num))


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_a_rank_without_any_batch_is_an_error_on_all(two_ranks: Ranks, pipeline: str, sized: bool) -> None:
    for error in two_ranks.run(uneven_evaluations.without_a_batch, pipeline, sized):
        assert "would be lost. Give each rank at least one batch" in error
