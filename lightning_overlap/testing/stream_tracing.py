"""Streams of a real run on a CPU that tell for every operator on which stream it would run on a device."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..schedules import StreamName
from .race_detector import SimulatedStreams


class FollowedStreams(SimulatedStreams):
    """Each operator counts as work of the stream that would be current; autograd runs a node on that of its forward."""

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        super().__init__(lookup)
        self._since: list[tuple[int, StreamName]] = [(0, StreamName.COMPUTE)]  # autograd's numbering -> stream

    def _switch(self, stream: StreamName) -> None:
        super()._switch(stream)
        self._since.append((_sequence_number(), stream))

    def following(self) -> AbstractContextManager[Any]:
        """Follow all operators of the calling thread."""
        return Operators(self.ran)

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Take note of an operator that has run and is no view; subclasses say how.

        Args:
            func: The ATen operator.
            args: Its arguments, in the order of its schema.
            result: What it returned.
        """
        raise NotImplementedError

    def stream_of_operator(self) -> tuple[StreamName, bool]:
        """Return the stream of the operator that has just run, and whether a backward ran it."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._current, False
        number = node._sequence_nr()
        if number >= _sequence_number():  # an accumulation of a gradient
            return StreamName.COMPUTE, True
        at = bisect.bisect_right(self._since, number, key=lambda entry: entry[0]) - 1
        return self._since[at][1], True


class Operators(TorchDispatchMode):
    """Tells of every operator of the calling thread that has run and is no view.

    Args:
        ran: Called with the operator, its arguments in the order of its schema, and its result.
    """

    def __init__(self, ran: Callable[[Any, list[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            named = [argument.name for argument in func._schema.arguments]
            self._ran(func, [*args, *(kwargs.get(name) for name in named[len(args) :])], result)
        return result


def _sequence_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of more than one element in a tensor, list or tuple; smaller ones count as the host's."""
    if isinstance(value, Tensor):
        if value.numel() > 1:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)
