"""What an evaluation runs is derived from a mode's table, and the executor walks it like any other."""

import pytest
from hypothesis import given, settings

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import SPARSE_STAGES, Stage

from ..support.fakes import FakeTrainer
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
    lookup = schedule.evaluation.step_of(Stage.EMBEDDING_LOOKUP)
    assert lookup is None or lookup.offset <= 1  # however far ahead training looks up
    for num_batches in range(2 * schedule.evaluation.depth + 1):
        trainer = FakeTrainer(schedule.evaluation, ready=ready)
        run = trainer.run(num_batches, skip=range(num_batches))
        assert run.trained == list(range(num_batches))
        for batch in range(num_batches):
            wanted = [stage for stage in Stage if stage in steps]
            if not ready and batch == 0:
                wanted = [stage for stage in wanted if stage not in SPARSE_STAGES]
            assert run.stages[batch] == wanted, str(run)
        assert run.max_in_flight <= schedule.evaluation.depth
        assert not any(run.updates.values())
