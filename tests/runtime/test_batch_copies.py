"""`BatchCopies` on a device without memory: which stream gives the memory, which one copies, who waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime.streams import BatchCopies, Streams
from lightning_overlap.schedules.stages import StreamName


class Log(Streams, TorchDispatchMode):
    """Streams that log, and a mode that logs operators with the stream that is current."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._current = [StreamName.MEMCPY]

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        self._current.append(name)
        yield
        self._current.pop()

    def __getitem__(self, name: StreamName) -> StreamName:
        return name

    def record(self, name: StreamName, again: Any = None) -> str:
        return f"event of {name}"

    def wait(self, name: StreamName, event: Any) -> None:
        self.lines.append(f"{name} waits for {event}")

    def record_stream(self, value: Any, name: StreamName) -> None:
        self.lines.append(f"memory handed to {name}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lines.append(f"{func.overloadpacket.__name__} on {self._current[-1]}")
        return func(*args, **(kwargs or {}))


EXPECTED = ["empty_like on compute", "memcpy waits for event of compute", "memory handed to memcpy", "copy_ on memcpy"]


def test_memory_of_the_compute_stream_is_written_behind_it_by_the_copy_stream() -> None:
    log: Any = Log()
    host = torch.randn(4, 3).t()
    with log, BatchCopies(log, "meta"):
        host.to(torch.float64)
        torch.zeros(2, device="meta").to(torch.float64)
        assert not any("waits" in line for line in log.lines), "copies within a device are left alone"
        log.lines.clear()
        copied, changed = host.to("meta", non_blocking=True), host.to(device="meta", dtype=torch.float64)
    assert log.lines == EXPECTED * 2
    assert (copied.shape, copied.stride(), copied.dtype) == (host.shape, host.stride(), host.dtype)
    assert changed.dtype is torch.float64
    log.lines.clear()
    kjt = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.rand(3))
    with log, BatchCopies(log, "meta"):
        kjt.to(torch.device("meta"), non_blocking=True)
    assert [line for line in log.lines if "memcpy" in line] == EXPECTED[1:] * 3
