"""Streams and events, CUDA's and their stand-ins on a CPU; `BatchCopies` copies batches from one stream to another."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from typing_extensions import override

from ..compat.torch import COPY, TorchDispatchMode
from ..schedules import StreamName
from .batch_tree import leaves, search

NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(slots=True)
class Made:
    """A value that the work on a stream has made."""

    value: Any
    on: StreamName
    event: Any = None  # after that work; None until another stream needs it
    memory: Any = None  # the tensors in the value, once they were looked for: one search serves all streams


class Streams:
    """Streams and events of a device; here of a CPU: every stream is the calling thread, and every event is None."""

    is_async = False  # whether the host only launches work; else it does all work and waits for every collective
    lookup = StreamName.COMPUTE  # all lookups and updates of tables run there, also those of a module's own forward

    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        """Make a stream current."""
        return NOTHING

    def record(self, name: StreamName, again: Any = None) -> Any:
        """Return an event after all work issued on a stream so far.

        Args:
            name: The stream.
            again: An event that nobody will wait for as it is now; the device may record it once more, which is less
                work than to make another one. What waits for it already waits for its former record.
        """
        return None

    def wait(self, name: StreamName, event: Any) -> None:
        """Let later work on a stream start only after an event; does not block the host."""

    def record_stream(self, value: Any, name: StreamName) -> None:
        """Tell the caching allocator that a stream reads these tensors, nested or not, of another stream."""

    def are_same(self, one: StreamName, other: StreamName) -> bool:
        """Whether two names stand for one stream, which needs no event."""
        return one is other or self[one] is self[other]

    def made(self, value: Any, on: StreamName) -> Made:
        """Return a value with an event after all work issued on a stream so far, which has made the value.

        A `Made` without an event gets one at its first use on another stream. That is enough where it is used at once:
        the stream has no later work for which the other one would wait.
        """
        return Made(value, on, self.record(on))

    def use(self, made: Made, on: StreamName) -> Any:
        """Let a stream use a value: it waits for the value, and the caching allocator learns of it; return the value.

        Reading the memory of another stream needs both. `give_to_caller` and `take_from_caller` do the same.
        """
        if not self.are_same(made.on, on):
            if made.event is None:
                made.event = self.record(made.on)
            self.wait(on, made.event)
            self._record_made(made, on)
        return made.value

    def use_ordered(self, value: Any, made_on: StreamName, on: StreamName) -> Any:
        """Let a stream that is ordered already use a value of another stream; return the value."""
        if not self.are_same(made_on, on):
            self.record_stream(value, on)
        return value

    def _record_made(self, made: Made, name: StreamName) -> None:
        self.record_stream(made.value, name)

    def order(self, first: StreamName, then: StreamName) -> None:
        """Let later work on the stream `then` start after all work issued on `first` so far."""
        if not self.are_same(first, then):
            self.wait(then, self.record(first))

    def on_lookup(self) -> AbstractContextManager[Any]:
        """Make the lookup stream current."""
        return self.on(self.lookup)

    def hold_leaves(self, leaves: Iterable[torch.Tensor], name: StreamName) -> list[Any]:
        """Return the autograd nodes of leaves, which belong to a stream as long as the caller keeps them.

        A node keeps the stream on which it was made, and lives as long as anything holds it. Autograd lets a backward
        end by waiting for the streams of all leaves that it reaches, with a gradient or without. So leaves without a
        gradient, such as the tables of a fused optimizer, belong to `StreamName.IDLE`, where it waits for nothing.
        Source: `GraphTask::exec_post_processing`, PyTorch 2.11 to 2.14.
        """
        # An evaluation on CUDA is in inference mode, where no node is made.
        with self.on(name), torch.inference_mode(False), torch.enable_grad():
            return [get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad and leaf.is_leaf]

    def give_to_caller(self, made: Made) -> Any:
        """Let the caller of a module, on the compute stream or a stream of its own, use a value; return the value."""
        return made.value

    def take_from_caller(self, value: Any, on: StreamName) -> None:
        """Let a stream use a value that the caller of a module has made, on the compute stream or one of its own."""

    def begin_step(self) -> None:
        """Take the current stream as the compute stream."""

    def current(self) -> StreamName:
        """Return the name of the current stream; a user's stream counts as compute."""
        return StreamName.COMPUTE

    def is_over(self, event: Any) -> bool:
        """Whether the work before an event is done; does not block the host."""
        return True

    def record_for_host(self, name: StreamName, again: Any = None) -> Any:
        """Return an event after all work issued on a stream so far, for which the host waits without using a CPU.

        `again` is an event that this method has returned and the host has waited for.
        """
        return self.record(name)

    def let_host_wait(self, event: Any) -> None:
        """Block the host until the work before an event is done."""

    def __getitem__(self, name: StreamName) -> Any:
        """Return the device's own stream; None on a CPU."""
        return None


