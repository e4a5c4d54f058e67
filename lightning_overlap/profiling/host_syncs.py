"""Predict, also on a CPU, host-device syncs: operators whose result the host reads, for which it waits on CUDA."""

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

from ..compat.torch import READER_OF_STEPS, SYNCING_OPERATORS, TorchDispatchMode

_OPERATORS = frozenset(  # of ATen: they read a device tensor on the host, or its values determine their output's size
    {"nonzero", "masked_select", "equal", "item", "bincount"}
    | {"unique_dim", "unique_consecutive", "unique_dim_consecutive", *SYNCING_OPERATORS}
)
_METHODS: Mapping[Any, str] = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}
"""Tensor methods that copy to the host on a device and call no operator on a CPU."""

NUM_WORST = 3  # places of host syncs in the report


@dataclass(frozen=True, slots=True)
class HostSync:
    """One predicted sync."""

    operator: str  # the ATen operator or the tensor method
    stack: tuple[traceback.FrameSummary, ...]  # outermost call first; inside a backward, the calls up to `backward()`
    stage: str = ""
    blocked_ms: float = 0.0  # duration of the call; on CUDA the host waits for that time
    device: str = "cpu"  # type of the device that it reads from

    @property
    def reads_host(self) -> bool:
        """Whether the memory is on the host also in a run on CUDA, so that the host would not wait."""
        return self.device == "cpu" and any(
            part in frame.filename and function in ("", frame.name)
            for frame in self.stack
            for part, function in _READERS_OF_HOST_MEMORY
        )

    @property
    def is_the_librarys(self) -> bool:
        """Whether this package or Lightning reads, without a line of the user's code."""
        files = [frame.filename for frame in self._frames]
        is_own = bool(files) and (files[0].startswith(_PACKAGE) or "/lightning/" in files[0])
        return is_own and not any(map(_is_users, files))

    def source(self) -> str:
        """Return the user's source line, as `training_step, model.py:42`; else the innermost line outside PyTorch."""
        own = [frame for frame in self._frames if _is_users(frame.filename)]
        places = [f"{frame.name}, {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in own or self._frames]
        return places[0] if places else ""

    @property
    def _frames(self) -> list[traceback.FrameSummary]:
        """The calls inside Lightning's loops and outside PyTorch, innermost first."""
        loops = [place for place, frame in enumerate(self.stack) if _LOOPS in frame.filename]
        inside = self.stack[loops[-1] + 1 if loops else 0 :]  # skips the caller of the trainer
        return [frame for frame in reversed(inside) if not frame.filename.startswith((_TORCH, __file__))]


_READERS_OF_HOST_MEMORY = (  # (part of a file's path, function or '' for all functions)
    READER_OF_STEPS,  # the count of steps, unless `capturable` or `fused`
    ("/fbgemm_gpu/split_table_batched_embeddings_ops_training.py", "forward"),  # the count of steps, `iter_cpu`
    ("/lightning_overlap/compat/fbgemm.py", "lookup_counts"),  # `iter_cpu`
    ("/fbgemm_gpu/split_table_batched_embeddings_ops_training.py", "get_learning_rate"),  # `learning_rate_tensor`
    ("/lightning_overlap/sparse/batch_inputs.py", "note_lengths"),  # of a batch that is still on the host
    ("/lightning_overlap/tables/id_ranges.py", "first_outside"),  # skips ids on a device
    ("/lightning_overlap/distributed/consensus.py", ""),  # uses gloo
    ("/lightning_overlap/tables/quantized_comms.py", ""),  # reads copies that have arrived on the host
    ("/torch/utils/data/", ""),  # batches are made on the host
)

_LOOPS = "/lightning/pytorch/loops/"
_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib")})


def _is_users(file: str) -> bool:
    return not file.startswith(("<", _PACKAGE, *_INSTALLED))


def _counts_elements(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments make the host read an operator's output size from the device."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if not name.startswith("index"):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def record_host_syncs(stage: Callable[[], str] = str) -> Iterator[list[HostSync]]:
    """Yield a growing list of the calling thread's predicted syncs; `stage` returns the name of the current stage."""
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
            # What is passed on is called from here: a part of a table asks who calls (`tables.parts`).
            operator = _METHODS.get(func)
            return func(*args, **(kwargs or {})) if operator is None else run(operator, func, args, kwargs)

    with Dispatched(), Called():  # type: ignore[no-untyped-call]
        yield found


def sync_lines(found: Sequence[HostSync], on_cuda: bool) -> list[str]:
    """Return lines with the number of a step's syncs, and the places that block longest or are most frequent."""
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
