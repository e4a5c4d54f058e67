"""The laws of a schedule: `check_laws(my_schedule)` runs it over fake batches."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from lightning_overlap.runtime import Walker
from lightning_overlap.schedules import SPARSE_STAGES, Schedule, Stage, StreamName, WeightOwner

from .fake_trainer import FakeTrainer, Run
from .recording import FAKE_MODULES, RecordingStreams


def check_laws(schedule: Schedule, *, walker_type: type[Walker] = Walker) -> None:
    """Check that a schedule does what it says, over 0 to 2 x depth fake batches.

    1. Each stage of each batch runs once, in order.
    2. No more batches are in flight than the schedule's depth.
    3. The lookup of batch N sees the updates of batches 0 to N - 1 - staleness and no others; tables of the dense
       optimizer are always seen fresh.
    4. Under every stream that the lookup may stand for, streams use no memory unordered or not handed to them, which
       every fake run checks as it goes.

    Raises an AssertionError that has the schedule and a drawing of the run; for a race of streams a `RaceError`.
    """
    nums, left = range(2 * schedule.depth + 1), ((), tuple(Stage), (Stage.INPUT_SPLITS_DIST,))
    for num_batches, ready, left_from in product(nums, (True, False), left):
        trainer = FakeTrainer(schedule, ready=ready, walker_type=walker_type, left_from=left_from)
        run = trainer.run(num_batches)
        check_stages(run, num_batches, ready=ready)
        check_in_flight(run)
        check_staleness(run)
    lookups = StreamName.COMPUTE, StreamName.DATA_DIST, StreamName.LOOKUP
    parts = (FAKE_MODULES, *({name: owners} for name, owners in FAKE_MODULES.items()))
    for lookup, ready, modules in product(lookups, (True, False), parts):
        options: dict[str, Any] = {"ready": ready, "modules": modules, "walker_type": walker_type}
        trainer = FakeTrainer(schedule, streams=RecordingStreams(lookup), **options)
        for _ in range(2):  # a second run: on weights that were loaded anew
            trainer.run(2 * schedule.depth + 1)


def check_stages(run: Run, num_batches: int, *, ready: bool = True) -> None:
    """Check law 1; where inputs were not known from the start (`ready`), the first batch runs unpipelined."""
    assert run.trained == list(range(num_batches)), f"trained {run.trained} of {num_batches} batches\n{run}"
    steps = [step.stage for step in run.schedule]
    for batch in range(num_batches):
        all_early = run.schedule.has_sparse_stages and (ready or batch > 0)
        expected = [
            stage
            for stage in sorted(steps, key=lambda stage: (-run.schedule[stage].offset, run.schedule.position(stage)))
            if all_early or stage not in (*SPARSE_STAGES, Stage.PREFETCH, Stage.EMBEDDING_UPDATE)
        ]
        # A batch may be looked up in two parts, by the owners of the tables; FakeSparse checks that they are two.
        lookup, stages = Stage.EMBEDDING_LOOKUP, run.stages[batch]
        done = [stage for last, stage in zip((None, *stages), stages, strict=False) if not stage is last is lookup]
        assert done == expected, f"batch {batch} had {_names(done)}, expected {_names(expected)}\n{run}"
        told = "was not served from early lookups alone" if all_early else "was served early"
        assert run.served_early(batch) == {all_early}, f"batch {batch} {told}\n{run}"


def check_in_flight(run: Run) -> None:
    num, depth = run.max_in_flight, run.schedule.depth
    assert num <= depth, f"{num} batches in flight, the depth is {depth}\n{run}"


def check_staleness(run: Run) -> None:
    for served in run.served:
        staleness = run.schedule.staleness if served.owner is WeightOwner.FUSED_BACKWARD else 0
        expected = tuple(batch for batch in run.updates[served.owner] if batch < served.batch - staleness)
        assert served.saw == expected, (
            f"the lookup of batch {served.batch} in tables of {served.owner.value} saw the updates of batches "
            f"{list(served.saw)}, with staleness {staleness} it should see {list(expected)}\n{run}"
        )


def _names(stages: Sequence[Stage]) -> str:
    return " ".join(map(str, stages)) or "nothing"
