"""Record what a running step did when, as spans: timestamps around stages, collectives and waits.

On a CPU the clock is the host's. On CUDA timing events are recorded on the stages' streams and read once they are over:
no measurement makes the host wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..distributed import CONSENSUS, Issue, wrap_collectives
from ..runtime import CudaStreams, Streams
from ..schedules import Stage, StreamName
from .collectives import TimedWork, all_to_all_name, saved_share, sent_bytes
from .overlap import Traffic
from .spans import EMBEDDINGS, HOST_LANE, LOG, Category, Interval, Span
from .timestamps import CudaTimestamps, HostTimestamps, Record

KINDS = {
    Stage.COPY_BATCH_TO_DEVICE: Category.COPY,
    Stage.INPUT_SPLITS_DIST: Category.HOST,
    Stage.INPUT_DATA_DIST: Category.HOST,
    Stage.PREFETCH: Category.LOOKUP,
    Stage.EMBEDDING_LOOKUP: Category.LOOKUP,
    Stage.DENSE_FORWARD: Category.DENSE,
    Stage.BACKWARD: Category.DENSE,
    Stage.OPTIMIZER_STEP: Category.DENSE,
    Stage.EMBEDDING_UPDATE: Category.DENSE,
}
"""What a stage keeps busy, apart from its collectives."""


class SpanRecorder:
    """Notes what this rank does between `start` and `stop`, by stage, collective and wait.

    Args:
        streams: The device's streams.
        compression: By how much codecs shrink `embeddings` and `gradients`; None where there are none.
    """

    def __init__(self, streams: Streams, compression: Mapping[str, float] | None = None) -> None:
        self._compression = compression
        self._host = HostTimestamps()
        self._streams = streams if isinstance(streams, CudaStreams) else None
        self._device = None if self._streams is None else CudaTimestamps(self._streams.device)
        self._open: list[tuple[Record, Record | None]] = []
        self._records: list[Record] = []
        self._steps: list[tuple[float, Any]] = []
        self._patches = ExitStack()

    def start(self) -> None:
        """Begin to note; collectives are those that this process issues through `torch.distributed`.

        DistributedDataParallel issues its all-reduce from C++, out of sight: it counts as part of the backward.
        """
        self._patches.enter_context(wrap_collectives(self._timed))

    def stop(self) -> None:
        """Note no more."""
        self._patches.close()
        self._open.clear()

    def step(self) -> None:
        """Note that a step ends here and the next one begins."""
        self._steps.append((self._host.mark(), None if self._device is None else self._mark(StreamName.COMPUTE)))

    @property
    def over(self) -> bool:
        """Whether the device has done all that was noted, on every stream; does not wait."""
        if self._device is None or not self._steps:
            return True
        records = [record for record in list(self._records) if not record.is_on_host]
        marks = [record.start if record.end is None else record.end for record in records]
        return all(mark.query() for mark in (self._steps[-1][1], *marks))

    @property
    def stage(self) -> tuple[Stage, int] | None:
        """The stage that began last and has not ended, with its batch."""
        if not self._open:
            return None
        record = self._open[-1][0]
        assert record.stage is not None
        assert record.batch is not None
        return record.stage, record.batch

    def begin(self, stage: Stage, batch: int, stream: StreamName) -> None:
        """Note that a stage of a batch begins, whose device work runs on a stream; stages may begin inside others."""
        kind = KINDS[stage]
        on_device = None
        if self._device is not None:
            if kind is not Category.HOST and kind is not Category.COPY:  # a copy is marked where it is issued
                on_device = Record(kind, str(stream), str(stage), stage, batch, self._device, self._mark(stream))
            kind = Category.HOST  # what the host does is to launch
        record = Record(kind, HOST_LANE, str(stage), stage, batch, self._host, self._host.mark())
        self._open.append((record, on_device))

    def end(self) -> None:
        """Note that the stage that began last has been issued."""
        if not self._open:
            return  # it began before the recorder did
        record, on_device = self._open.pop()
        record.end = self._host.mark()
        self._records.append(record)
        if on_device is not None:
            on_device.end = self._mark(StreamName(on_device.lane))
            self._records.append(on_device)

    def copy(self) -> AbstractContextManager[None]:
        """Go around the copies of a batch to the device, on their stream."""
        if self._device is None or self.stage is None:
            return nullcontext()
        stage, batch = self.stage
        return self._around(Category.COPY, str(StreamName.MEMCPY), str(stage), stage, batch, self._device.mark)

    def data(self) -> AbstractContextManager[None]:
        """Go around the wait for a batch of the data loader."""
        return self._around(Category.DATA, HOST_LANE, "data loader")

    def log(self) -> AbstractContextManager[None]:
        """Go around a call of the module's `log`."""
        return self._around(Category.HOST, HOST_LANE, LOG)

    def merge(self, batch: int) -> AbstractContextManager[None]:
        """Go around the compute stream's wait for a batch's embeddings; on a CPU the collective's own is recorded."""
        if self._device is None:
            return nullcontext()
        compute = StreamName.COMPUTE
        of = (Category.WAIT, str(compute), EMBEDDINGS, Stage.EMBEDDING_LOOKUP, batch)
        return self._around(*of, lambda: self._mark(compute))

    @contextmanager
    def _around(
        self,
        kind: Category,
        lane: str,
        name: str,
        stage: Stage | None = None,
        batch: int | None = None,
        on_device: Callable[[], Any] | None = None,
    ) -> Iterator[None]:
        """Record what happens inside, by marks of the device if it makes some, else by the host's clock."""
        mark = on_device or self._host.mark
        clock = self._host if on_device is None else self._device
        assert clock is not None
        record = Record(kind, lane, name, stage, batch, clock, mark())
        try:
            yield
        finally:
            record.end = mark()
            self._records.append(record)

    def _mark(self, stream: StreamName) -> Any:
        """A point of a device's stream."""
        assert self._device is not None
        assert self._streams is not None
        with self._streams.on(stream):
            return self._device.mark()

    def windows(self) -> list[Interval]:
        """Return the steps, each from its beginning to its end, on the clock of the spans."""
        marks = [host if self._device is None else self._device.ms(device) for host, device in self._steps]
        return list(pairwise(marks))

    def traffic(self, window: Interval) -> dict[Stage, Traffic]:
        """Return what this rank sent to others in a window, by the stage that issued it."""
        found: dict[Stage, Traffic] = {}
        for record in self._sent_in(window):
            if record.stage is not None:
                more = Traffic(record.sent_bytes, record.saved_bytes)
                found[record.stage] = found.get(record.stage, Traffic()) + more
        return found

    def sent_bytes(self, window: Interval) -> dict[str, int]:
        """Return what this rank sent to others in a window, by what carried it."""
        return dict(sum((Counter({one.name: one.sent_bytes}) for one in self._sent_in(window)), Counter[str]()))

    def _sent_in(self, window: Interval) -> Iterator[Record]:
        self._align()
        for record in self._records:
            sends = record.kind is Category.COMMUNICATION and record.sent_bytes
            if sends and window[0] <= record.start_ms < window[1]:
                yield record

    def spans(self) -> list[Span]:
        """Return what was noted; on CUDA the host's times are shifted so that the first steps begin together.

        A collective of the host that is still under way counts until the end of the last step.
        """
        self._align()
        last = self._steps[-1][0] if self._steps else float("-inf")
        return [
            (record if record.end is not None else replace(record, end=last)).span()
            for record in list(self._records)
            if record.end is not None or (record.is_on_host and record.start < last)
        ]

    def _align(self) -> None:
        """Shift the host's clock so that the first step begins when it does on the device."""
        if self._device is not None and self._steps:
            host, device = self._steps[0]
            self._host.shift_ms = self._device.ms(device) - host

    # -- collectives --------------------------------------------------------------------------------------------

    def _timed(self, name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        """Issue a collective, timed; its record names what it carries, or its function."""
        sent = call.get("input", call.get("input_tensor", call.get("tensor")))
        on_host = self._device is None or (isinstance(sent, Tensor) and sent.device.type == "cpu")
        num_bytes = sent_bytes(name, call)
        if name == "all_to_all_single":
            assert isinstance(sent, Tensor)
            name = all_to_all_name(sent, call.get("input_split_sizes"), call.get("output_split_sizes"))
        share = 0.0 if self._compression is None else saved_share(name, sent, self._compression)
        stage, batch = self.stage or (None, None)
        if stage is Stage.EMBEDDING_LOOKUP and name == "gradients":
            name = EMBEDDINGS  # which a backward may look up while it waits for gradients
        clock = self._host if on_host else self._device
        assert clock is not None
        group = "default" if call.get("group") is None else str(call["group"].group_desc)
        flight = Record(Category.COMMUNICATION, f"{group} group", name, stage, batch, clock, clock.mark())
        flight.sent_bytes, flight.saved_bytes = num_bytes, int(num_bytes * share)
        if group == CONSENSUS:
            flight.name = group  # no data: under way until the other ranks have asked too, which makes nobody wait
        else:
            self._records.append(flight)
        work = issue()
        lane = self._lane_now if not on_host else lambda: HOST_LANE
        return None if work is None else TimedWork(work, flight, self._records, lane)

    def _lane_now(self) -> str:
        assert self._streams is not None
        return str(self._streams.current())
