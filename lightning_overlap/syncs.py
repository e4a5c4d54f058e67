"""Predict the host-device syncs of a piece of code, also on a CPU: operators whose result the host reads.

On CUDA each of them makes the host wait for all that was queued before. `torch.cuda.set_sync_debug_mode` finds the same
on a device; this finds them where there is none.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "item"})
"""ATen operators that read a device tensor on the host, or whose output size depends on its values."""

_METHODS: Mapping[Any, str] = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy"}
"""What PyTorch answers on a CPU without an operator, and by a copy to the host on a device."""


@dataclass(frozen=True, slots=True)
class HostSync:
    """One predicted sync.

    Args:
        operator: Its name: an ATen operator's or a tensor method's.
        stack: The Python calls that led to it, outermost first; inside a backward, those up to `backward()`.
    """

    operator: str
    stack: tuple[traceback.FrameSummary, ...]

    def innermost(self, keep: Callable[[str], bool]) -> str:
        """Return `file.py:line function` of the innermost call in a file that `keep` accepts, or ''."""
        for frame in reversed(self.stack):
            if keep(frame.filename):
                return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
        return ""


def _is_masked(args: tuple[Any, ...]) -> bool:
    """Whether an `index` or `index_put` takes a mask: how many elements that is, the host has to know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Dispatched(TorchDispatchMode):
    def __init__(self, found: list[HostSync]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATORS or (name.startswith("index") and _is_masked(args)):
            self._found.append(HostSync(name, _stack()))
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, found: list[HostSync]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self._found.append(HostSync(_METHODS[func], _stack()))
        return func(*args, **(kwargs or {}))


def _stack() -> tuple[traceback.FrameSummary, ...]:
    return tuple(frame for frame in traceback.extract_stack()[:-2])


@contextmanager
def record_host_syncs() -> Iterator[list[HostSync]]:
    """Note every predicted sync of the calling thread, in order; autograd's backward on a CPU is part of it."""
    found: list[HostSync] = []
    with _Dispatched(found), _Called(found):
        yield found
