"""Steps that are left to a backward, which runs them while it waits for other ranks."""

import pytest

from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import Stage

from ..support.fakes import FakeSparse, FakeTrainer, check_staleness
from .setups import overlapping


class NotesOrder(FakeSparse):
    def clear(self) -> None:
        super().clear()
        self.begun: list[tuple[Stage, int]] = []

    def begin(self, stage: Stage, batch: int) -> None:
        super().begin(stage, batch)
        self.begun.append((stage, batch))


@overlapping
@pytest.mark.parametrize(
    "left_from", [(), tuple(Stage), (Stage.INPUT_SPLITS_DIST,)], ids=["nothing", "everything", "sizes"]
)
def test_what_stands_right_above_the_backward_is_done_where_that_waits(
    schedule: Schedule, left_from: tuple[Stage, ...]
) -> None:
    trainer = FakeTrainer(schedule, sparse_type=NotesOrder, left_from=left_from)
    run = trainer.run(2 * schedule.depth)
    assert isinstance(trainer.sparse, NotesOrder)
    begun = trainer.sparse.begun
    ahead = schedule.steps[schedule.position(Stage.EMBEDDING_LOOKUP)].offset
    lookup, backward = begun.index((Stage.EMBEDDING_LOOKUP, ahead + 2)), begun.index((Stage.BACKWARD, 2))
    above = schedule.position(Stage.EMBEDDING_LOOKUP) < schedule.position(Stage.BACKWARD) and ahead > 0
    lookup_is_left = above and Stage.EMBEDDING_LOOKUP in left_from
    assert (lookup < backward) == ((above or ahead == 0) and not lookup_is_left)
    if lookup_is_left:
        deferred = Stage.EMBEDDING_UPDATE in [step.stage for step in schedule]
        assert lookup == backward + 1 + deferred
    if above and left_from:
        last = (backward if left_from == (Stage.INPUT_SPLITS_DIST,) else lookup) + 1
        assert begun[last][0] is Stage.INPUT_SPLITS_DIST
    check_staleness(run)
