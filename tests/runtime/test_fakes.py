"""The checkers of fake runs can fail: executors, schedules and streams that are broken on purpose."""

from typing import Any

import pytest

from lightning_overlap.runtime.executor import Executor
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName, WeightOwner
from lightning_overlap.testing import RaceError
from lightning_overlap.testing.race_detector import RecordedEvent

from ..support.fakes import FakeTrainer, RecordingStreams, check_in_flight, check_laws, check_staleness
from ..support.schedules import run_schedule
from .setups import TWO_AHEAD


def moved(schedule: Schedule, stage: Stage, above: Stage) -> tuple[Step, ...]:
    rows = [row for row in schedule if row.stage is not stage]
    row = schedule.step_of(stage)
    assert row is not None
    at = next(index for index, other in enumerate(rows) if other.stage is above)
    return (*rows[:at], row, *rows[at:])


class ClaimsToBeExact(Schedule):
    staleness = 0  # type: ignore[assignment]


class ForgetsDenseOwners(Schedule):
    dense_owned_lookup = None  # type: ignore[assignment]


class ClaimsDepth1(Schedule):
    depth = 1  # type: ignore[assignment]


def test_a_stale_schedule_that_claims_to_be_exact_is_caught() -> None:
    stale = moved(FUSED_SPARSE_DIST, Stage.EMBEDDING_LOOKUP, above=Stage.BACKWARD)
    assert Schedule("honest", stale).staleness == 1
    with pytest.raises(AssertionError, match=r"the lookup of batch 1 in tables of fused_backward saw .* \[\], with"):
        check_laws(ClaimsToBeExact("mine", stale))


def test_a_table_of_the_dense_optimizer_that_is_read_before_its_step_is_caught() -> None:
    schedule = ForgetsDenseOwners("mine", FUSED_SPARSE_DIST.steps)
    with pytest.raises(
        RaceError, match=r"the update by dense_optimizer of batch 0 .* after embedding_lookup of batch 1"
    ):
        check_laws(schedule)
    on_one_stream = FakeTrainer(schedule, streams=RecordingStreams(StreamName.COMPUTE)).run(3)
    with pytest.raises(AssertionError, match="in tables of dense_optimizer saw the updates of batches"):
        check_staleness(on_one_stream)


def test_a_schedule_that_holds_more_batches_than_it_says_is_caught() -> None:
    with pytest.raises(AssertionError, match="2 batches in flight, the depth is 1"):
        check_in_flight(run_schedule(ClaimsDepth1("mine", FUSED_SPARSE_DIST.steps), 2))


class NeverLooksUpDeferred(Executor):
    def _run_deferred_lookup(self) -> None:
        pass


class ForgetsDiscovered(Executor):
    def _after_stage(self, stage: Stage, current: InFlightBatch) -> None:
        if not self._inputs.ready:
            self._stages._waiting.clear()
        super()._after_stage(stage, current)


class FetchesTwiceAsMany(Executor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fetch = self.queue.fetch
        self.queue.fetch = lambda step, index: fetch(step, 2 * index)  # type: ignore[method-assign]


class KeepsTrained(Executor):
    def next_batch(self) -> InFlightBatch | None:
        kept = getattr(self, "kept", [])
        self.kept = [*kept, self.queue.current]
        return super().next_batch()


class DrainsNothing(Executor):
    def drain(self) -> None:
        self.abandon()


@pytest.mark.parametrize(
    ("executor_type", "message"),
    [
        (NeverLooksUpDeferred, "batch 0 was not served from early lookups alone"),
        (FetchesTwiceAsMany, "batches in flight, the depth is 3"),
        (KeepsTrained, "4 batches in flight, the depth is 3"),
    ],
)
def test_an_executor_that_breaks_a_law_is_caught(executor_type: type[Executor], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_laws(FUSED_SPARSE_DIST, executor_type=executor_type)
    assert "fused_sparse_dist: copy_batch_to_device+2/memcpy" in str(caught.value)
    assert "memcpy     |C0" in str(caught.value)


def test_a_collective_that_is_left_in_flight_is_caught() -> None:
    with pytest.raises(AssertionError, match="still in flight after the drain: embedding_lookup of batch 2"):
        FakeTrainer(FUSED_SPARSE_DIST, executor_type=DrainsNothing).run(9, stop_after=2)


class DeafStreams(RecordingStreams):
    """Ignores the waits of one stream for another."""

    def __init__(self, waiting: StreamName, producer: StreamName) -> None:
        super().__init__()
        self.deaf = (waiting, producer)

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        if event is None or (name, event.stream) != self.deaf:
            super().wait(name, event)


@pytest.mark.parametrize(
    ("waiting", "producer", "ready", "message"),
    [
        (StreamName.DATA_DIST, StreamName.MEMCPY, True, r"input_splits_dist of batch 0 \(.* after copy_batch"),
        (StreamName.LOOKUP, StreamName.DATA_DIST, True, "embedding_lookup of batch 0 .* after input_data_dist"),
        (StreamName.COMPUTE, StreamName.MEMCPY, False, r"dense_forward of batch 0 \(.* after copy_batch"),
        (StreamName.LOOKUP, StreamName.COMPUTE, True, "the update by fused_backward .* 0 .* after backward of batch 0"),
    ],
)
def test_a_wait_that_is_left_out_is_caught(
    waiting: StreamName, producer: StreamName, ready: bool, message: str
) -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST, ready=ready, streams=DeafStreams(waiting, producer))
    with pytest.raises(RaceError, match=f"no event orders {message}"):
        trainer.run(5)


class LeavesOutDataDist(Executor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        issue = self._stages.issue

        def all_but_one(step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
            if step.stage is not Stage.INPUT_DATA_DIST:
                issue(step, inflight, owners)

        self._stages.issue = all_but_one  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("executor_type", "schedule"), [(LeavesOutDataDist, FUSED_SPARSE_DIST), (ForgetsDiscovered, TWO_AHEAD)]
)
def test_a_stage_that_is_left_out_is_caught(executor_type: type[Executor], schedule: Schedule) -> None:
    with pytest.raises((AssertionError, KeyError)) as caught:
        check_laws(schedule, executor_type=executor_type)
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(f"{schedule.name}: " in text for text in said)
