"""What sending embedding deltas costs a training, and which rows TorchRec's ModelDeltaTracker misses.

    python benchmarks/deltas.py cost                    # 8 tables of 100,000 x 32, batch 512 a rank, 1 and 2 CPU ranks
    python benchmarks/deltas.py cost --size large       # 8 tables of 1,000,000 x 64, batch 2048 a rank
    python benchmarks/deltas.py missed                  # the rows that the tracker reports, and those that changed

The arms take turns in each round; each is a fit of the same model with the same batches. Steps of the slowest rank are
timed in blocks of ten, so that a cut every ten steps is in every block. `cpu` is the CPU time of all threads of all
ranks. Each part of the callback has its time on the clock, and on the CPU, which other programs disturb less. The base
is written before the first step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import quiet

WARM_UP = 20
BLOCK = 10
NEVER = 1_000_000_000


@dataclass(frozen=True)
class Size:
    num_rows: int
    dim: int
    batch_size: int
    num_tables: int = 8


SIZES = {"small": Size(100_000, 32, 512), "large": Size(1_000_000, 64, 2048), "tiny": Size(20_000, 16, 128)}

ARMS: dict[str, dict[str, Any] | None] = {
    "no callback": None,
    "no callback, again": None,
    "marking": {"every_n_steps": NEVER, "dense": False},
    "a cut every 10 steps": {"every_n_steps": 10, "dense": False},
    "a cut every 10, dense": {"every_n_steps": 10, "dense": True},
    "a cut every step": {"every_n_steps": 1, "dense": False},
    "a cut every step, dense": {"every_n_steps": 1, "dense": True},
    "tracker, ids every 10": {"tracker": 10, "rows": False},
    "tracker, rows every 10": {"tracker": 10, "rows": True},
}

PARTS = ("mark", "cut", "wait", "copier", "writer")  # `wait` is in `mark` or `cut`; the last two are other threads
MODES = ("base", "sparse_dist", "fused_sparse_dist", "semi_sync", "semi_sync_deferred", "async_lookup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "missed"))
    parser.add_argument("--size", choices=SIZES, help="of tables and batches; small if left out, tiny for `missed`")
    parser.add_argument("--ids", type=int, default=1, help="ids of each feature in a sample")
    parser.add_argument("--steps", type=int, default=100, help="steps per arm and round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the arms take turns in each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of CPU ranks")
    parser.add_argument("--mode", default="fused_sparse_dist", help="of the pipeline, for `cost`")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="to measure beside no callback")
    parser.add_argument("--folder", help="where files go; left out: a disk in memory, if there is one")
    options = parser.parse_args()
    options.size = options.size or {"cost": "small", "missed": "tiny"}[options.what]
    quiet.be_quiet()
    if "RANK" in os.environ:
        {"cost": _measure_cost, "missed": _measure_missed}[options.what](options)
        return
    for num_ranks in options.ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        subprocess.check_call([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})


class Spent:
    """Milliseconds that parts of the callback's work take, on the clock and on the CPU, in blocks of steps."""

    def __init__(self) -> None:
        self._now: dict[str, list[float]] = {}
        self.blocks: list[dict[str, list[float]]] = []

    def next_block(self) -> None:
        self.blocks.append(self._now)
        self._now = {}

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                cpu, clock = time.thread_time() - cpu, time.perf_counter() - clock
                sums = self._now.setdefault(what, [0.0, 0.0])
                sums[0] += clock * 1e3
                sums[1] += cpu * 1e3

        return timed

    def per_step(self, what: str, *, on_cpu: bool) -> float:
        """Return the median of the blocks after the warm-up."""
        return statistics.median(block.get(what, (0.0, 0.0))[on_cpu] / BLOCK for block in self.blocks[1:])


