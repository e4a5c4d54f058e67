"""Clocks around stages, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_overlap.profiling.overlap import break_down
from lightning_overlap.profiling.recorder import SpanRecorder
from lightning_overlap.profiling.spans import Category, exclusive
from lightning_overlap.runtime import Streams, Telemetry
from lightning_overlap.schedules.stages import Stage, StreamName

from .virtual import VirtualClock


def timed(recorder: SpanRecorder, stage: Stage, batch: int, stream: StreamName) -> Any:
    telemetry = Telemetry()
    telemetry.timer = recorder
    return telemetry.timed(stage, batch, stream)


def test_an_inner_stage_takes_its_time_from_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = VirtualClock(), SpanRecorder(Streams())
    monkeypatch.setattr("time.perf_counter", clock.now_s)
    recorder.step()
    with timed(recorder, Stage.DENSE_FORWARD, 3, StreamName.COMPUTE):
        clock.now_ms += 10
        assert recorder.stage == (Stage.DENSE_FORWARD, 3)
        with timed(recorder, Stage.EMBEDDING_LOOKUP, 4, StreamName.LOOKUP):
            clock.now_ms += 5
            assert recorder.stage == (Stage.EMBEDDING_LOOKUP, 4)
        clock.now_ms += 1
    clock.now_ms += 4
    recorder.step()
    assert recorder.stage is None
    spans = [(span.kind, span.duration_ms) for span in exclusive(recorder.spans())]
    assert spans == [(Category.DENSE, 10), (Category.LOOKUP, 5), (Category.DENSE, 1)]
    result = break_down(recorder.spans(), recorder.windows()[0])
    assert result.step_ms == result.categories[Category.HOST].busy_ms == 20
    assert result.categories[Category.DENSE].busy_ms == 11
    assert result.categories[Category.LOOKUP].exposed_ms == 5


def test_a_stage_that_raises_is_closed() -> None:
    recorder = SpanRecorder(Streams())
    with pytest.raises(RuntimeError), timed(recorder, Stage.EMBEDDING_LOOKUP, 0, StreamName.LOOKUP):
        raise RuntimeError
    assert recorder.stage is None
    assert len(recorder.spans()) == 1


class Device:
    """Streams whose work is over when it is said so, and the clock of their timing events."""

    def __init__(self) -> None:
        self.busy: set[StreamName] = set()
        self.current = StreamName.COMPUTE

    @property
    def device(self) -> Device:
        return self

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def mark(self) -> Any:
        of = self.current
        return SimpleNamespace(query=lambda: of not in self.busy, of=of)

    def ms(self, mark: Any) -> float:
        if not mark.query():
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 0.0


def test_spans_are_there_to_read_when_every_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a batch to come may last longer than the step that it was issued in."""
    monkeypatch.setattr("lightning_overlap.profiling.recorder.CudaStreams", Device)
    monkeypatch.setattr("lightning_overlap.profiling.recorder.CudaTimestamps", lambda device: device)
    device: Any = Device()
    recorder = SpanRecorder(device)
    recorder.step()
    with timed(recorder, Stage.EMBEDDING_LOOKUP, 1, StreamName.LOOKUP):
        device.busy = {StreamName.COMPUTE, StreamName.LOOKUP}
    recorder.step()
    device.busy.remove(StreamName.COMPUTE)
    assert not recorder.over
    device.busy.clear()
    assert recorder.over
    assert [span.lane for span in recorder.spans() if span.kind is Category.LOOKUP] == [str(StreamName.LOOKUP)]
