"""The host runs ahead of the device by a bounded number of steps."""

from typing import Any

import pytest
from typing_extensions import override

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.schedules import Stage, StreamName

from ..support.fakes import FakeTrainer, RecordingStreams

NUM_BATCHES = 9


class LoggingStreams(RecordingStreams):
    """Numbers the events that the host may wait for, and logs each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ends, self.log = 0, list[tuple[str, int]]()

    @override
    def record_for_host(self, name: StreamName, again: Any = None) -> Any:
        assert name is StreamName.COMPUTE
        self.num_ends += 1
        return self.num_ends - 1  # the number of the step that has ended

    @override
    def let_host_wait(self, event: Any) -> None:
        self.log.append(("waits for", event))


def _run(mode: str, max_queued_steps: int | None) -> list[tuple[str, int]]:
    streams = LoggingStreams()
    trainer = FakeTrainer(MODES[mode], streams=streams, max_queued_steps=max_queued_steps)
    own = trainer.sparse.begin

    def begin(stage: Stage, batch: int) -> None:
        if stage in (Stage.COPY_BATCH_TO_DEVICE, Stage.DENSE_FORWARD):
            streams.log.append((str(stage), batch))
        own(stage, batch)

    trainer.sparse.begin = begin  # type: ignore[method-assign]
    trainer.run(NUM_BATCHES)
    return streams.log


@pytest.mark.parametrize("max_queued_steps", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_is_copied_once_the_device_has_ended_an_earlier_step(mode: str, max_queued_steps: int) -> None:
    log = _run(mode, max_queued_steps)
    waits = [number for what, number in log if what == "waits for"]
    assert waits == sorted(set(waits)), "a step is waited for twice"
    copy = MODES[mode][Stage.COPY_BATCH_TO_DEVICE].offset
    for at, (what, batch) in enumerate(log):
        if what == str(Stage.COPY_BATCH_TO_DEVICE) and batch >= copy:
            step = batch - copy  # the one that copies this batch
            ended = [number for other, number in log[:at] if other == "waits for"]
            assert max(ended, default=-1) == max(step - max_queued_steps, -1), f"the copy in step {step}"


def test_without_a_bound_the_host_never_waits() -> None:
    assert not [event for event in _run("fused_sparse_dist", None) if event[0] == "waits for"]


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "at least 1, got 0. With None the host never waits"),
        (True, TypeError, "a number of steps, or None for any number, got True"),
        ("2", TypeError, "a number of steps, or None for any number, got '2'"),
    ],
)
def test_a_bound_that_is_none_is_refused(number: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OverlapEmbeddingStrategy(max_queued_steps=number)
