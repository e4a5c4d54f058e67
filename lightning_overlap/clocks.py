"""Clocks around stages and collectives: what a running step did when, as spans.

On a CPU the clock is the host's. On CUDA timing events are recorded on the stages' streams and read once they are over:
no measurement makes the host wait.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import AGREEMENT
from .stages import Stage, StreamName
from .streams import CudaStreams, Streams
from .timeline import Interval, Kind, Span

HOST_LANE = "host"
"""The lane of the thread that trains."""

KINDS = {
    Stage.COPY_BATCH_TO_DEVICE: Kind.COPY,
    Stage.INPUT_SPLITS_DIST: Kind.HOST,
    Stage.INPUT_DATA_DIST: Kind.HOST,
    Stage.PREFETCH: Kind.LOOKUP,
    Stage.EMBEDDING_LOOKUP: Kind.LOOKUP,
    Stage.DENSE_FORWARD: Kind.DENSE,
    Stage.BACKWARD: Kind.DENSE,
    Stage.OPTIMIZER_STEP: Kind.DENSE,
    Stage.EMBEDDING_UPDATE: Kind.DENSE,
}
"""What a stage keeps busy, apart from its collectives."""

COLLECTIVES = ("all_to_all_single", "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor")
"""Functions of `torch.distributed` that are timed."""

_SIGNATURES = {name: inspect.signature(getattr(dist, name)) for name in COLLECTIVES}


class Clock(Protocol):
    """What the executor and the sparse stages tell."""

    def begin(self, stage: Stage, batch: int, stream: StreamName) -> None:
        """A stage begins; stages may begin inside others."""

    def end(self) -> None:
        """The stage that began last has been issued."""

    def copy(self) -> AbstractContextManager[None]:
        """Go around the copies of a batch to the device, on their stream."""

    def merge(self, batch: int) -> AbstractContextManager[None]:
        """Go around the wait of the compute stream for looked-up rows."""


_NO_CLOCK: AbstractContextManager[Any] = nullcontext()


def timed(clock: Clock | None, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]:
    """Go around a stage, where there is a clock."""
    return _NO_CLOCK if clock is None else _timed_stage(clock, stage, batch, stream)


@contextmanager
def _timed_stage(clock: Clock, stage: Stage, batch: int, stream: StreamName) -> Iterator[None]:
    clock.begin(stage, batch, stream)
    try:
        yield
    finally:
        clock.end()


class Marks(Protocol):
    """Points in time on a lane, read later."""

    def mark(self) -> Any:
        """Return this point of the current lane."""

    def over(self, mark: Any) -> bool:
        """Whether a point has been passed."""

    def ms(self, mark: Any) -> float:
        """Return when that was, milliseconds."""


class HostMarks:
    """Points in time of the calling thread."""

    def mark(self) -> float:
        """Return the time now, milliseconds."""
        return time.perf_counter() * 1e3

    def over(self, mark: float) -> bool:
        """Return True."""
        return True

    def ms(self, mark: float) -> float:
        """Return the mark."""
        return mark


class CudaMarks:
    """Points in time of the current CUDA stream, by timing events.

    Args:
        device: Whose streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all that the current stream was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def over(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come past an event; does not wait."""
        return bool(mark.query())

    def ms(self, mark: torch.cuda.Event) -> float:
        """Return when that was, counted from the first mark."""
        return float(self._zero.elapsed_time(mark))


@dataclass(slots=True)
class _Record:
    kind: Kind
    lane: str
    name: str
    stage: Stage | None
    batch: int | None
    start: Any
    end: Any = None
    on_host: bool = True


class SpanRecorder:
    """Notes what this rank does between `start` and `stop`, by stage, collective and wait.

    Args:
        streams: The device's streams.
    """

    def __init__(self, streams: Streams) -> None:
        self._host = HostMarks()
        self._streams = streams if isinstance(streams, CudaStreams) else None
        self._device = None if self._streams is None else CudaMarks(self._streams.device)
        self._open: list[tuple[_Record, _Record | None]] = []
        self._records: list[_Record] = []
        self._steps: list[tuple[float, Any]] = []
        self._patches = ExitStack()

    def start(self) -> None:
        """Begin to note."""
        self._patches.enter_context(record_collectives(self.collective))

    def stop(self) -> None:
        """Note no more."""
        self._patches.close()
        self._open.clear()

    def step(self) -> None:
        """A step ends here, and the next one begins."""
        self._steps.append((self._host.mark(), None if self._device is None else self._mark()))

    @property
    def num_steps(self) -> int:
        """Steps that ended since the first `step`."""
        return max(0, len(self._steps) - 1)

    @property
    def over(self) -> bool:
        """Whether the device has done all that was noted; does not wait."""
        return self._device is None or not self._steps or self._device.over(self._steps[-1][1])

    @property
    def stage(self) -> tuple[Stage, int] | None:
        """The stage that began last and has not ended, with its batch."""
        if not self._open:
            return None
        record, _ = self._open[-1]
        assert record.stage is not None
        assert record.batch is not None
        return record.stage, record.batch

    def begin(self, stage: Stage, batch: int, stream: StreamName) -> None:
        """A stage begins; stages may begin inside others."""
        kind = KINDS[stage]
        on_device = None
        if self._streams is not None and self._device is not None:
            if kind is not Kind.HOST and kind is not Kind.COPY:  # a copy is marked where it is issued
                with self._streams.on(stream):
                    on_device = _Record(kind, str(stream), str(stage), stage, batch, self._device.mark(), on_host=False)
            kind = Kind.HOST  # what the host does is to launch
        record = _Record(kind, HOST_LANE, str(stage), stage, batch, self._host.mark())
        self._open.append((record, on_device))

    def end(self) -> None:
        """The stage that began last has been issued."""
        if not self._open:
            return  # it began before the recorder did
        record, on_device = self._open.pop()
        record.end = self._host.mark()
        self._records.append(record)
        if on_device is not None and self._streams is not None and self._device is not None:
            with self._streams.on(StreamName(on_device.lane)):
                on_device.end = self._device.mark()
            self._records.append(on_device)

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Go around the copies of a batch to the device, on their stream."""
        if self._device is None or self.stage is None:
            yield
            return
        stage, batch = self.stage
        record = _Record(
            Kind.COPY, str(StreamName.MEMCPY), str(stage), stage, batch, self._device.mark(), on_host=False
        )
        yield
        record.end = self._device.mark()
        self._records.append(record)

    @contextmanager
    def merge(self, batch: int) -> Iterator[None]:
        """Go around the wait of the compute stream for looked-up rows; on a CPU the wait is the collective's own."""
        if self._device is None or self._streams is None:
            yield
            return
        record = _Record(
            Kind.WAIT, str(StreamName.COMPUTE), "rows", Stage.EMBEDDING_LOOKUP, batch, self._mark(), on_host=False
        )
        yield
        record.end = self._mark()
        self._records.append(record)

    def _mark(self) -> Any:
        """A point of the compute stream."""
        assert self._device is not None
        assert self._streams is not None
        with self._streams.on(StreamName.COMPUTE):
            return self._device.mark()

    def windows(self) -> list[Interval]:
        """Return the steps, each from its beginning to its end, on the clock of the spans."""
        marks = [host if self._device is None else self._device.ms(device) for host, device in self._steps]
        return list(pairwise(marks))

    def spans(self) -> list[Span]:
        """Return what was noted; on CUDA the host's times are shifted so that the first steps begin together."""
        shift = 0.0
        if self._device is not None and self._steps:
            host, device = self._steps[0]
            shift = self._device.ms(device) - host
        return [self._span(record, shift) for record in self._records if record.end is not None]

    def _span(self, record: _Record, shift: float) -> Span:
        if record.on_host or self._device is None:
            start, end = record.start + shift, record.end + shift
        else:
            start, end = self._device.ms(record.start), self._device.ms(record.end)
        return Span(start, max(start, end), record.kind, record.lane, record.name, record.stage, record.batch)

    # -- collectives --------------------------------------------------------------------------------------------

    def collective(self, name: str, group: str, on_host: bool) -> Collective:
        """Return the timer of a collective that is about to be issued."""
        stage, batch = self.stage or (None, None)
        if stage is Stage.EMBEDDING_LOOKUP and name == "gradients":
            name = "rows"  # which a backward may look up while it waits for gradients
        on_host = on_host or self._device is None
        marks = self._host if on_host else self._device
        assert marks is not None
        flight = _Record(Kind.COMMUNICATION, f"{group} group", name, stage, batch, marks.mark(), on_host=on_host)
        if group == AGREEMENT:
            flight.name = group  # no data: under way until the other ranks have asked too, which makes nobody wait
        else:
            self._records.append(flight)
        return Collective(flight, marks, self._records, HOST_LANE if on_host else self._lane_now)

    def _lane_now(self) -> str:
        assert self._streams is not None
        return str(self._streams.current())


class Collective:
    """Times one collective: from its issue to its end, and what was waited for it.

    Args:
        flight: The record of its time under way; gets its end here.
        marks: The clock: the host's for what runs on the host.
        records: Where waits go.
        lane: The lane that waits.
    """

    def __init__(self, flight: _Record, marks: Marks, records: list[_Record], lane: str | Callable[[], str]) -> None:
        self._flight, self._marks, self._records, self._lane = flight, marks, records, lane

    @property
    def on_host(self) -> bool:
        """Whether a thread of this process runs it (gloo), and not the device."""
        return self._flight.on_host

    def completed(self) -> None:
        """Called by the thread that ran it."""
        self._flight.end = time.perf_counter() * 1e3

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Go around a wait for it: on a CPU the host stands still, on CUDA the current stream does.

        When a collective on CUDA ends nobody is told before its wait. Issued late, that makes the time under way
        too long; what was waited is right in any case.
        """
        flight = self._flight
        lane = self._lane if isinstance(self._lane, str) else self._lane()
        wait = replace(flight, kind=Kind.WAIT, lane=lane, start=self._marks.mark(), end=None)
        yield
        wait.end = self._marks.mark()
        if flight.end is None:
            flight.end = wait.end
        self._records.append(wait)


class _TimedWork(dist.Work):
    """A collective under way, timed."""

    def __init__(self, work: dist.Work, timer: Collective) -> None:
        super().__init__()
        self._work, self._timer = work, timer

    def wait(self, timeout: Any = None) -> bool:
        with self._timer.waiting():
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def get_future(self) -> Any:
        return self._work.get_future()


def all_to_all_name(sent: Tensor, *splits: Any) -> str:
    """Return what an all-to-all carries: `sizes`, `ids`, `rows` or `gradients`.

    Told by what it is called with, so that it works for every pipeline: gradients and rows are floats, gradients in a
    backward; ids and their lengths travel in parts of given sizes; these sizes travel in equal parts.
    """
    if sent.is_floating_point():
        return "gradients" if torch._C._current_graph_task_id() != -1 else "rows"
    return "sizes" if all(split is None for split in splits) else "ids"


@contextmanager
def record_collectives(make_timer: Callable[[str, str, bool], Collective]) -> Iterator[None]:
    """Time the collectives that this process issues through `torch.distributed`.

    DistributedDataParallel issues its all-reduce from C++, out of sight: it counts as part of the backward.

    Args:
        make_timer: Given what is sent, the group's name, and whether it is in the host's memory.
    """
    with ExitStack() as stack:
        for name in COLLECTIVES:
            real = getattr(dist, name)
            stack.enter_context(mock.patch.object(dist, name, partial(_timed, name, real, make_timer)))
        yield


def _timed(
    name: str,
    real: Callable[..., Any],
    make_timer: Callable[[str, str, bool], Collective],
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = _SIGNATURES[name].bind(*args, **kwargs).arguments
    sent = call.get("input", call.get("tensor"))
    if name == "all_to_all_single":
        assert isinstance(sent, Tensor)
        name = all_to_all_name(sent, call.get("input_split_sizes"), call.get("output_split_sizes"))
    group = call.get("group")
    on_host = isinstance(sent, Tensor) and sent.device.type == "cpu"
    timer = make_timer(name, "default" if group is None else str(group.group_desc), on_host)
    asynchronous = call.get("async_op", False)
    call["async_op"] = True
    work = real(**call)
    if work is None:  # this rank is not in the group
        return None
    if timer.on_host:
        with suppress(RuntimeError):  # gloo's reduce-scatter has no future: then the wait for it tells
            work.get_future().add_done_callback(lambda _: timer.completed())
    timed = _TimedWork(work, timer)
    if asynchronous:
        return timed
    timed.wait()
    return None
