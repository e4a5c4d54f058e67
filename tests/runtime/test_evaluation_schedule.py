"""What an evaluation runs is derived from a mode's table, and the executor walks it like any other."""

import pytest
from hypothesis import given, settings

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import SPARSE_STAGES, Stage, StreamName

from ..support.fakes import FakeTrainer, Run
from .setups import random_schedules

DERIVED = {
    "base": "base: copy_batch_to_device+0/compute dense_forward+0/compute",
    "sparse_dist": "sparse_dist: embedding_lookup+0/compute input_data_dist+1/data_dist input_splits_dist+2/data_dist "
    "dense_forward+0/compute copy_batch_to_device+3/memcpy",
    **{
        name: f"{name}: embedding_lookup+1/lookup input_data_dist+2/data_dist input_splits_dist+3/data_dist "
        "dense_forward+0/compute copy_batch_to_device+4/memcpy"
        for name in MODES.keys() - {"base", "sparse_dist"}
    },
}


def evaluate(schedule: Schedule, num_batches: int, ready: bool) -> Run:
    trainer = FakeTrainer(schedule.evaluation, ready=ready)
    return trainer.run(num_batches, skip=range(num_batches))


def test_evaluation_of_each_mode(mode: Schedule) -> None:
    assert str(mode.evaluation) == DERIVED[mode.name]
    assert mode.evaluation.staleness == 0
    assert mode.evaluation.dense_owned_lookup is None


@pytest.mark.parametrize("ready", [True, False], ids=["known_inputs", "first_forward_shows_them"])
@given(schedule=random_schedules)
@settings(deadline=None)
def test_each_stage_of_each_batch_once_and_in_order(schedule: Schedule, ready: bool) -> None:
    """For any mode that is accepted: no update is made, nothing is left in flight, no more is held than it says."""
    steps = {step.stage for step in schedule.evaluation}
    for num_batches in range(2 * schedule.evaluation.depth + 1):
        run = evaluate(schedule, num_batches, ready)
        assert run.trained == list(range(num_batches))
        for batch in range(num_batches):
            wanted = [stage for stage in Stage if stage in steps]
            if not ready and batch == 0:
                wanted = [stage for stage in wanted if stage not in SPARSE_STAGES]
            assert run.stages[batch] == wanted, str(run)
        assert run.max_in_flight <= schedule.evaluation.depth
        assert not any(run.updates.values())


def test_embeddings_come_early_for_all_but_the_batch_that_shows_the_inputs(mode: Schedule) -> None:
    run = evaluate(mode, 6, ready=False)
    assert run.served_early(0) == {False}
    for batch in range(1, 6):
        assert run.served_early(batch) == {mode.has_sparse_stages}


def test_a_users_schedule_that_looks_up_further_ahead_evaluates_one_ahead() -> None:
    steps = [
        Step(Stage.COPY_BATCH_TO_DEVICE, 3, StreamName.MEMCPY),
        Step(Stage.INPUT_SPLITS_DIST, 3, StreamName.DATA_DIST),
        Step(Stage.INPUT_DATA_DIST, 3, StreamName.DATA_DIST),
        Step(Stage.EMBEDDING_LOOKUP, 3, StreamName.LOOKUP),
        *(step for step in MODES["base"] if step.stage is not Stage.COPY_BATCH_TO_DEVICE),
    ]
    evaluation = Schedule("far_ahead", tuple(steps)).evaluation
    lookup = evaluation.step_of(Stage.EMBEDDING_LOOKUP)
    assert lookup is not None
    assert lookup.offset == 1
    assert evaluation.depth == 5
