"""What an evaluation runs is derived from a mode's table, and the walker walks it like any other."""

import pytest
from hypothesis import given, settings

from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import SPARSE_STAGES, Stage

from ..support.fakes import FakeTrainer
from .setups import random_schedules


@pytest.mark.parametrize("ready", [True, False], ids=["known_inputs", "first_forward_shows_them"])
@given(schedule=random_schedules)
@settings(deadline=None)
def test_each_stage_of_each_batch_once_and_in_order(schedule: Schedule, ready: bool) -> None:
    """For any mode that is accepted: lookups are fresh, no update is made, no more is in flight than it says."""
    steps = {step.stage for step in schedule.evaluation}
    assert (schedule.evaluation.staleness, schedule.evaluation.dense_owned_lookup) == (0, None)
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
            assert run.served_early(batch) == {lookup is not None and (ready or batch > 0)}
        assert run.max_in_flight <= schedule.evaluation.depth
        assert not any(run.updates.values())
