"""A fit of which a part is compiled trains as the uncompiled one in every mode; Dynamo traces no frame of ours."""

import dataclasses
import itertools

import pytest

from lightning_overlap import MODES

from ..support.cases import COLUMN_WISE, MIXED, SEQUENCE, SHARED_FEATURE, TABLE_WISE, TWO_COLLECTIONS
from ..support.pairs import in_turn, pairwise
from ..support.ranks import RankError, Ranks
from . import compiled
from .compiled import PARTS, READS, Way

CUT = ("split_backward", "semi_sync_deferred", "auto")
"""Modes that interrupt the graph of embeddings where they are first used; `auto` comes to such a mode."""

_OTHERS = [mode for mode in MODES if mode not in CUT]
_CASES = itertools.cycle([TABLE_WISE, SEQUENCE, SHARED_FEATURE, COLUMN_WISE, TWO_COLLECTIONS, MIXED])
_READS, _BREAKS = itertools.cycle(READS), itertools.cycle([False, True, False, False])
_PAIRS = [*itertools.product(CUT, PARTS[:3]), *in_turn([*CUT, *_OTHERS], reversed(PARTS))]
WAYS = [Way(next(_CASES), mode, part, next(_READS), next(_BREAKS)) for mode, part in _PAIRS]
BY_HAND = [Way(TABLE_WISE, mode, part, by_hand=True) for mode, part in in_turn([*CUT[:2], "semi_sync", "base"], PARTS)]
ASKING = [Way(TABLE_WISE, mode, part, asks=True) for mode, part in pairwise(["base", *CUT[:2]], ["module", "step"])]


WRAPPED = [
    Way(case, mode, part)
    for part, case, mode in pairwise(
        compiled.WRAPPERS, [TABLE_WISE, SEQUENCE], ["fused_sparse_dist", *CUT[:2], "semi_sync"]
    )
]


def _check(ranks: Ranks, ways: list[Way], backend: str) -> None:
    for found in ranks.run(compiled.differences, ways, backend, timeout_s=500):
        assert {way: problems for way, problems in zip(map(str, ways), found, strict=True) if problems} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_fit_equals_the_uncompiled_one(two_ranks: Ranks) -> None:
    """Bit for bit: the backend "eager" runs the operators that were traced."""
    _check(two_ranks, WAYS, "eager")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_manual_optimization_too(two_ranks: Ranks) -> None:
    """The backward and the optimizer's step are parts of what is compiled there."""
    _check(two_ranks, BY_HAND, "eager")


@pytest.mark.slow
def test_a_compiled_step_may_read_tables_and_ask_the_strategy(two_ranks: Ranks) -> None:
    _check(two_ranks, ASKING, "eager")


@pytest.mark.slow
def test_embeddings_first_used_in_a_checkpoint_or_a_transformation_train_as_without_it(two_ranks: Ranks) -> None:
    _check(two_ranks, WRAPPED, "eager")


@pytest.mark.slow
def test_a_backend_that_rounds_otherwise_trains_alike(two_ranks: Ranks) -> None:
    ways = [Way(TABLE_WISE, mode, part) for mode, part in zip(CUT[:2], ("head", "module"), strict=True)]
    _check(two_ranks, ways, "aot_eager")


@pytest.mark.parametrize("pipeline", CUT[:2])
def test_embeddings_first_used_in_a_full_graph_are_an_error_with_the_way_out(two_ranks: Ranks, pipeline: str) -> None:
    """Tensors that were read before are not: the layers of a split backward leave the graph whole."""
    way = Way(TABLE_WISE, pipeline, "head")
    with pytest.raises(RankError, match="sends and receives embeddings outside of compiled code"):
        two_ranks.run(compiled.fit, way, "eager", fullgraph=True)


def test_a_collection_that_is_compiled_itself_is_refused(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"ebc is a EmbeddingBagCollection in torch.compile\(\)"):
        two_ranks.run(compiled.fit, Way(TABLE_WISE, "base", "collection"), "eager")


@pytest.mark.parametrize("pipeline", CUT[:2])
def test_tensors_that_were_read_before_can_be_used_in_a_full_graph(two_ranks: Ranks, pipeline: str) -> None:
    """The layers of a split backward leave the graph whole, too."""
    way = Way(TABLE_WISE, pipeline, "head", "tensors")
    for (result, traced), (plain, _) in zip(
        two_ranks.run(compiled.fit, way, "eager", fullgraph=True),
        two_ranks.run(compiled.fit, dataclasses.replace(way, reads="values"), None),
        strict=True,
    ):
        assert traced.num > 0
        assert traced.wrong == ()
        assert result.differences(plain) == []
