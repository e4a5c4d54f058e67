"""Copies of a state that is written while training goes on, made with as little of the training thread's time."""

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor

from .table_state import Piece, map_shards

_FIXED = {NoneType, bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, torch.dtype}
_FIXED |= {torch.Size, torch.device, type(PurePath())}
_MAPPINGS: set[type] = {dict, OrderedDict, Counter}


class _OtherKindError(Exception):
    """A value whose copy by `torch.save` alone is known."""


class Snapshot:
    """Copies of tensors and containers on the host, which later changes of these do not reach.

    Copies of device tensors are begun on the current stream; the host does not wait. `wait`, in any thread, ends them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}  # what several places share is shared in the copy
        self._kept: list[Any] = []  # no other object may get its number meanwhile
        self._devices: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def begun(self) -> None:
        """Note that all copies are begun."""
        for device in self._devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        """Wait until the copies of device tensors are on the host."""
        for event in self._events:
            event.synchronize()

    def of_piece(self, piece: Piece) -> Piece:
        """Return a copy of a piece of state."""
        if isinstance(piece, ShardedTensor):
            return map_shards(piece, lambda shard: self._on_host(shard.tensor.detach()))
        return self._on_host(piece.detach())

    def saver_of(self, value: dict[str, Any]) -> Callable[[], memoryview]:
        """Return a function, for any thread, that returns what `torch.save` would write now.

        `torch.save` is called now if it is unknown how to copy an object.
        """
        try:
            copied = self._copy(value)
        except _OtherKindError:
            written = saved(value)
            return lambda: written

        def save() -> memoryview:
            self.wait()
            return saved(copied)

        return save

    def _on_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True)
        self._devices.add(tensor.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _FIXED:
            return value
        if (known := self._known.get(id(value))) is not None:
            return known
        self._kept.append(value)
        if kind is Tensor or kind is nn.Parameter:
            copied: Any = self._copy_tensor(value)
        elif kind in _MAPPINGS:
            copied = self._known[id(value)] = kind()
            copy = self._copy
            of_items = {
                key if type(key) in _FIXED else copy(key): one if type(one) in _FIXED else copy(one)
                for key, one in value.items()
            }
            copied.update(of_items)
            if attributes := getattr(value, "__dict__", None):  # such as the `_metadata` of a module's state
                vars(copied).update(self._copy(attributes))
        elif kind is list:
            copied = self._known[id(value)] = []
            copied.extend(map(self._copy, value))
        elif kind is tuple:
            copied = tuple(map(self._copy, value))
        elif kind is set or kind is frozenset:
            copied = kind(map(self._copy, value))
        else:
            raise _OtherKindError
        self._known[id(value)] = copied
        return copied

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        is_plain = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            raise _OtherKindError
        detached = tensor.detach()
        storage = detached.untyped_storage()
        place = storage.device, storage.data_ptr(), storage.nbytes()
        if place not in self._known:
            of_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._known[place] = self._on_host(of_bytes).untyped_storage()
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(self._known[place], tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


def saved(value: Any) -> memoryview:
    """Return what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
