"""What each mode holds beyond `base`: the peak of a step, and what is held between two steps.

    python benchmarks/memory.py                   # 2 CPU ranks: under a minute
    python benchmarks/memory.py --pools           # 2 CPU ranks, on each stream: what CUDA's allocator would reserve
    python benchmarks/memory.py --device cuda     # one rank per GPU: every stream policy, reserved memory too
    python benchmarks/memory.py --layers 512 512 512 512 --modes base fused_sparse_dist split_backward

A model of 8 tables whose inputs and embeddings are large beside its dense part. On a CPU glibc tells what of its heap
is in use, as every stage is issued and in every hook of a step; a data loader makes each batch anew, as a copy to a
device would. On CUDA the caching allocator counts. With `--pools` every tensor of the run is given memory by a model of
that allocator, in the pool of the stream that would have made it; kernels' own workspaces are out of its sight. Bytes
of the rank that has most. With `--layers` the dense part has hidden layers of these widths, and the heap is also looked
at as each of their gradients is there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import quiet

NUM_STEPS = 14
STEADY = range(7, 11)
NUM_TABLES, NUM_ROWS, DIM, POOLING, NUM_DENSE = 8, 10_000, 64, 10, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "release_features": {"release_features": True},
    "copy_in_place": {"copy_in_place": True},
}


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pools", action="store_true", help="count the pools of streams; on a CPU")
    parser.add_argument("--batch-size", type=int, default=4096, help="samples per rank")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="widths of hidden layers")
    parser.add_argument("--modes", nargs="*", default=[], help="base and other modes, without options; default: all")
    options = parser.parse_args()
    quiet.be_quiet()
    if "RANK" in os.environ:
        measure("pools" if options.pools else options.device, Work(options.batch_size, options.layers), options.modes)
        return
    num_ranks = 2
    if options.device == "cuda":
        import torch

        num_ranks = torch.cuda.device_count()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    subprocess.check_call([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})


@dataclass(frozen=True)
class Work:
    """What is trained: samples per rank, and widths of hidden layers."""

    batch_size: int
    layers: list[int]


@dataclass(frozen=True)
class Arm:
    """A mode with its stream and its options."""

    pipeline: str
    stream: str
    option: str

    def __str__(self) -> str:
        return f"{self.pipeline}{f'/{self.stream}' if self.stream else ''}{f', {self.option}' if self.option else ''}"


def arms(device: str, modes: list[str]) -> Iterator[Arm]:
    """Every mode, or some; on CUDA on each stream, since each has a pool of memory of its own."""
    from lightning_overlap import MODES, STREAMS, Stage

    for name, schedule in MODES.items():
        if modes and name not in modes:
            continue
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        early = lookup is not None and lookup.offset > 0
        for stream in STREAMS if device != "cpu" and early else ("",):
            for option in OPTIONS if not modes else ("",):
                if (option == "copy_in_place" and device != "cuda") or (option and lookup is None):
                    continue
                yield Arm(name, stream, option)


def measure(device: str, work: Work, modes: list[str]) -> None:
    """Train every arm and print the table."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    held: dict[str, dict[str, int]] = {}
    for arm in tqdm(list(arms(device, modes)), disable=rank != 0, desc="memory", unit="arm"):
        mine = MEASURES[device](arm, work)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        held[str(arm)] = {name: max(one[name] for one in everyone) for name in mine}
    if rank == 0:
        print_table(held)
    dist.destroy_process_group()


def print_table(held: dict[str, dict[str, int]]) -> None:
    """Print what is held beyond `base`, as Markdown."""
    base = held["base"]
    names = list(base)
    print(f"\n| mode | {' | '.join(f'{name} beyond `base`' for name in names)} |")
    print(f"| --- |{' --- |' * len(names)}")
    for arm, of in held.items():
        cells = (f"{(of[name] - base[name]) / 2**20:+.1f} MiB" if arm != "base" else "-" for name in names)
        print(f"| `{arm}` | {' | '.join(cells)} |")
    print("base: " + ", ".join(f"{name} {base[name] / 2**20:.1f} MiB" for name in names))


