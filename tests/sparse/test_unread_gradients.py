"""Gradients of the weights of ids are computed where something reads them, and nowhere else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ..compat.sharded import PLACES
from ..support.cases import COLUMN_WISE, MIXED, WEIGHTED, TableSpec
from ..support.ranks import Ranks
from . import unread_gradients
from .unread_gradients import Call

NOTICES = pytest.mark.filterwarnings("ignore:The lookup of", "ignore:You defined a `validation_step`")


def asks_for_none(call: Call) -> bool:
    return call.needed == [0] * call.num_features


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.sampled_from([*PLACES]), min_size=3, max_size=3), variable=st.booleans())
@example(places=["whole", "rows", "copies"], variable=False)
@example(places=["halves", "rows", "whole"], variable=True)
def test_a_step_is_the_same_without_them(two_ranks: Ranks, places: Sequence[str], variable: bool) -> None:
    """Embeddings, tables, gradients of replicas: bit for bit those of TorchRec's own step, wherever the tables are."""
    variable = variable and "copies" not in places  # TorchRec does not support the two together
    for calls in two_ranks.run(unread_gradients.steps, places, variable=variable):
        assert calls
        assert all(map(asks_for_none, calls))


@pytest.mark.parametrize("pattern", [(True, False, True), (False, True)])
def test_each_call_is_looked_at(get_ranks: Callable[..., Ranks], pattern: Sequence[bool]) -> None:
    """Weights of one call are trained, those of the next are data: gradients come where they are read."""
    one = get_ranks(1)
    [(calls, found)] = one.run(unread_gradients.gradients_of_weights, pattern, leaves_out=True)
    [(_, expected)] = one.run(unread_gradients.gradients_of_weights, pattern, leaves_out=False)
    assert found == expected
    assert [asks_for_none(call) for call in calls] == [not trains for trains in pattern]
    assert all(any(gradient) for gradient in found[0] if gradient is not None)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_feature_processors_are_trained_unless_frozen(two_ranks: Ranks, frozen: bool) -> None:
    ours = two_ranks.run(unread_gradients.processed, frozen=frozen, leaves_out=True)
    theirs = two_ranks.run(unread_gradients.processed, frozen=frozen, leaves_out=False)
    assert [weights for _, weights in ours] == [weights for _, weights in theirs]
    for calls, _ in ours:
        assert calls
        assert all(asks_for_none(call) is frozen for call in calls)


# -- fits: that weighted models train as in a plain loop is tests/laws/test_laws.py's --------------------------------

_SHARED = tuple(replace(one, features=("f0", one.features[0])) for one in COLUMN_WISE.tables)
FITS: list[tuple[str, Any, dict[str, Any]]] = [
    ("base", WEIGHTED, {}),
    ("fused_sparse_dist", replace(MIXED, weighted=True), {}),
    ("fused_sparse_dist", WEIGHTED, {"makes_its_input": True}),
    ("split_backward", replace(COLUMN_WISE, weighted=True, tables=_SHARED), {}),
    ("semi_sync_deferred", replace(WEIGHTED, tables=(*WEIGHTED.tables, TableSpec("r", ("f3",), "row_wise"))), {}),
]


@NOTICES
@pytest.mark.parametrize(("pipeline", "case", "options"), FITS, ids=lambda value: getattr(value, "name", None))
def test_fits_ask_for_none(two_ranks: Ranks, pipeline: str, case: Any, options: dict[str, Any]) -> None:
    """Neither an early lookup nor a module's own forward, which may be one that is repeated in the backward."""
    for calls, num_hooks in two_ranks.run(unread_gradients.fit, case, pipeline, **options):
        trained = [call for call in calls if call.has_backward]
        assert len(trained) >= 6
        assert all(map(asks_for_none, trained))
        evaluated = [call for call in calls if not call.has_backward]
        assert evaluated
        assert all(call.needed is None for call in evaluated)
        assert num_hooks == 0
