"""Random fits against a loop by hand: whatever a user combines, the strategy trains what plain training does."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from ..support.ranks import Ranks
from . import random_loops
from .fuzz import simpler
from .random_fits import EXACT, STALE, Fit, Part, Table, draw, of_seed
from .random_loops import NOT_DRAWN

SETTINGS: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    # No shrinking: each smaller fit that fails costs new processes. `make fuzz SEED=...` makes it simpler.
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": (HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
}


def _check(get_ranks: Callable[..., Ranks], fit: Fit) -> None:
    with contextlib.suppress(InvalidArgument):  # in a test without Hypothesis
        note(f"{fit}\nagain: make fuzz SEED={fit.seed}")
    for found in get_ranks(fit.num_ranks, num_nodes=fit.num_hosts).run(random_loops.differences, fit):
        assert found == [] or NOT_DRAWN in found[0]


SIMPLE = Fit(0, 2, (Part("c0", False, "x", (Table("t0", ("f0",), 4, "table_wise", 0),)),), "fused_sparse_dist")
SEQUENCE = Table("t1", ("f0", "f1"), 4, "table_wise", 1)


@settings(max_examples=25, **SETTINGS)
@given(seed=st.integers(0, 1 << 20))
def test_a_fit_equals_the_loop_by_hand(get_ranks: Callable[..., Ranks], seed: int) -> None:
    _check(get_ranks, of_seed(seed))


@settings(max_examples=10, **SETTINGS)
@given(data=st.data())
def test_batches_whose_layout_and_size_differ_by_rank(get_ranks: Callable[..., Ranks], data: st.DataObject) -> None:
    """One rank's input stands at another place of the batch, modules are left out, a rank is late: all at once."""
    seed = data.draw(st.integers(0, 1 << 10), "seed")
    part = dataclasses.replace(SIMPLE.parts[0], calls=data.draw(st.sampled_from(["once", "skipped"]), "calls"))
    fit = dataclasses.replace(
        SIMPLE,
        seed=seed,
        parts=(part, Part("c1", True, data.draw(st.sampled_from(["x", "y"]), "kjt"), (SEQUENCE,))),
        pipeline=data.draw(st.sampled_from([*EXACT[:-1], *STALE]), "pipeline"),
        layout="either",
        sizes="by_rank",
        empty=data.draw(st.booleans(), "empty"),
        late_rank=data.draw(st.sampled_from([None, 0, 1]), "late rank"),
        num_hosts=data.draw(st.sampled_from([1, 2]), "hosts"),
    )
    _check(get_ranks, fit)


def _with(use: str = "by_name", pipeline: str = "fused_sparse_dist", again: str = "", **settings: Any) -> Fit:
    tables = (Table("t0", ("f0",), 4, "table_wise", 1), Table("t1", ("f1",), 4, "table_wise", 0))
    part = Part("c0", bool(again), "x", tables, use, checkpoint=again)
    return Fit(0, 2, (part,), pipeline, **settings)


FOUND = {
    "columns_in_the_order_of_the_configs": _with("values"),
    "no_grad": _with("no_grad"),
    "first_used_without_a_gradient": _with("statistic"),
    "ids_changed_in_place": _with(change="ids"),
    "weights_changed_in_place": _with(change="weights", weighted=True),
    "another_layout_on_another_rank": _with(layout="either"),
    "checkpoint_around_the_lookup": _with(again="checkpoint"),
    # The early embeddings get no gradient, so nothing of their backward tells when to look up the next batch's.
    "reentrant_checkpoint_in_a_stale_mode": _with(pipeline="semi_sync", again="checkpoint_reentrant"),
}
"""What random fits have found, each as simple as it gets."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(get_ranks: Callable[..., Ranks], name: str) -> None:
    _check(get_ranks, FOUND[name])


# -- what the tests above rest on -------------------------------------------------------------------------------------


def _stale_by_one(fit: Fit) -> list[str]:
    return random_loops.train(fit, 1).differences(random_loops.train(fit))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise"])
def test_a_lookup_that_is_one_update_late_shows(ranks: Ranks, optimizer: str) -> None:
    fit = dataclasses.replace(SIMPLE, num_ranks=ranks.world_size, optimizer=optimizer)
    for found in ranks.run(_stale_by_one, fit):
        assert any(text.startswith("losses from step") for text in found)


def test_a_seed_draws_one_fit_and_simplest_choices_are_simple() -> None:
    assert of_seed(17) == of_seed(17)
    assert len({of_seed(seed) for seed in range(50)}) == 50
    first: Callable[[Any], Any] = lambda choices: choices[0]  # noqa: E731
    simplest = draw(first)
    assert [len(simplest.parts), simplest.layout, simplest.pipeline] == [1, "dict", "fused_sparse_dist"]
    assert simplest.delays_are_defined


def test_choices_that_are_left_out_are_not_drawn() -> None:
    without = ("values", "either", "checkpoint", "base")
    for seed in range(200):
        fit = of_seed(seed, without)
        assert fit.layout != "either"
        assert fit.pipeline != "base"
        assert all(part.use != "values" and part.checkpoint != "checkpoint" for part in fit.parts)


def test_a_simpler_fit_differs_in_one_thing() -> None:
    assert list(simpler(SIMPLE)) == []
    fit = dataclasses.replace(SIMPLE, epochs=2, layout="tuple")
    assert list(simpler(fit)) == [dataclasses.replace(fit, layout="dict"), dataclasses.replace(fit, epochs=1)]