@contextmanager
def _timed_parts(spent: Spent) -> Iterator[None]:
    from lightning_overlap import EmbeddingDeltas
    from lightning_overlap.deltas.recording.writer import CutWriter
    from lightning_overlap.updated_rows import MarkedRows, UpdateWatch
    from lightning_overlap.updated_rows.touched_rows import TouchedRows

    watch: Any = UpdateWatch._watch
    calls: dict[str, tuple[Any, str]] = {
        "mark": (MarkedRows, "_mark_lookup"),
        "wait": (TouchedRows, "wait_copied"),
        "cut": (EmbeddingDeltas, "on_train_batch_end"),
        "copier": (TouchedRows, "_copy_on_host"),
        "writer": (CutWriter, "_write"),
    }
    with ExitStack() as stack:
        for what, (owner, name) in calls.items():
            call = _method(spent.timed(what, getattr(owner, name)))
            stack.enter_context(mock.patch.object(owner, name, call))
        watched = _method(lambda self, kernel: spent.timed("mark", watch(self, kernel)))
        stack.enter_context(mock.patch.object(UpdateWatch, "_watch", watched))
        yield


def _method(call: Callable[..., Any]) -> Any:
    return lambda self, *args, **kwargs: call(self, *args, **kwargs)


@dataclass
class Measured:
    blocks_ms: list[float]  # per step, on the clock
    cpu_ms: list[float]  # per step, of all threads of the rank
    spent: Spent


def _measure_cost(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    torch.set_num_threads(1)
    arms = ["no callback", *(arm for arm in options.arms if arm != "no callback")]
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, list[list[Measured]]] = {arm: [] for arm in arms}
    for turn in tqdm(range(options.rounds), disable=rank != 0, desc=f"{num_ranks} ranks", leave=False):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            of_ranks: list[Any] = [None] * num_ranks
            measured = _fit_arm(arm, options)
            dist.all_gather_object(of_ranks, measured)
            found[arm].append(of_ranks)
    if rank == 0:
        _print_cost(found, options)
    dist.destroy_process_group()


