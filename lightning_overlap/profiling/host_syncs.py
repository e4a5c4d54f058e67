"""Predict the host-device syncs of a piece of code, also on a CPU: operators whose result the host reads.

On CUDA each of them makes the host wait for all that was queued before. `torch.cuda.set_sync_debug_mode` finds the same
on a device; this finds them where there is none.
"""

from __future__ import annotations

import os
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "item", "bincount"}
    | {"_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)
"""ATen operators that read a device tensor on the host, or whose output size depends on its values."""

_METHODS: Mapping[Any, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
}
"""Tensor methods that call no operator on a CPU, and copy to the host on a device."""

NUM_WORST = 3  # host syncs that are named


@dataclass(frozen=True, slots=True)
class HostSync:
    """One predicted sync.

    Args:
        operator: Name of the ATen operator or the tensor method.
        stack: The Python calls that led to it, outermost first; inside a backward, those up to `backward()`.
        stage: In which stage of the step it came, '' if in none.
        blocked_ms: How long the call took; on CUDA that is what the host waited.
        device: The type of the device that it reads from.
    """

    operator: str
    stack: tuple[traceback.FrameSummary, ...]
    stage: str = ""
    blocked_ms: float = 0.0
    device: str = "cpu"

    @property
    def reads_host(self) -> bool:
        """Whether it reads memory that is the host's in a run on CUDA too, so that the host does not wait there."""
        if self.device != "cpu":
            return False
        return any(
            part in frame.filename and function in ("", frame.name)
            for frame in self.stack
            for part, function in _READERS_OF_HOST_MEMORY
        )

    @property
    def is_the_librarys(self) -> bool:
        """Whether no line of the user's led to it: one of this package's own reads, or of Lightning's."""
        frames = self._frames
        if any(_is_users(frame.filename) for frame in frames):
            return False
        return bool(frames) and (frames[0].filename.startswith(_PACKAGE) or "/lightning/" in frames[0].filename)

    def source(self) -> str:
        """Return the user's line it came from: `training_step, model.py:42`; else the innermost one outside PyTorch."""
        own = [frame for frame in self._frames if _is_users(frame.filename)]
        frame = next(iter(own or self._frames), None)
        return "" if frame is None else f"{frame.name}, {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"

    @property
    def _frames(self) -> list[traceback.FrameSummary]:
        """The calls within Lightning's loops and outside PyTorch, innermost first."""
        loops = [place for place, frame in enumerate(self.stack) if _LOOPS in frame.filename]
        inside = self.stack[loops[-1] + 1 if loops else 0 :]  # what called the trainer is not where it came from
        return [frame for frame in reversed(inside) if not frame.filename.startswith((_TORCH, __file__))]


_READERS_OF_HOST_MEMORY = (
    ("/torch/optim/optimizer.py", "_get_value"),  # the count of steps, unless `capturable` or `fused`
    ("/fbgemm_gpu/split_table_batched_embeddings_ops_training.py", "forward"),  # its own count of steps, `iter_cpu`
    ("/lightning_overlap/sparse/update_rates.py", "lookup_counts"),  # the same
    ("/fbgemm_gpu/split_table_batched_embeddings_ops_training.py", "get_learning_rate"),  # `learning_rate_tensor`
    ("/lightning_overlap/sparse/pipeline.py", "note_lengths"),  # of a batch that is still on the host
    ("/lightning_overlap/tables/id_ranges.py", "first_outside"),  # leaves ids on a device alone
    ("/lightning_overlap/distributed/consensus.py", ""),  # what the ranks ask each other goes by gloo
    ("/lightning_overlap/tables/comms/overflow.py", ""),  # copies of gradients' ends, once they have arrived
    ("/torch/utils/data/", ""),  # batches are made on the host
)
"""Part of a file's path, and a function in it, or '' for all: what is known to be kept on the host."""

_LOOPS = "/lightning/pytorch/loops/"
_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib")})


def _is_users(file: str) -> bool:
    """Whether a file is neither this package's nor an installed one."""
    return not file.startswith(("<", _PACKAGE, *_INSTALLED))


def _counts_elements(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of many forms has a form whose output size the host has to read from the device."""
    if name == "repeat_interleave":  # the numbers of repetitions, without their sum
        return kwargs.get("output_size") is None
    if not name.startswith("index"):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def record_host_syncs(stage: Callable[[], str] = str) -> Iterator[list[HostSync]]:
    """Record every predicted sync of the calling thread, in order; autograd's backward on a CPU is part of it.

    Args:
        stage: Returns the name of the stage that the step is in; called at each sync.

    Yields:
        The syncs so far, a list that grows within the context.
    """
    found: list[HostSync] = []

    def run(operator: str | None, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if operator is None:  # no sync
            return func(*args, **(kwargs or {}))
        stack = tuple(traceback.extract_stack()[:-2])
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        blocked_ms = (time.perf_counter() - start) * 1e3
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)} - {"cpu"}
        found.append(HostSync(operator, stack, stage(), blocked_ms, next(iter(devices), "cpu")))
        return result

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            syncs = name in _OPERATORS or _counts_elements(name, args, kwargs or {})
            return run(name if syncs else None, func, args, kwargs)

    class Called(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(_METHODS.get(func), func, args, kwargs)

    with Dispatched(), Called():  # type: ignore[no-untyped-call]
        yield found


def sync_lines(found: Sequence[HostSync], on_cuda: bool) -> list[str]:
    """Say how many host-device syncs a step had, and name the worst: those that blocked longest, or came most often."""
    places: dict[tuple[str, str, str], list[float]] = {}
    for sync in found:
        places.setdefault((sync.stage, sync.source(), sync.operator), []).append(sync.blocked_ms)
    what = "host syncs" if on_cuda else "reads that would be host syncs on CUDA"
    lines = [f"{what} in a step: {len(found)}"]
    worst = sorted(places.items(), key=lambda place: (-sum(place[1]) if on_cuda else 0, -len(place[1])))
    for (stage, source, operator), blocked_ms in worst[:NUM_WORST]:
        time_blocked = f", blocked {sum(blocked_ms):.2f} ms" if on_cuda else ""
        lines.append(f"  {len(blocked_ms)} x {source}: .{operator}() in {stage or 'the loop'}{time_blocked}")
    return lines
