"""Copy a batch on one stream into device memory from another stream's pool."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ..schedules import StreamName
from .streams import Streams

_TO = torch.ops.aten._to_copy.default


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
        if func is not _TO or device is None or torch.device(device).type != self._device_type:
            return func(*args, **kwargs)
        [source] = args
        if source.device.type != "cpu" or source.layout is not torch.strided:
            return func(*args, **kwargs)
        form = kwargs.get("memory_format") or torch.preserve_format
        with self._streams.on(StreamName.COMPUTE):
            placed = torch.empty_like(source, dtype=kwargs.get("dtype"), device=device, memory_format=form)
        self._streams.wait(StreamName.MEMCPY, self._streams.record(StreamName.COMPUTE))
        self._streams.record_stream(placed, StreamName.MEMCPY)  # a batch may be dropped before its copy is over
        with self._streams.on(StreamName.MEMCPY):
            return placed.copy_(source, non_blocking=bool(kwargs.get("non_blocking")))
