"""Record stages, collectives and waits of a step as spans, on CUDA by timing events, without host-device syncs."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..compat.torch import call_after_backward, current_backward
from ..distributed import CONSENSUS, Issue, WrappedWork, wrap_collectives
from ..runtime import CudaStreams, Streams
from ..schedules import Stage, StreamName
from .spans import EMBEDDINGS, HOST_LANE, LOG, Category, Interval, Span


class HostTimestamps:
    """Time stamps of the host's clock."""

    shift_ms = 0.0  # added by `ms`, to align with another clock

    def mark(self) -> float:
        """Return the time now in ms."""
        return time.perf_counter() * 1e3

    def ms(self, mark: float) -> float:
        """Return the mark, shifted."""
        return mark + self.shift_ms

    def wait(self) -> None:
        """Do nothing; `CudaTimestamps` waits for the device."""


class CudaTimestamps:
    """Timing events on the current stream of a CUDA device; they must be over when `ms` reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, mark: torch.cuda.Event) -> float:
        """Return the time of a mark in ms since this object was made."""
        return float(self._zero.elapsed_time(mark))

    def wait(self) -> None:
        """Wait for the device, so that every mark can be read."""
        torch.cuda.synchronize(self._device)


def timestamps_of(device: torch.device) -> HostTimestamps | CudaTimestamps:
    """Return timing events for CUDA, the host's clock for a CPU."""
    return CudaTimestamps(device) if device.type == "cuda" else HostTimestamps()


_KINDS = {  # stage -> category of its work, without its collectives; the other stages are dense
    Stage.COPY_BATCH_TO_DEVICE: Category.COPY,
    **dict.fromkeys((Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST), Category.HOST),
    **dict.fromkeys((Stage.PREFETCH, Stage.EMBEDDING_LOOKUP), Category.LOOKUP),
}


@dataclass(slots=True)
class _Record:
    """A span whose start and end are marks of a clock, read later; `end` is None while in progress."""

    kind: Category
    lane: str
    name: str
    stage: Stage | None
    batch: int | None
    clock: HostTimestamps | CudaTimestamps
    start: Any
    end: Any = None
    sent: tuple[int, int] = (0, 0)  # `sent_bytes` and `saved_bytes` of the span

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.clock, HostTimestamps)

    def span(self, otherwise: Any) -> Span:  # `otherwise` is a mark to take for its end if it has none
        start_ms = self.clock.ms(self.start)
        end_ms = max(start_ms, self.clock.ms(otherwise if self.end is None else self.end))
        return Span(start_ms, end_ms, self.kind, self.lane, self.name, self.stage, self.batch, "", *self.sent)