def train(arm: Arm, work: Work, device: str, at_start: Any, look: Any, strategy_type: Any = None) -> None:
    """Train an arm; `at_start` is called with the number of each step as it begins, `look` at many places of it."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, IterableDataset
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    from lightning_overlap import OverlapEmbeddingStrategy

    batch_size = work.batch_size
    features = [f"f{index}" for index in range(NUM_TABLES)]

    class Data(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
            for _ in range(NUM_STEPS):
                num_ids = NUM_TABLES * batch_size * POOLING
                ids = torch.randint(0, NUM_ROWS, (num_ids,), generator=generator)
                lengths = torch.full((NUM_TABLES * batch_size,), POOLING, dtype=torch.int32)
                kjt = KeyedJaggedTensor(features, ids, lengths=lengths)
                batch = {"dense": torch.randn(batch_size, NUM_DENSE), "sparse": kjt}
                yield {key: value.pin_memory() for key, value in batch.items()} if device == "cuda" else batch

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name])
                    for i, name in enumerate(features)
                ],
                device=torch.device("meta"),
            )
            widths = [NUM_TABLES * DIM + NUM_DENSE, *work.layers]
            layers: list[Any] = []
            for width_in, width_out in pairwise(widths):
                layers += [torch.nn.Linear(width_in, width_out), torch.nn.ReLU()]
            self.top = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 1))
            for weight in self.top.parameters() if work.layers else ():
                weight.register_post_accumulate_grad_hook(lambda _: look())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            embeddings = self.tables(batch["sparse"]).values()
            loss = self.top(torch.cat([embeddings, batch["dense"]], dim=1)).square().mean()
            loss.register_hook(lambda _: look())  # with on_before_backward no backward would be split
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.top.parameters(), 0.1)

    class Timestamps(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            at_start(batch_idx)

        def on_after_backward(self, *_: Any) -> None:
            look()

        on_before_optimizer_step = on_before_zero_grad = on_train_batch_end = on_after_backward

    strategy = (strategy_type or OverlapEmbeddingStrategy)(
        arm.pipeline,
        arm.stream or "data_dist",
        sharding="table_wise",
        fused_optimizer=(torch.optim.SGD, {"lr": 0.1}),
        observer=lambda *_: look(),
        **OPTIONS[arm.option],
    )
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        callbacks=[Timestamps()],
        **quiet.OPTIONS,
    )
    trainer.fit(Model(), DataLoader(Data(), batch_size=None))


class Heap(ctypes.Structure):
    """glibc's `mallinfo2`, over all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]

    def in_use(self) -> int:
        """Return bytes; a tensor of more than some 100 kB is mapped by itself, which is `hblkhd`."""
        return int(self.hblkhd + self.uordblks)


def heap_in_use() -> int:
    """Return the bytes of the heap that are in use now."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Heap
    found: Heap = read()
    return found.in_use()


def measure_on_cpu(arm: Arm, work: Work) -> dict[str, int]:
    """Return the bytes in use at the peak of a steady step, and as it begins."""
    starts: dict[int, int] = {}
    peaks: dict[int, int] = {}
    step = 0

    def look() -> None:
        peaks[step] = max(peaks.get(step, 0), heap_in_use())

    def at_start(index: int) -> None:
        nonlocal step
        step = index
        starts[step] = heap_in_use()
        look()

    gc.collect()
    before = heap_in_use()
    train(arm, work, "cpu", at_start, look)
    return {
        "peak": statistics.median_high(peaks[step] for step in STEADY) - before,
        "between two steps": statistics.median_high(starts[step] for step in STEADY) - before,
    }


def measure_on_cuda(arm: Arm, work: Work) -> dict[str, int]:
    """Return what the caching allocator had given out at most, as a step begins, and reserved."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    starts, peaks, reserved = [], [], []

    def at_start(step: int) -> None:
        torch.cuda.synchronize()
        if step in STEADY:
            starts.append(torch.cuda.memory_allocated())
        if step - 1 in STEADY:
            peaks.append(torch.cuda.max_memory_allocated())
            reserved.append(torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    train(arm, work, "cuda", at_start, lambda: None)
    return {"peak": max(peaks), "between two steps": max(starts), "peak reserved": max(reserved)}


def measure_pools(arm: Arm, work: Work) -> dict[str, int]:
    """Return what a caching allocator would have given out at most, and reserved, by stream."""
    from pools import PooledStreams

    from lightning_overlap import OverlapEmbeddingStrategy, StreamName

    class Counted(OverlapEmbeddingStrategy):
        def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = super().batch_to_device(batch, *args, **kwargs)
            assert isinstance(self.streams, PooledStreams)
            self.streams.take(batch)
            return batch

        def on_train_start(self) -> None:
            assert isinstance(self.streams, PooledStreams)
            self.following = self.streams.following()
            self.following.__enter__()

        def on_train_end(self) -> None:
            super().on_train_end()
            self.following.__exit__(None, None, None)

    made: list[PooledStreams] = []

    def make_streams(device: Any, lookup: StreamName) -> PooledStreams:
        made.append(PooledStreams(lookup))
        return made[-1]

    with mock.patch("lightning_overlap.plugin.strategy.make_streams", make_streams):
        train(arm, work, "cpu", lambda step: None, lambda: None, Counted)
    [streams] = made
    pools = {f"pool of {name}": streams.reserved.get(name, 0) for name in StreamName}
    return {"peak": streams.peak_allocated, "reserved": sum(streams.reserved.values()), **pools}


MEASURES = {"cpu": measure_on_cpu, "cuda": measure_on_cuda, "pools": measure_pools}


if __name__ == "__main__":
    main()
