"""Laws 1 to 5 against plain DistributedModelParallel: equal bit for bit, or delayed by exactly what the mode says."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from lightning_overlap import MODES, Schedule, Stage

from ..sparse.variants import Manual
from ..support import reference
from ..support.cases import CASES, MIXED, NUM_STEPS, UNUSED, Batches, Case
from ..support.fits import fit, make_strategy, make_trainer
from ..support.pairs import in_turn, rotated
from ..support.ranks import RankError, Ranks

STALE = [name for name, schedule in MODES.items() if schedule.staleness > 0]
BY_NAME = {case.name: case for case in CASES}


def _differences(ranks: Ranks, case: Case, pipeline: str | Schedule, staleness: int = 0) -> list[list[str]]:
    actual = ranks.run(fit, case, pipeline)
    assert all(len(result.losses) == NUM_STEPS for result in actual)
    return reference.differences(actual, reference.on_ranks(ranks, case, staleness))


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(BY_NAME))
def test_a_mode_equals_the_plain_loop(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """In a mode with a staleness, the plain loop whose updates are delayed by exactly as much."""
    staleness = MODES[pipeline].staleness
    assert _differences(get_ranks(num_ranks), BY_NAME[name], pipeline, staleness) == [[]] * num_ranks


@pytest.mark.parametrize(("name", "pipeline"), in_turn([*BY_NAME, *BY_NAME], MODES))
def test_on_three_ranks_too(get_ranks: Callable[..., Ranks], name: str, pipeline: str) -> None:
    """Two ranks cannot tell the next rank from the one before, or all others from the other.

    A sum of three depends on its order, and DistributedModelParallel has another than this strategy's
    DistributedDataParallel. So exact modes are `base` bit for bit, and all modes are the plain loop to rounding.
    """
    ranks, case, staleness = get_ranks(3), BY_NAME[name], MODES[pipeline].staleness
    actual = ranks.run(fit, case, pipeline)
    if staleness == 0:
        assert reference.differences(actual, ranks.run_once(fit, case, "base")) == [[]] * 3
    expected, late = (reference.on_ranks(ranks, case, staleness + more) for more in (0, 1))
    for mine, theirs, one_update_late in zip(actual, expected, late, strict=True):
        assert torch.allclose(mine.losses, theirs.losses, rtol=1e-5)
        assert all(torch.allclose(mine.tables[key], theirs.tables[key], atol=1e-5) for key in mine.tables)
        assert not torch.allclose(mine.losses, one_update_late.losses, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [*in_turn(BY_NAME, STALE), *in_turn(BY_NAME, ["fused_sparse_dist", "split_backward"])],
)
def test_a_mode_between_hosts_equals_the_plain_loop(get_ranks: Callable[..., Ranks], name: str, pipeline: str) -> None:
    """There the ids of the next batch are sent within the forward, and a deferred update comes after the backward."""
    staleness = MODES[pipeline].staleness
    assert _differences(get_ranks(2, num_nodes=2), BY_NAME[name], pipeline, staleness) == [[], []]


def fit_by_hand(case: Case, pipeline: str) -> reference.Result:
    model = Manual(case)
    trainer = make_trainer(make_strategy(model, pipeline))
    trainer.fit(model, datamodule=Batches(case))
    return reference.collect(model, trainer.optimizers[0], model.losses)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_manual_optimization_is_as_stale_from_the_first_batch_on(
    get_ranks: Callable[..., Ranks], num_nodes: int
) -> None:
    """The inputs of modules are found before the first backward, and the next batches looked up before it."""
    ranks = get_ranks(2, num_nodes=num_nodes)
    for name, pipeline in [*in_turn(BY_NAME, STALE), *in_turn(BY_NAME, STALE[1:])][num_nodes - 1 :: num_nodes]:
        expected = reference.on_ranks(ranks, BY_NAME[name], MODES[pipeline].staleness)
        actual = ranks.run(fit_by_hand, BY_NAME[name], pipeline)
        assert reference.differences(actual, expected) == [[], []], (name, pipeline)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_dense_weights_without_a_gradient_train_as_in_the_plain_loop(
    two_ranks: Ranks, mode: Schedule, option: str
) -> None:
    """DistributedModelParallel alone has `static_graph=True`."""
    actual = two_ranks.run(fit, UNUSED, mode.name, options={option: True})
    assert reference.differences(actual, reference.on_ranks(two_ranks, UNUSED, mode.staleness)) == [[], []]


def test_the_delayed_loop_without_a_delay_is_the_plain_loop(two_ranks: Ranks) -> None:
    """Guards the reference of stale modes."""
    for case in CASES:
        delayed = two_ranks.run(reference.train_delayed, case, reference.Delayed(0))
        assert reference.differences(delayed, reference.on_ranks(two_ranks, case)) == [[], []], case.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_model_shows_one_stale_lookup(ranks: Ranks, case: Case) -> None:
    """Guards the tests above, with the lookup of the fused mode moved above the backward."""
    fused = MODES["fused_sparse_dist"]
    backward = fused.position(Stage.BACKWARD)
    rest = [step for step in fused.steps[backward:] if step.stage is not Stage.EMBEDDING_LOOKUP]
    mutated = Schedule("mutated", (*fused.steps[:backward], fused[Stage.EMBEDDING_LOOKUP], *rest))
    for differences in _differences(ranks, case, mutated):
        assert any(text.startswith("losses from step") for text in differences)


def _fit_with_every_lookup_at_its_row(case: Case) -> object:
    # Nobody notices that tables were written after their lookup: else it would be left aside, and all be well.
    with (
        mock.patch.object(Schedule, "dense_owned_lookup", None),
        mock.patch("lightning_overlap.sparse.module_flight.num_writes", return_value=()),
    ):
        return fit(case, Schedule("all_before_the_step", MODES["fused_sparse_dist"].steps))


def test_a_data_parallel_table_looked_up_before_the_step_is_seen(ranks: Ranks) -> None:
    """Law 3: without the wait for the dense optimizer the mixed model's losses differ (or autograd refuses)."""
    try:
        actual = ranks.run(_fit_with_every_lookup_at_its_row, MIXED)
    except RankError as err:
        if "modified by an inplace operation" not in str(err):
            raise
        return
    assert all(reference.differences(actual, reference.on_ranks(ranks, MIXED)))