class SpanRecorder:
    """Records this rank's stages, collectives and waits between `start` and `stop`."""

    def __init__(self, streams: Streams, compression: Mapping[str, float] | None = None) -> None:
        self._compression = compression  # `embeddings`, `gradients` -> float32 bytes per sent byte, with codecs
        self._host = HostTimestamps()
        self._streams = streams if isinstance(streams, CudaStreams) else None
        self._device = None if self._streams is None else CudaTimestamps(self._streams.device)
        self._open: list[tuple[Stage, int]] = []
        self._records: list[_Record] = []
        self._steps: list[tuple[float, Any]] = []
        self._patches = ExitStack()
        self.stop = self._patches.close  # stops recording

    def start(self) -> None:
        """Start recording. DistributedDataParallel's all-reduce, issued in C++, is not recorded (see `backward`)."""
        self._patches.enter_context(wrap_collectives(self._timed))

    def step(self) -> None:
        """Note the end of a step and the start of the next step."""
        self._steps.append((self._host.mark(), self._mark(str(StreamName.COMPUTE))))

    @property
    def over(self) -> bool:
        """Whether all recorded work on the device is done; does not wait."""
        if self._device is None:
            return True
        marks = [mark for one in list(self._records) if not one.is_on_host for mark in (one.start, one.end)]
        marks += [mark for _, mark in self._steps[-1:]]
        return all(mark is None or mark.query() for mark in marks)

    @property
    def stage(self) -> tuple[Stage, int] | None:
        """The innermost current stage, with its batch."""
        return self._open[-1] if self._open else None

    @contextmanager
    def during(self, stage: Stage, batch: int, stream: StreamName) -> Iterator[None]:
        """Record a stage of a batch, whose device work runs on `stream`; stages may be nested."""
        kind, what = _KINDS.get(stage, Category.DENSE), (str(stage), stage, batch)
        with ExitStack() as around:
            if self._device is not None:
                if kind is not Category.HOST and kind is not Category.COPY:  # `copy` records copies
                    around.enter_context(self._around(kind, str(stream), *what))
                kind = Category.HOST  # the host only launches
            around.enter_context(self._around(kind, HOST_LANE, *what))
            self._open.append((stage, batch))
            around.callback(self._open.remove, (stage, batch))
            yield

    def copy(self) -> AbstractContextManager[None]:
        """Record the copies of a batch to the device, on the current stream."""
        if self._streams is None or self.stage is None:
            return nullcontext()
        stage, batch = self.stage
        return self._around(Category.COPY, str(self._streams.current()), str(stage), stage, batch)

    def data(self) -> AbstractContextManager[None]:
        """Record the wait for a batch of the data loader."""
        return self._around(Category.DATA, HOST_LANE, "data loader")

    def log(self) -> AbstractContextManager[None]:
        """Record a call of the module's `log`."""
        return self._around(Category.HOST, HOST_LANE, LOG)

    def merge(self, batch: int) -> AbstractContextManager[None]:
        """Record the compute stream's wait for a batch's embeddings; on a CPU `_TimedWork` records the host's wait."""
        if self._device is None:
            return nullcontext()
        return self._around(Category.WAIT, str(StreamName.COMPUTE), EMBEDDINGS, Stage.EMBEDDING_LOOKUP, batch)

    def backward(self, loss: Tensor) -> None:
        """Record, on a CPU, the wait for DistributedDataParallel's all-reduce at the end of this loss's backward."""
        if self._device is not None or not loss.requires_grad:
            return
        wait = ExitStack()
        what = Category.WAIT, HOST_LANE, "dense all-reduce", *(self.stage or ())

        def begin() -> None:  # the gradients are computed, so DistributedDataParallel has queued its wait
            wait.enter_context(self._around(*what))
            call_after_backward(wait.close)

        loss.register_hook(lambda _: call_after_backward(begin))

    @contextmanager
    def _around(
        self, kind: Category, lane: str, name: str, stage: Stage | None = None, batch: int | None = None
    ) -> Iterator[None]:
        clock = self._device if self._device is not None and lane != HOST_LANE else self._host
        record = _Record(kind, lane, name, stage, batch, clock, self._mark(lane))
        try:
            yield
        finally:
            record.end = self._mark(lane)
            self._records.append(record)

    def _mark(self, lane: str) -> Any:
        if self._device is None or self._streams is None or lane == HOST_LANE:
            return self._host.mark()
        with self._streams.on(StreamName(lane)):
            return self._device.mark()

    def windows(self) -> list[Interval]:
        """Return start and end of each step, on the clock of the spans."""
        return list(pairwise(host if self._device is None else self._device.ms(device) for host, device in self._steps))

    def spans(self) -> list[Span]:
        """Return the recorded spans; on CUDA the host's times are shifted so that the first steps start together."""
        if self._device is not None and self._steps:
            host, device = self._steps[0]
            self._host.shift_ms = self._device.ms(device) - host
        # A collective in progress ends with the last step if the host's clock times it; on a device its length is 0.
        last = self._steps[-1][0] if self._steps else float("-inf")
        return [one.span(last if one.is_on_host else one.start) for one in list(self._records)]

    def _timed(self, name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        sent = next((call[argument] for argument in ("input", "input_tensor", "tensor") if argument in call), None)
        on_host = isinstance(sent, Tensor) and sent.device.type == "cpu"
        clock = self._host if self._device is None or on_host else self._device
        num_bytes = _sent_bytes(name, sent, call)
        if name == "all_to_all_single":
            assert isinstance(sent, Tensor)
            name = all_to_all_name(sent, call.get("input_split_sizes"), call.get("output_split_sizes"))
        share = 0.0 if self._compression is None else _saved_share(name, sent, self._compression)
        stage, batch = self.stage or (None, None)
        if stage is Stage.EMBEDDING_LOOKUP and name == "gradients":
            name = EMBEDDINGS  # a lookup issued inside a backward
        group = "default" if call.get("group") is None else str(call["group"].group_desc)
        flight = _Record(Category.COMMUNICATION, f"{group} group", name, stage, batch, clock, clock.mark())
        flight.sent = num_bytes, int(num_bytes * share)
        if group == CONSENSUS:
            flight.name = group  # not recorded: it lasts until all ranks ask, but blocks nothing
        else:
            self._records.append(flight)
        work = issue()
        if work is None:
            return None
        return _TimedWork(work, flight, self._records, None if flight.is_on_host else self._streams)


class _TimedWork(WrappedWork):
    """Work of a collective that records its end, and each wait for it: of a stream, or without streams of the host."""

    def __init__(self, work: dist.Work, flight: _Record, records: list[_Record], streams: CudaStreams | None) -> None:
        super().__init__(work)
        self._flight, self._records, self._streams = flight, records, streams
        if flight.is_on_host:  # gloo
            with suppress(RuntimeError):  # gloo's reduce-scatter has no future; then `wait` notes the end
                work.get_future().add_done_callback(lambda _: setattr(flight, "end", flight.clock.mark()))

    @override
    def wait(self, timeout: Any = None) -> bool:
        """Wait and note the end. On CUDA nothing else notes it: a late wait makes the collective look longer."""
        flight = self._flight
        lane = HOST_LANE if self._streams is None else str(self._streams.current())
        start = flight.clock.mark()
        done = super().wait(timeout)
        end = flight.clock.mark()
        if flight.end is None:
            flight.end = end
        self._records.append(replace(flight, kind=Category.WAIT, lane=lane, start=start, end=end, sent=(0, 0)))
        return done


def _sent_bytes(name: str, sent: Any, call: Mapping[str, Any]) -> int:
    """Return the bytes that a collective sends from this rank to others; an all-reduce counts as a ring."""
    group = call.get("group")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if name == "reduce_scatter":
        return sum(part.nbytes for place, part in enumerate(call["input_list"]) if place != rank)
    if splits := call.get("input_split_sizes"):
        return int(sent.nbytes - splits[rank] * sent[:1].nbytes)
    if name == "all_gather_into_tensor":
        return int(sent.nbytes) * (size - 1)
    return int(sent.nbytes) * (size - 1) // size * (2 if name == "all_reduce" else 1)


def _saved_share(name: str, sent: Any, compression: Mapping[str, float]) -> float:
    """Return the bytes saved by a codec per sent byte; the dtype shows whether a codec was used."""
    if not isinstance(sent, Tensor):
        return 0.0
    if sent.dtype in (torch.float16, torch.bfloat16):
        return 4 / sent.element_size() - 1
    return compression.get(name, 1.0) - 1 if sent.dtype is torch.uint8 else 0.0


def all_to_all_name(sent: Tensor, *splits: Any) -> str:
    """Return the content of an all-to-all, in any pipeline: `sizes`, `ids`, `embeddings` or `gradients`."""
    if sent.is_floating_point() or sent.dtype is torch.uint8:
        return "gradients" if current_backward() != -1 else EMBEDDINGS
    return "sizes" if all(split is None for split in splits) else "ids"  # sizes are sent in equal parts
