"""Find races between streams in a CPU run: simulated streams follow every operator and, by its schema, its memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from ..compat.torch import (
    TorchDispatchMode,
    address_of,
    arguments_of,
    call_after_backward,
    current_backward,
    current_node,
    next_sequence_number,
    sequence_number,
    tree_leaves,
)
from ..runtime import Made, Streams, tensors_in
from ..schedules import StreamName
from .race_detector import Clock, Races

_ADD = torch.ops.aten.add.Tensor
_STREAM_OF_LEAF, _HOOKED_BY = "lightning_overlap: stream", "lightning_overlap: hooked by"  # in a node's metadata


class _Backward:
    """A backward that runs: one `backward()` call, perhaps within a node of another one."""

    def __init__(self, number: int, caller: StreamName, start: Clock) -> None:
        self.number, self.caller, self.start = number, caller, start
        self.joins: list[StreamName] = []  # streams of the leaves that it has reached, which `caller` waits for
        self.after: dict[Any, tuple[StreamName, Clock]] = {}  # node -> its stream, and an event after its last operator


class CheckedStreams(Streams):
    """Streams of a run on one rank that raise a `RaceError` if an operator's use of memory is not ordered.

    The order within a backward is that of autograd's engine on a device:

    - A node runs on the stream that was current when the node was made. The node's operators belong to that stream, and
      so do the nodes that it makes. The node of a leaf, which accumulates the leaf's gradient, belongs to the stream of
      the leaf's first use while no graph held that node.
    - A node waits for the nodes that made its gradients, and for nothing else. The first nodes wait for the stream of
      the caller. A gradient that changes streams is recorded on its new stream; other memory is not.
    - Gradients of one input are summed on the stream of the node that takes the sum.
    - At the end, the stream of the caller waits for the streams of all leaves that the backward has reached, with a
      gradient or without. No other stream waits for another.

    It sees operators, not edges. So it takes every gradient that an operator of a node reads for one that came to the
    node along an edge, and every sum of two gradients for the engine's own: a race between a hook of the user's and a
    node that share a gradient by other means is not found.

    Source: `InputMetadata` (a node's stream), `InputBuffer::add` (who waits for whom), `Engine::evaluate_function` (its
    guard, and the leaves' streams) and `GraphTask::exec_post_processing` (the end) of PyTorch 2.11 to 2.14.
    """

    is_async = True  # as on the simulated device

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self._lookup, self._current = lookup, StreamName.COMPUTE
        self._races = Races(frees=True)
        self._within: Any = None  # the autograd node that ran when `_current` was set; None outside a backward
        self._since: list[tuple[int, StreamName]] = [(0, StreamName.COMPUTE)]
        """(number n, stream): nodes with autograd's sequence numbers from n on belong to the stream."""
        self._num_noted = 0
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._held: dict[str, StorageWeakRef] = {}
        self._num_named = 0
        self._backwards: list[_Backward] = []  # those that run, the innermost last
        self._num_backwards = 0  # numbers below belong to backwards that have begun
        self._makers: dict[str, set[Any]] = {}  # gradient, made in a backward -> the nodes that have made or written it
        self._sums: dict[str, list[str]] = {}  # gradient -> its terms, while no node has used it
        self._leaves: list[Tensor] = []  # the watched leaves
        self._weights: list[str] = []
        self._counters: list[str] = []
        self.doing = "start"  # the walker's last event; errors name it as their place

    def __getitem__(self, name: StreamName) -> StreamName:
        return self._lookup if name is StreamName.LOOKUP else name

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Make a stream current, also within an autograd node of another stream."""
        self._note()
        before = self._current, self._within
        self._current, self._within = self[name], current_node()
        try:
            yield
        finally:
            self._note()
            self._current, self._within = before

    @override
    def current(self) -> StreamName:
        return self._current

    def memory_of(self, value: Any) -> Iterable[str]:
        """Return the names of the storages of the tensors in a nested value that `record_stream` reaches."""
        return map(self._name, tensors_in(value))

    @override
    def record(self, name: StreamName, again: Clock | None = None) -> Clock:
        self._note()
        return self._races.event(self[name])

    @override
    def wait(self, name: StreamName, event: Clock | None) -> None:
        self._note()
        if event is not None:
            self._races.wait(self[name], event)

    @override
    def record_stream(self, value: Any, name: StreamName) -> None:
        self._races.record_stream(self.memory_of(value), self[name])

    @override
    def give_to_caller(self, made: Made) -> Any:
        for name in dict.fromkeys((StreamName.COMPUTE, self._current)):
            self.use(made, on=name)
        return made.value

    @override
    def _record_made(self, made: Made, name: StreamName) -> None:
        if made.memory is None:
            made.memory = [*self.memory_of(made.value)]
        self._races.record_stream(made.memory, self[name])

    @override
    def take_from_caller(self, value: Any, on: StreamName) -> None:
        others = [name for name in dict.fromkeys((StreamName.COMPUTE, self._current)) if not self.are_same(name, on)]
        for stream in others:
            self.wait(on, self.record(stream))
        if others:
            self.record_stream(value, on)

    def following(self) -> Operators:
        """Follow all operators of the calling thread."""
        return Operators(self.ran)

    def watching(
        self, weights: Mapping[str, Tensor], counters: Mapping[str, Tensor], leaves: Iterable[Tensor]
    ) -> Operators:
        """Follow all operators of the calling thread.

        Args:
            weights: Parameters and tables by name.
            counters: What lookups write too, by name: the kernels' iteration counts.
            leaves: The parameters at which graphs end.
        """
        self._weights = [self._name(tensor, label) for label, tensor in weights.items()]
        self._counters = [self._name(tensor, label) for label, tensor in counters.items()]
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
        self._races.do("the load of the weights", StreamName.COMPUTE, writes=[*self._weights, *self._counters])
        return self.following()

    def take(self, batch: Any) -> None:
        """Note a batch that was copied to the device on the current stream; its tensors are new memory."""
        names = [self._name(tensor, "a tensor of a batch", anew=True) for tensor in tensors_in(batch)]
        self._races.do(f"the copy of a batch after the {self.doing}", self._current, makes=names)

    def read_weights(self, by: str, *, counters: bool = False) -> None:
        """Read all weights on the compute stream, as a callback between two steps may; a save reads `counters` too."""
        self._note()
        self._races.do(by, StreamName.COMPUTE, reads=[*self._weights, *(self._counters if counters else ())])

    def stream_of_operator(self) -> tuple[StreamName, bool]:
        """Return the stream of the operator that just ran, and whether autograd chose the stream."""
        node: Any = current_node()
        if node is None or node is self._within:
            return self._current, False
        return self._stream_of_node(node), True

    def _stream_of_node(self, node: Any) -> StreamName:
        number = sequence_number(node)
        if number >= next_sequence_number():
            return self._stream_of_leaf(node)
        at = bisect.bisect_right(self._since, number, key=lambda entry: entry[0]) - 1
        return self._since[at][1]

    def _stream_of_leaf(self, node: Any) -> StreamName:
        noted: StreamName | None = node.metadata.get(_STREAM_OF_LEAF)
        if noted is None:  # a leaf that is not watched: one made in a step, on the stream of its memory
            noted = self._races.maker(self._name(node.variable)) or StreamName.COMPUTE
        return noted

    def _note(self) -> None:
        """Note what was made since the last call, on a stream that has not changed: nodes, and those of leaves."""
        stream = self._note_nodes()
        for name in [name for name in self._races.not_recorded if self._held[name].expired()]:
            self._races.free(name)
        if not torch.is_inference_mode_enabled():
            for leaf in self._leaves:
                node: Any = get_gradient_edge(leaf).node  # a new one, if no graph holds it; then it ends here
                if _STREAM_OF_LEAF not in node.metadata:
                    node.metadata[_STREAM_OF_LEAF] = stream
                if node.metadata.get(_HOOKED_BY) is not self:
                    node.metadata[_HOOKED_BY] = self
                    node.register_prehook(self._reach_leaf)

    def _note_nodes(self) -> StreamName:
        self._follow_backwards()
        stream, _ = self.stream_of_operator()
        if stream is not self._since[-1][1]:
            self._since.append((self._num_noted, stream))
        self._num_noted = next_sequence_number()
        return stream

    @override
    def hold_leaves(self, leaves: Iterable[Tensor], name: StreamName) -> list[Any]:
        nodes = super().hold_leaves(leaves, name)
        for node in nodes:
            node.metadata.setdefault(_STREAM_OF_LEAF, name)
        return nodes

    def _reach_leaf(self, gradients: Any) -> None:
        self._note_nodes()
        stream = self._stream_of_leaf(current_node())
        self._backwards[-1].joins.append(stream)
        self._acquire_gradients(stream, map(self._name, self._on_device(gradients)))

    def _follow_backwards(self) -> None:
        """Begin and end backwards, as autograd has since the last call."""
        number, node = current_backward(), current_node()
        while self._backwards and (number < self._backwards[-1].number or node is None):
            self._end_backward(self._backwards[-1])
        if node is None or number < self._num_backwards:
            return
        self._num_backwards = number + 1
        caller = self._current
        if self._backwards:  # within the node that ran last, unless a stream was chosen inside it
            outer = self._backwards[-1]
            caller = next((stream for stream, _ in reversed(outer.after.values())), caller)
            caller = self._current if self._within in outer.after else caller
        running = _Backward(number, caller, self._races.event(caller))
        self._backwards.append(running)
        call_after_backward(partial(self._end_backward, running))

    def _end_backward(self, ended: _Backward) -> None:
        if ended in self._backwards:
            del self._backwards[self._backwards.index(ended) :]
            for stream in dict.fromkeys(ended.joins):
                self._races.wait(ended.caller, self._races.event(stream))
            if not self._backwards:
                self._makers.clear()
                self._sums.clear()

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Raise a `RaceError` if an operator is not ordered after a use of its memory on another stream."""
        self._note_nodes()
        if func.is_view:
            return
        stream, in_backward = self.stream_of_operator()
        reads: list[str] = []
        writes: list[str] = []
        for argument, value in zip(arguments_of(func), args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(map(self._name, self._on_device(value)))
        used = {*reads, *writes}
        if func is _ADD and used and used <= self._makers.keys():
            self._sums[self._name(result, "a sum of gradients")] = reads
            self._makers[self._name(result)] = set()
            return
        results = tensors_of(result) if used else self._on_device(result)
        made = [self._name(tensor, str(func)) for tensor in results]
        if in_backward:
            self._acquire_gradients(stream, used)
        by = f"{func} after the {self.doing}"
        self._races.do(by, stream, reads=reads, writes=writes, makes=[name for name in made if name not in used])
        if self._backwards:
            node: Any = current_node()
            own = self._stream_of_node(node)
            self._backwards[-1].after[node] = own, self._races.event(own)
            for name in made:
                if name not in used:
                    self._makers[name] = {node}
            for name in writes:
                if name in self._makers:
                    self._makers[name].add(node)

    def _acquire_gradients(self, stream: StreamName, used: Iterable[str]) -> None:
        """Let the stream of a node wait for the makers of its gradients, and use their memory."""
        running = self._backwards[-1]
        self._races.wait(stream, running.start)
        for name in used:
            if name not in self._makers:
                continue
            # A gradient of an outer backward came through the node that runs this one, which has waited for its makers.
            for backward in self._backwards:
                for maker in self._makers[name] & backward.after.keys():
                    self._races.wait(stream, backward.after[maker][1])
            self._races.record_stream([name], stream)
            if (terms := self._sums.pop(name, None)) is not None:
                self._acquire_gradients(stream, terms)
                self._races.do(f"the sum of gradients after the {self.doing}", stream, reads=terms, makes=[name])
                self._makers[name] = {node} if (node := current_node()) else set()

    def _on_device(self, value: Any) -> list[Tensor]:
        """Return the tensors that would be on the device: scalars only if they are watched, or made of such tensors."""
        return [one for one in tensors_of(value) if one.numel() > 1 or self._known(one) is not None]

    def _known(self, tensor: Tensor) -> str | None:
        held, name = self._names.get(address_of(tensor.untyped_storage()), (None, ""))
        return None if held is None or held.expired() else name

    def _name(self, tensor: Tensor, label: str = "a tensor", *, anew: bool = False) -> str:
        """Return the name of a tensor's storage; a storage at the address of a freed storage gets a new name."""
        name = None if anew else self._known(tensor)
        if name is None:
            storage = tensor.untyped_storage()
            self._num_named += 1
            name = f"{label} {tuple(tensor.shape)} (number {self._num_named})"
            self._held[name] = StorageWeakRef(storage)
            self._names[address_of(storage)] = self._held[name], name
        return name


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an operator's argument or result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel() > 0]


class Operators(TorchDispatchMode):
    """Calls `ran(operator, arguments in the schema's order, result)` after every ATen operator, views included."""

    def __init__(self, ran: Callable[[Any, list[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        named = [argument.name for argument in arguments_of(func)]
        self._ran(func, [*args, *(kwargs.get(name) for name in named[len(args) :])], result)
        return result
