"""Find races between streams in a CPU run: simulated streams follow every operator and, by its schema, its memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from ..runtime import Streams, leaves
from ..schedules import StreamName
from .race_detector import Clock, Races

_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class CheckedStreams(Streams):
    """Streams of a run on one rank that raise a `RaceError` if an operator's use of memory is not ordered.

    On a device autograd runs a node on the stream that was current when the node was made. The node's operators belong
    to that stream, and so do the nodes that it makes. Autograd orders a node after all earlier nodes of its backward
    and shares gradients between streams; at the end of the backward no stream waits for another.

    Source: `InputMetadata` (a node's stream) and `Engine::evaluate_function` (its guard) of PyTorch 2.11 to 2.14.
    """

    is_async = True  # as on the simulated device

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self._lookup, self._current = lookup, StreamName.COMPUTE
        self._races = Races()
        self._within: Any = None  # the autograd node that ran when `_current` was set; None outside a backward
        self._since: list[tuple[int, StreamName]] = [(0, StreamName.COMPUTE)]
        """(number n, stream): nodes with autograd's sequence numbers from n on belong to the stream."""
        self._num_noted = 0
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._num_named = 0
        self._ran_in_backward: set[StreamName] = set()
        self._weights: list[str] = []
        self.doing = "start"  # the executor's last event; errors name it as their place

    def __getitem__(self, name: StreamName) -> StreamName:
        return self._lookup if name is StreamName.LOOKUP else name

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Make a stream current, also within an autograd node of another stream."""
        self._note_nodes()
        before = self._current, self._within
        self._current, self._within = self[name], torch._C._current_autograd_node()
        try:
            yield
        finally:
            self._note_nodes()
            self._current, self._within = before

    @override
    def current(self) -> StreamName:
        return self._current

    def memory_of(self, value: Any) -> Iterable[str]:
        """Return the names of the storages of all tensors in a nested value."""
        return map(self._name, _all_tensors(value))

    @override
    def record(self, name: StreamName) -> Clock:
        return self._races.event(self[name])

    @override
    def wait(self, name: StreamName, event: Clock | None) -> None:
        if event is not None:
            self._races.wait(self[name], event)

    @override
    def record_stream(self, value: Any, name: StreamName) -> None:
        self._races.record_stream(self.memory_of(value), self[name])

    @override
    def hand_to_caller(self, value: Any, event: Clock) -> None:
        for name in dict.fromkeys((StreamName.COMPUTE, self._current)):
            self.wait(name, event)
            self.record_stream(value, name)

    def following(self) -> Operators:
        """Follow all operators of the calling thread."""
        return Operators(self.ran)

    def watching(self, weights: Mapping[str, Tensor]) -> Operators:
        """Follow all operators of the calling thread; `weights` are parameters and tables by name."""
        self._weights = [self._name(tensor, label) for label, tensor in weights.items()]
        self._races.do("the load of the weights", StreamName.COMPUTE, writes=self._weights)
        return self.following()

    def take(self, batch: Any) -> None:
        """Note a batch that was copied to the device on the current stream; its tensors are new memory."""
        names = [self._name(tensor, "a tensor of a batch", anew=True) for tensor in _all_tensors(batch)]
        self._races.do(f"the copy of a batch after the {self.doing}", self._current, makes=names)

    def read_weights(self, by: str) -> None:
        """Read all weights on the compute stream, as a callback between two steps may."""
        self._races.do(by, StreamName.COMPUTE, reads=self._weights)

    def stream_of_operator(self) -> tuple[StreamName, bool]:
        """Return the stream of the operator that just ran, and whether autograd chose the stream."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node is self._within:
            return self._current, False
        number = node._sequence_nr()
        if number >= _sequence_number():  # an accumulation of a gradient
            return StreamName.COMPUTE, True
        at = bisect.bisect_right(self._since, number, key=lambda entry: entry[0]) - 1
        return self._since[at][1], True

    def _note_nodes(self) -> None:
        """Note the stream of the nodes made since the last call; it has not changed in between."""
        stream, _ = self.stream_of_operator()
        if stream is not self._since[-1][1]:
            self._since.append((self._num_noted, stream))
        self._num_noted = _sequence_number()

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Raise a `RaceError` if an operator is not ordered after a use of its memory on another stream."""
        self._note_nodes()
        if func.is_view:
            return
        stream, in_backward = self.stream_of_operator()
        reads: list[str] = []
        writes: list[str] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(map(self._name, tensors_of(value)))
        used = {*reads, *writes}
        made = [self._name(tensor, str(func)) for tensor in tensors_of(result)]
        if in_backward:
            for other in {*self._ran_in_backward, self._current}:
                self._races.wait(stream, self._races.event(other))
            self._ran_in_backward.add(stream)
            self._races.record_stream(used, stream)
        elif torch._C._current_autograd_node() is None:
            self._ran_in_backward.clear()
        by = f"{func} after the {self.doing}"
        self._races.do(by, stream, reads=reads, writes=writes, makes=[name for name in made if name not in used])

    def _name(self, tensor: Tensor, label: str = "a tensor", *, anew: bool = False) -> str:
        """Return the name of a tensor's storage; a storage at the address of a freed storage gets a new name."""
        storage = tensor.untyped_storage()
        known, name = self._names.get(storage._cdata, (None, ""))
        if known is None or anew or known.expired():
            self._num_named += 1
            name = f"{label} {tuple(tensor.shape)} (number {self._num_named})"
            self._names[storage._cdata] = StorageWeakRef(storage), name
        return name


def _all_tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value, lambda node: False) if isinstance(leaf, Tensor)]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an operator's argument or result, except scalars, which are on the host."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel() > 1]


class Operators(TorchDispatchMode):
    """Calls `ran(operator, arguments in the schema's order, result)` after every ATen operator, views included."""

    def __init__(self, ran: Callable[[Any, list[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        named = [argument.name for argument in func._schema.arguments]
        self._ran(func, [*args, *(kwargs.get(name) for name in named[len(args) :])], result)
        return result