def _print_cost(found: dict[str, list[list[Measured]]], options: argparse.Namespace) -> None:
    num_ranks = int(os.environ["WORLD_SIZE"])
    steps_ms = {arm: [_slowest(of_ranks) for of_ranks in rounds] for arm, rounds in found.items()}
    cpus_ms = {
        arm: [sum(statistics.median(one.cpu_ms) for one in of_ranks) for of_ranks in rounds]
        for arm, rounds in found.items()
    }
    print(f"\n{options.size}, {options.ids} ids, {options.mode}, {num_ranks} ranks; milliseconds per step")
    heads = "".join(f"{what:>15s}" for what in PARTS)
    print(f"  {'':26s}{'clock':>8s} {'of none':>22s}{'cpu':>8s} {'of none':>22s}{heads}")
    for arm, rounds in found.items():
        line = f"  {arm:26s}"
        for times in (steps_ms, cpus_ms):
            ratios = [mine / plain for mine, plain in zip(times[arm], times["no callback"], strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            line += f"{statistics.median(times[arm]):8.2f} {spread:>22s}"
        for what in PARTS:
            clock_ms, cpu_ms = (_most(rounds, what, on_cpu=on_cpu) for on_cpu in (False, True))
            line += f"{clock_ms:8.3f}/{cpu_ms:6.3f}"
        print(line)


def _most(rounds: list[list[Measured]], what: str, *, on_cpu: bool) -> float:
    return statistics.median(max(one.spent.per_step(what, on_cpu=on_cpu) for one in of_ranks) for of_ranks in rounds)


def _slowest(of_ranks: list[Measured]) -> float:
    return statistics.median(max(blocks) for blocks in zip(*(one.blocks_ms for one in of_ranks), strict=True))


def _fit_arm(arm: str, options: argparse.Namespace) -> Measured:
    import torch.distributed as dist
    from lightning.pytorch import Callback

    from lightning_overlap import EmbeddingDeltas

    spent, clock, cpu = Spent(), list[float](), list[float]()

    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx >= WARM_UP and not (batch_idx - WARM_UP) % BLOCK:
                spent.next_block()
                clock.append(time.perf_counter())
                cpu.append(time.process_time())

    settings = ARMS[arm] or {}
    callbacks: list[Any] = [Clock()]
    folder = None
    if "tracker" in settings:
        callbacks.append(_Tracked(settings["tracker"], spent, rows=settings["rows"]))
    elif settings:
        folder = _folder(options.folder)
        callbacks.append(EmbeddingDeltas(folder, **settings))
    with _timed_parts(spent):
        _fit(SIZES[options.size], options.ids, options.steps + WARM_UP + 1, options.mode, callbacks)
    dist.barrier()
    if folder is not None and int(os.environ["RANK"]) == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return Measured(_per_step(clock), _per_step(cpu), spent)


def _per_step(seconds: list[float]) -> list[float]:
    return [(late - early) * 1e3 / BLOCK for early, late in itertools.pairwise(seconds)]


def _folder(parent: str | None) -> str:
    import torch.distributed as dist

    if parent is None and os.path.isdir("/dev/shm"):
        parent = "/dev/shm"
    names: list[Any] = [tempfile.mkdtemp(prefix="deltas_", dir=parent) if int(os.environ["RANK"]) == 0 else None]
    dist.broadcast_object_list(names, 0)
    return str(names[0])


def _measure_missed(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        print(f"\n{options.size}, {num_ranks} ranks; of the rows that changed between two reads, per cent")
        print(f"  {'':22s}{'read every':>12s}{'tracker misses':>16s}{'stale copies':>14s}{'package misses':>16s}")
    for mode in MODES:
        for every in (1, 10):
            counts = _Missed(every)
            _fit(SIZES[options.size], options.ids, options.steps, mode, [counts])
            of_ranks: list[Any] = [None] * num_ranks
            dist.all_gather_object(of_ranks, counts.counts)
            changed, missed, stale, own = map(sum, zip(*of_ranks, strict=True))
            if rank == 0:
                shares = [f"{100 * number / changed:.2f}" for number in (missed, stale, own)]
                print(f"  {mode:22s}{every:12d}{shares[0]:>16s}{shares[1]:>14s}{shares[2]:>16s}")
    dist.destroy_process_group()


def _tracker_of(module: Any) -> Any:
    """Attach TorchRec's tracker, as DistributedModelParallel does, to a model that is sharded already."""
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
    from torchrec.distributed.model_tracker.types import TrackingMode

    model: Any = SimpleNamespace(module=module, named_modules=module.named_modules)  # all that it asks of one
    return ModelDeltaTrackerTrec(model, mode=TrackingMode.ID_ONLY)


def _tables(module: Any) -> dict[str, Any]:
    """Return this rank's tables, whole: by the names that the tracker has for them."""
    from torchrec.distributed.types import ShardedTensor

    return {
        name.removesuffix(".weight"): value.local_shards()[0].tensor
        for name, value in module.state_dict().items()
        if isinstance(value, ShardedTensor) and value.local_shards()
    }


def _Tracked(every: int, spent: Spent, *, rows: bool) -> Any:
    from lightning.pytorch import Callback

    class Tracked(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.tracker = _tracker_of(pl_module)
            self.tables = _tables(pl_module)
            for module in self.tracker.tracked_modules.values():
                module.post_lookup_tracker_fn = spent.timed("mark", module.post_lookup_tracker_fn)
            self.read = spent.timed("cut", self._read)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not (batch_idx + 1) % every:
                self.read()
            self.tracker.step()

        def _read(self) -> None:
            ids = self.tracker.get_unique_ids()
            if rows:
                self.copied = {name: self.tables[name].index_select(0, found) for name, found in ids.items()}

    return Tracked()


def _Missed(every: int) -> Any:
    """Return a callback that compares the rows that are reported as changed with the changed rows."""
    import torch
    from lightning.pytorch import Callback

    from lightning_overlap.deltas.recording.cuts import merged_rows
    from lightning_overlap.updated_rows.touched_rows import TouchedRows

    class Missed(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.tracker, self.tables = _tracker_of(pl_module), _tables(pl_module)
            self.touched = TouchedRows(pl_module, trainer.strategy.table_access, rank=trainer.global_rank)
            self.before = {name: table.clone() for name, table in self.tables.items()}
            self.replica = {name: table.clone() for name, table in self.tables.items()}
            self.counts = [0, 0, 0, 0]  # changed, missed by the tracker, stale in its copy, missed by the package

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not (batch_idx + 1) % every:
                self._compare(is_first=batch_idx < every)
            # In DistributedModelParallel's forward, where TorchRec has this, a batch that was looked up before would
            # belong to the iteration before, whose ids have been read: a read in each step would find nothing.
            self.tracker.step()

        def _compare(self, *, is_first: bool) -> None:
            try:
                told = self.tracker.get_unique_ids()
            except ValueError:  # torch.cat of nothing, where no batch was looked up since the last read
                told = {}
            marked = {name.removesuffix(".weight"): rows for name, rows in merged_rows(self.touched.marked()).items()}
            self.touched.begin_base()
            for name, table in self.tables.items():
                now, replica = table.clone(), self.replica[name]
                changed = (now != self.before[name]).any(1)
                found, own = torch.zeros_like(changed), torch.zeros_like(changed)
                found[told.get(name, torch.empty(0, dtype=torch.int64))] = True
                own[marked[name]] = True
                replica[found] = now[found]
                self.before[name] = now
                stale = (replica != now).any(1)
                if is_first:
                    continue  # the first read has the batches that were looked up before the first step besides
                for place, rows in enumerate((changed, changed & ~found, changed & stale, changed & ~own)):
                    self.counts[place] += int(rows.sum())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.touched.detach()

    return Missed()


def _fit(size: Size, num_ids: int, num_steps: int, mode: str, callbacks: list[Any]) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from torch import nn
    from torch.utils.data import DataLoader
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    from lightning_overlap import Mode, OverlapEmbeddingStrategy

    features = [f"f{number}" for number in range(size.num_tables)]

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(
                    name=f"t_{name}",
                    embedding_dim=size.dim,
                    num_embeddings=size.num_rows,
                    feature_names=[name],
                    init_fn=lambda weight: nn.init.constant_(weight, 0.01),
                )
                for name in features
            ]
            self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
            self.dense = nn.Sequential(
                nn.Linear(13 + size.num_tables * size.dim, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                nn.Linear(128, 1),
            )  # fmt: skip

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            pooled_BE = self.ebc(batch["ids"]).values()
            logits_B1 = self.dense(torch.cat([batch["dense"], pooled_BE], 1))
            return nn.functional.binary_cross_entropy_with_logits(logits_B1, batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adagrad(self.dense.parameters(), 0.01)

    seed_everything(1 + int(os.environ["RANK"]), verbose=False)
    num_bags = size.num_tables * size.batch_size
    batches = [
        {
            "ids": KeyedJaggedTensor(
                features,
                torch.randint(0, size.num_rows, (num_bags * num_ids,)),
                lengths=torch.full((num_bags,), num_ids),
            ),
            "dense": torch.randn(size.batch_size, 13),
            "labels": torch.randint(0, 2, (size.batch_size, 1)).float(),
        }
        for _ in range(num_steps)
    ]
    seed_everything(1, verbose=False)
    pipeline = Mode(mode, staleness=2) if mode == "async_lookup" else mode
    strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 0.1}))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        strategy=strategy,
        callbacks=callbacks,
        **quiet.OPTIONS,
    )
    trainer.fit(Model(), DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