class CudaStreams(Streams):
    """CUDA streams, made once and kept for the whole run; `StreamName.LOOKUP` stands for the stream `lookup`.

    One lookup stream serves the run: autograd runs the TBE backward on the stream of its forward, and so the
    lookup of the next batch, queued on that stream, comes after the update of the tables without an event.
    """

    is_async = True

    def __init__(self, device: torch.device, lookup: StreamName) -> None:
        self.device = device
        # High priority as in TorchRec 1.8: short copies and all-to-alls must not queue behind dense kernels.
        urgent = {StreamName.MEMCPY, StreamName.DATA_DIST, StreamName.PREFETCH, lookup}
        self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in StreamName if name in urgent}
        self._streams[StreamName.SIDE] = torch.cuda.Stream(device)  # nothing queues behind it
        self._streams[StreamName.IDLE] = torch.cuda.Stream(device)
        self._orders: dict[StreamName, torch.cuda.Event] = {}  # by first stream, the event of `order`
        self._lookup_stands_for = lookup
        self.begin_step()

    def move_lookups(self, lookup: StreamName) -> None:
        """Let `StreamName.LOOKUP` stand for another stream, while no lookup has its backward to come."""
        if lookup is self._lookup_stands_for:
            return
        if lookup is StreamName.LOOKUP and lookup not in self._streams:
            self._streams[lookup] = torch.cuda.Stream(self.device, priority=-1)
        before = self.record(StreamName.LOOKUP)
        self._lookup_stands_for = lookup
        self.wait(StreamName.LOOKUP, before)

    @override
    def __getitem__(self, name: StreamName) -> torch.cuda.Stream:
        return self._streams[self._lookup_stands_for if name is StreamName.LOOKUP else name]

    @override
    def on(self, name: StreamName) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self[name])

    @override
    def current(self) -> StreamName:
        current = torch.cuda.current_stream(self.device)
        return next((name for name, stream in self._streams.items() if stream == current), StreamName.COMPUTE)

    @override
    def record(self, name: StreamName, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event() if again is None else again
        event.record(self[name])
        return event

    @override
    def order(self, first: StreamName, then: StreamName) -> None:
        if not self.are_same(first, then):
            # A stream that waits for an event waits for its present record: the event can be recorded again at once.
            event = self._orders[first] = self.record(first, self._orders.get(first))
            self.wait(then, event)

    @override
    def wait(self, name: StreamName, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self[name].wait_event(event)

    @override
    def record_stream(self, value: Any, name: StreamName) -> None:
        _Memory(value, self.device).record(self[name])

    @override
    def _record_made(self, made: Made, name: StreamName) -> None:
        self._memory_of(made).record(self[name])

    def _memory_of(self, made: Made) -> "_Memory":
        if made.memory is None:
            made.memory = _Memory(made.value, self.device)
        return made.memory  # type: ignore[no-any-return]

    @override
    def give_to_caller(self, made: Made) -> Any:
        source, compute = self[made.on], self[StreamName.COMPUTE]
        current = torch.cuda.current_stream(self.device)
        for stream in (compute,) if current == compute else (compute, current):
            if stream != source:
                if made.event is None:
                    made.event = self.record(made.on)
                stream.wait_event(made.event)
                self._memory_of(made).record(stream)
        return made.value

    @override
    def take_from_caller(self, value: Any, on: StreamName) -> None:
        compute, current = self[StreamName.COMPUTE], torch.cuda.current_stream(self.device)
        reader = self[on]
        others = [one for one in ((compute,) if current == compute else (compute, current)) if one != reader]
        for stream in others:
            reader.wait_stream(stream)
        if others:
            self.record_stream(value, on)

    @override
    def begin_step(self) -> None:
        self._streams[StreamName.COMPUTE] = torch.cuda.current_stream(self.device)

    @override
    def is_over(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    @override
    def record_for_host(self, name: StreamName, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True) if again is None else again
        event.record(self[name])
        return event

    @override
    def let_host_wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


class _Memory:
    """The tensors of a value on a device, for `record_stream`, and the objects that hold more than a search finds."""

    __slots__ = ("_objects", "_tensors")

    def __init__(self, value: Any, device: torch.device) -> None:
        # `KeyedJaggedTensor.record_stream` of TorchRec 1.8 leaves out `inverse_indices`: so every tensor that is found.
        tensors, is_whole = search(value)
        kind = device.type
        self._tensors = [tensor for tensor in tensors if tensor.device.type == kind]
        self._objects = [] if is_whole else list(_with_hidden_tensors(value, kind))

    def record(self, stream: torch.cuda.Stream) -> None:
        """Tell the caching allocator that a stream reads these tensors."""
        for tensor in self._tensors:
            tensor.record_stream(stream)
        for one in self._objects:
            one.record_stream(stream)


def _with_hidden_tensors(value: Any, kind: str) -> Iterable[Any]:
    """Yield the objects that record tensors of their own: an object of the user's may hold them where nobody looks."""
    for _, leaf in leaves(value, lambda node: hasattr(node, "record_stream")):
        if hasattr(leaf, "record_stream") and not isinstance(leaf, torch.Tensor):
            device = getattr(leaf, "device", None)
            device = device() if callable(device) else device  # `KeyedJaggedTensor.device()` is a method
            if device is None or torch.device(device).type == kind:
                yield leaf


def make_streams(device: torch.device, lookup: StreamName) -> Streams:
    """Return the streams of a device, with early lookups on the given stream."""
    return CudaStreams(device, lookup) if device.type == "cuda" else Streams()


class BatchCopies(TorchDispatchMode):
    """Lets every copy from the host allocate from the compute stream's pool, whose memory activations share.

    The copy then waits for all earlier work of the compute stream, which may still use that memory.
    Source: `enable_inplace_copy_batch` of TorchRec 1.8, which each batch type has to implement.
    """

    def __init__(self, streams: Streams, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams
        self._device_type = device_type

    @override
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is not COPY or device is None or torch.device(device).type != self._device_type:
            return func(*args, **kwargs)
        [source] = args
        if source.device.type != "cpu" or source.layout is not torch.strided:
            return func(*args, **kwargs)
        form = kwargs.get("memory_format") or torch.preserve_format
        with self._streams.on(StreamName.COMPUTE):
            placed = torch.empty_like(source, dtype=kwargs.get("dtype"), device=device, memory_format=form)
        # A batch may be dropped before its copy is over.
        self._streams.use(self._streams.made(placed, StreamName.COMPUTE), on=StreamName.MEMCPY)
        with self._streams.on(StreamName.MEMCPY):
            return placed.copy_(source, non_blocking=bool(kwargs.get("non_blocking")))
