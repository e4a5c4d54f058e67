"""What a step asks of the CUDA runtime and of the interpreter, counted on a CPU: our modes beside TorchRec's pipelines.

    python benchmarks/host_cost.py                               # two ranks, all arms of `ARMS`: about two minutes
    python benchmarks/host_cost.py --arms fused_sparse_dist --functions 40    # and which Python functions are called

Streams and events of `torch.cuda` are replaced by ones that count and do nothing, in this process alone; tensors and
collectives are the CPU's. So the host runs what it runs on a GPU for streams, events and `record_stream`, except for
what depends on where a tensor is: pinned copies, NCCL, and FBGEMM's CUDA kernels. All arms train the same model on the
same batches, by the code of `overlap-bench`. Counts are of one step in the steady state, the mean of `--steps`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

STREAMED = ("fused_sparse_dist", "fused_sparse_dist_after_optimizer", "split_backward")  # modes that use `stream`
ARMS = (
    *("base", "sparse_dist", "prefetch"),
    *(f"{mode}{stream}" for mode in STREAMED for stream in ("", "/current", "/dedicated")),
    *("torchrec/base", "torchrec/sparse_dist", "torchrec/fused_sparse_dist", "torchrec/prefetch"),
)
SMALL = ("data.batch_size=16", "data.rows_per_table=100", "warm_up=1", "num_batches=4")
COLUMNS = {  # what is counted -> what it is called in the table
    **{"made": "events made", "recorded": "recorded", "waits": "waits", "idle waits": "of the same stream"},
    **{"host waits": "by the host", "queries": "queried", "switches": "switches", "looks": "current_stream"},
    **{"record_stream": "record_stream", "walks": "walks", "calls": "Python calls", "C calls": "C calls"},
}
WARM_UP = 8
QUIET = ("torchrec", "lightning.pytorch", "lightning.fabric", "torch.fx", "lightning.pytorch.lightning_overlap")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="arms of overlap-bench")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--functions", type=int, default=0, help="print the functions called most, as many as this")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        subprocess.check_call([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counted = {arm: count(arm, options.steps, options.tables) for arm in options.arms}
    if dist.get_rank() == 0:
        print("\n".join(table({arm: found.numbers for arm, found in counted.items()})))
        for arm, found in counted.items() if options.functions else ():
            print(f"\n{arm}: calls of a step, by function")
            for code, number in found.functions.most_common(options.functions):
                print(f"{number / options.steps:9.1f}  {_place_of(code)}")
    dist.barrier()
    dist.destroy_process_group()


def table(counted: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| a step of | {' | '.join(COLUMNS.values())} |"
    yield "| --- |" + " --- |" * len(COLUMNS)
    for arm, numbers in counted.items():
        yield f"| `{arm}` | {' | '.join(f'{numbers[name]:g}' for name in COLUMNS)} |"


# -- stand-ins ----------------------------------------------------------------------------------------------------


class Counts:
    """Counts while `counting`: of the stand-ins, and with `profile` of function calls in this thread."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._totals: Counter[str] = Counter()
        self.functions: Counter[CodeType | str] = Counter()
        self.counting = False
        self._walkers = _walkers()

    @property
    def numbers(self) -> dict[str, float]:
        """The counts of one step."""
        return {name: round(self._totals[name] / self._num_steps, 2) for name in COLUMNS}

    def add(self, name: str) -> None:
        """Count one."""
        if self.counting:
            self._totals[name] += 1

    def start(self) -> None:
        """Begin."""
        self.counting = True
        sys.setprofile(self._called)

    def stop(self) -> None:
        """End."""
        sys.setprofile(None)
        self.counting = False

    def _called(self, frame: FrameType, kind: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == __file__:
            return
        if kind == "call":
            self._totals["calls"] += 1
            self.functions[code] += 1
            if code in self._walkers and (frame.f_back is None or frame.f_back.f_code is not code):
                self._totals["walks"] += 1
        elif kind == "c_call":
            self._totals["C calls"] += 1


def _walkers() -> frozenset[CodeType]:
    """Return the functions that walk a batch or another nested value, tensor by tensor."""
    from lightning_utilities.core.apply_func import apply_to_collection
    from torch.utils import _pytree
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from lightning_overlap.data.batch import RecBatch
    from lightning_overlap.runtime import batch_tree

    walking = [apply_to_collection, batch_tree.leaves, batch_tree.search, RecBatch.to, RecBatch.record_stream]
    walking += [KeyedJaggedTensor.to, KeyedJaggedTensor.record_stream]
    walking += [_pytree.tree_flatten, _pytree.tree_leaves, _pytree.tree_map]
    return frozenset(function.__code__ for function in map(_unwrapped, walking))


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@contextlib.contextmanager
def stand_ins(counts: Counts) -> Iterator[None]:
    """Within this context `torch.cuda` has streams and events that count, for a device without a GPU."""
    place = torch.device("cpu")
    numbers = iter(range(1 << 30))

    class Stream:
        """A stream; its work is that of the calling thread."""

        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.device, self.number = place, next(numbers)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            counts.add("queries")
            return True

        def synchronize(self) -> None:
            counts.add("host waits")

    class Event:
        """An event; CUDA makes it when it is first recorded."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> None:
            self.on: Any = None

        def record(self, stream: Any = None) -> None:
            counts.add("recorded")
            if self.on is None:
                counts.add("made")
            self.on = current[-1] if stream is None else stream

        def wait(self, stream: Any = None) -> None:
            counts.add("waits")
            if self.on is (current[-1] if stream is None else stream):
                counts.add("idle waits")

        def query(self) -> bool:
            counts.add("queries")
            return True

        def synchronize(self) -> None:
            counts.add("host waits")

    current = [Stream()]

    class On:
        """What `torch.cuda.stream` returns."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            set_stream(current[-1] if self._stream is None else self._stream)

        def __exit__(self, *error: object) -> None:
            counts.add("switches")
            current.pop()

    def set_stream(stream: Any) -> None:
        counts.add("switches")
        current.append(stream)

    def current_stream(device: Any = None) -> Any:
        counts.add("looks")
        return current[-1]

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        counts.add("record_stream")

    replaced = {"Stream": Stream, "Event": Event, "stream": On, "current_stream": current_stream}
    with (
        mock.patch.multiple(torch.cuda, **replaced),
        mock.patch.object(torch, "get_device_module", return_value=torch.cuda),
        mock.patch.object(torch.Tensor, "record_stream", record_stream, create=True),
    ):
        yield


# -- arms ---------------------------------------------------------------------------------------------------------


def count(arm: str, num_steps: int, num_tables: int = 8) -> Counts:
    """Train an arm of `overlap-bench` on the stand-ins; return the counts of its steps."""
    from lightning_overlap.apps import bench_arms, bench_worker, build, config_checks

    num_all = WARM_UP + num_steps + 4
    config = _config([*SMALL, f"arms=[{arm}]", f"data.num_tables={num_tables}"])
    counts = Counts(num_steps)
    data = build.build_data(config)
    data.prepare_data()
    data.setup("fit")
    made = list(bench_worker.own_batches(config, data.train_dataloader(), dist.get_rank(), dist.get_world_size()))
    loader: Any = torch.utils.data.DataLoader([made[at % len(made)] for at in range(num_all)], batch_size=None)  # type: ignore[arg-type]
    done = iter(range(1, num_all + 1))

    def after_step(loss: torch.Tensor, strategy: Any) -> None:
        number = next(done)
        if number == WARM_UP:
            counts.start()
        elif number == WARM_UP + num_steps:
            counts.stop()

    with (
        tempfile.TemporaryDirectory() as folder,
        stand_ins(counts),
        _on_streams(arm, config_checks.BY_HAND),
        warnings.catch_warnings(action="ignore"),
        _quiet_loggers(),
    ):
        job = bench_arms.Job(config, data, loader, torch.device("cpu"), after_step, Path(folder))
        try:
            bench_arms.train(arm, job)
        finally:
            counts.stop()
    return counts


@contextlib.contextmanager
def _quiet_loggers() -> Iterator[None]:
    loggers = list(map(logging.getLogger, QUIET))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _on_streams(arm: str, by_hand: Any) -> Iterator[None]:
    """Give the strategy CUDA's streams, and TorchRec's pipelines a device that has streams."""
    from torchrec.distributed.train_pipeline import train_pipelines

    from lightning_overlap.plugin import strategy
    from lightning_overlap.runtime import CudaStreams

    def make_pipeline(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(model: Any, optimizer: Any, device: torch.device, **kwargs: Any) -> Any:
            pipeline = make(model, optimizer, torch.device("cuda"), **kwargs)
            pipeline._device = device  # its batches stay where they are
            return pipeline

        return made

    patches = [mock.patch.object(strategy, "make_streams", CudaStreams)]
    if by_hand.get(arm, ("", None))[0]:
        name = by_hand[arm][0]
        patches += [mock.patch.object(train_pipelines, name, make_pipeline(getattr(train_pipelines, name)))]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _config(overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from lightning_overlap.apps import hydra_command

    with initialize_config_module("lightning_overlap.conf", version_base="1.3"):
        composed = compose("bench", overrides=list(map(hydra_command.add_or_override, overrides)))
    return dict(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def _place_of(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code
    file = Path(code.co_filename)
    return f"{code.co_qualname}  ({'/'.join(file.parts[-2:])}:{code.co_firstlineno})"


if __name__ == "__main__":
    main()
