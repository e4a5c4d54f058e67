"""Random schedules, and fake runs of a schedule in one call."""

from random import Random
from typing import Any

from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import SPARSE_STAGES, STAGE_ORDER, TRAINING_STAGES, Stage, StreamName

from .fakes import FakeTrainer, Run


def issue_order(schedule: Schedule, num_batches: int) -> list[tuple[int, Step, int]]:
    """List `(iteration, step, batch)` for a run over some batches, fill and drain included."""
    return [
        (iteration, step, iteration + step.offset)
        for iteration in range(-schedule.max_offset, num_batches + schedule.depth)
        for step in schedule.steps
        if 0 <= iteration + step.offset < num_batches
    ]


def run_schedule(schedule: Schedule, num_batches: int, *, ready: bool = True, **options: Any) -> Run:
    return FakeTrainer(schedule, ready=ready).run(num_batches, **options)


def random_schedule(random: Random, max_offset: int = 3) -> Schedule:
    """Return a schedule that can run: random order of steps, offsets and streams."""
    early = [Stage.COPY_BATCH_TO_DEVICE, *(SPARSE_STAGES if random.random() < 0.9 else ())]
    offsets = sorted((random.randint(0, max_offset) for _ in early), reverse=True)
    streams = [random.choice(list(StreamName)) for _ in early]
    steps = [Step(*step) for step in zip(early, offsets, streams, strict=True)]
    of_trainer = [Stage.WEIGHT_GRADIENTS, *TRAINING_STAGES] if random.random() < 0.3 else [*TRAINING_STAGES]
    steps += [Step(stage, 0, StreamName.COMPUTE) for stage in sorted(of_trainer, key=STAGE_ORDER.__getitem__)]
    # Any order will do in which steps of the same offset follow the life of a batch.
    order: list[Step] = []
    while steps:
        step = random.choice(
            [step for step in steps if next(other for other in steps if other.offset == step.offset) is step]
        )
        steps.remove(step)
        order.append(step)
    if len(early) > 1 and random.random() < 0.5:
        order = _with_update(random, order)
    return Schedule("random", tuple(order))


def _with_update(random: Random, order: list[Step]) -> list[Step]:
    """Add a step for the update where it may stand: no lookup comes between the backward and it."""
    lookup, backward = (
        next(index for index, step in enumerate(order) if step.stage is stage)
        for stage in (Stage.EMBEDDING_LOOKUP, Stage.BACKWARD)
    )
    last = len(order) if lookup < backward else lookup
    places = [(0, index) for index in range(backward + 1, last + 1)]
    places += [(-1, index) for index in range(lookup + 1)] if lookup < backward else []
    if not places:
        return order
    offset, index = random.choice(places)
    return [*order[:index], Step(Stage.EMBEDDING_UPDATE, offset, order[lookup].stream), *order[index:]]
