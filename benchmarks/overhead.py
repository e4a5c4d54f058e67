"""What the strategy costs by itself, with a tiny model: the walker, and a whole step beside plain Lightning.

    python benchmarks/overhead.py               # the walker alone, then 1 and 2 CPU ranks: about two minutes
    python benchmarks/overhead.py --profile     # and where the time of a step goes, by function

The walker alone walks each mode's schedule with stages that do nothing, on the host's streams. The step: a model of
two small tables and two linear layers, on CPU ranks; `plain` is DDPStrategy with the same tables sharded by TorchRec by
hand, under the same plan, so that both have the same collectives. Rounds take turns; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

WARM_UP = 20
WATCHED = "fused_sparse_dist, OverlapMonitor"


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps per arm and round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the arms take turns in each")
    parser.add_argument("--arms", nargs="+", help="modes to measure beside plain; all of them if left out")
    parser.add_argument("--num-logs", type=int, default=0, help="how often the model calls self.log in a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on how many ranks to measure the step")
    parser.add_argument("--stream", action="store_true", help="a data loader without a length")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of a step")
    options = parser.parse_args()
    import quiet  # here: its path is known to a script alone

    quiet.be_quiet()
    if "RANK" in os.environ:
        _measure_steps(options)
        return
    _measure_walker()
    for num_ranks in options.ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        subprocess.check_call([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})


# -- the walker alone -------------------------------------------------------------------------------------------


class _Nothing:
    """Sparse stages that do nothing, and a source of batches that never ends."""

    ready = True
    exhausted = stop_requested = length_known = False
    num_batches, num_certain = float("inf"), 0

    def fetch(self, index: int, timer: None) -> Any:
        from lightning_overlap.runtime import FetchedBatch

        return FetchedBatch(object(), 0, 0)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _measure_walker(num_steps: int = 5000) -> None:
    from lightning_overlap import MODES, Stage
    from lightning_overlap.runtime import FetchedBatch, Flight, Streams, Telemetry, Walker

    class NoFlight(Flight):
        """A batch whose stages do nothing."""

        def serve(self, send_next: Any) -> Any:
            return nullcontext()

        def needs_lookup(self, owners: Any) -> bool:
            return any(owner.value != "dense_optimizer" for owner in owners)

        def _do_nothing(self, *args: Any, **kwargs: Any) -> Any:
            """Take the place of a stage."""
            return ()

        send_sizes = send_ids = receive_ids = prefetch = look_up = _do_nothing
        send_gradients = update = drain = drop = _do_nothing

    class NoStages(_Nothing):
        ready = can_defer_updates = True

        def make_flight(self, index: int, fetched: FetchedBatch) -> Flight:
            return NoFlight(index, None)

        def are_overwritten(self, flights: Any) -> bool:
            return False

    print("the walker alone, microseconds per step (median of 5 runs)")
    for name, schedule in MODES.items():
        runs = []
        for _ in range(5):
            source: Any = _Nothing()
            stages: Any = NoStages()
            walker = Walker(schedule, source, stages, Streams(), Telemetry())
            start = time.perf_counter()
            for _ in range(num_steps):
                walker.next_batch()
                with walker.forward():
                    pass
                for stage in (Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.OPTIMIZER_STEP):
                    walker.after(stage)
            runs.append((time.perf_counter() - start) / num_steps * 1e6)
        print(f"  {name:36s}{statistics.median(runs):8.1f}")


# -- a whole step -------------------------------------------------------------------------------------------------


def _measure_steps(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from lightning_overlap import MODES

    torch.set_num_threads(1)
    arms = ["plain", *(options.arms or (*MODES, WATCHED))]
    steps_ms: dict[str, list[float]] = {name: [] for name in arms}
    cpu_ms: dict[str, list[float]] = {name: [] for name in arms}
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn in tqdm(range(options.rounds), disable=rank != 0, desc=f"{num_ranks} ranks", leave=False):
        medians = {}
        for name in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            times_ms, own_cpu_ms = _fit(name, options)
            everyone: list[Any] = [None] * num_ranks
            dist.all_gather_object(everyone, (times_ms, own_cpu_ms))
            slowest = [max(times) for times in zip(*(times for times, _ in everyone), strict=True)]
            cpu_ms[name].append(statistics.fmean(cpu for _, cpu in everyone))
            steps_ms[name] += slowest
            medians[name] = statistics.median(slowest)
        for name in arms:
            ratios[name].append(medians[name] / medians["plain"])
    if rank == 0:
        print(f"{num_ranks} ranks{'':31s}median step   of plain   by round          mean          CPU of a rank")
        for name in arms:
            spread = f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}"
            step_ms, ratio = statistics.median(steps_ms[name]), statistics.median(ratios[name])
            mean_ms = statistics.fmean(steps_ms[name])
            own_cpu_ms = statistics.median(cpu_ms[name])
            print(f"  {name:36s}{step_ms:7.3f} ms{ratio:10.3f}   {spread}{mean_ms:12.3f} ms{own_cpu_ms:12.3f} ms")
    if options.profile:
        profiler = cProfile.Profile()
        _fit("fused_sparse_dist", options, profiler)
        if rank == 0:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    dist.barrier()
    dist.destroy_process_group()


def _fit(arm: str, options: argparse.Namespace, profiler: cProfile.Profile | None = None) -> tuple[list[float], float]:
    """Return the milliseconds of each step, and of the CPU in all threads of this rank for a step."""
    import quiet
    import torch
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    from lightning_overlap import OverlapEmbeddingStrategy, OverlapMonitor

    features = ["a", "b"]
    num_ranks = int(os.environ["WORLD_SIZE"])

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=100, feature_names=[name])
                for name in features
            ]
            self.ebc = EmbeddingBagCollection(tables)
            self.dense = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
            self.starts: list[float] = []
            self.cpu_s = 0.0

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self.starts.append(time.perf_counter())
            if batch_idx == WARM_UP:
                self.cpu_s = time.process_time()
                if profiler is not None:
                    profiler.enable()
            embeddings = self.ebc(batch["ids"]).to_dict()
            loss = self.dense(torch.cat([embeddings[name] for name in features], 1)).square().mean()
            for number in range(options.num_logs):
                self.log(f"loss_{number}", loss)
            return loss

        def on_train_end(self) -> None:
            self.cpu_s = time.process_time() - self.cpu_s
            if profiler is not None:
                profiler.disable()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.dense.parameters(), 0.1)

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    seed_everything(1, verbose=False)
    model = Tiny()
    if arm == "plain":
        strategy: Any = _sharded_by_hand(DDPStrategy)()
    else:
        optimizer = (torch.optim.SGD, {"lr": 0.1})
        mode = arm.partition(",")[0]
        strategy = OverlapEmbeddingStrategy(mode, sharding="table_wise", fused_optimizer=optimizer)
    lengths = torch.ones(2 * 8, dtype=torch.int64)
    batches = [
        {"ids": KeyedJaggedTensor(features, torch.randint(0, 100, (16,)), lengths=lengths)}
        for _ in range(options.steps + WARM_UP)
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        max_epochs=1,
        strategy=strategy,
        **quiet.OPTIONS,
        callbacks=[OverlapMonitor(audit=False, table=False)] if arm == WATCHED else [],
    )
    trainer.fit(model, DataLoader(Stream() if options.stream else batches, batch_size=None))  # type: ignore[arg-type]
    times_ms = [(late - early) * 1e3 for early, late in itertools.pairwise(model.starts)]
    return times_ms[WARM_UP:], model.cpu_s / options.steps * 1e3


def _sharded_by_hand(base: type) -> type:
    """DDPStrategy whose tables are sharded by TorchRec, as a user would do it without this package."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Sharded(base):  # type: ignore[misc]
        def model_to_device(self) -> None:
            ebc = self.model.ebc
            apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
            num_ranks = dist.get_world_size()
            kinds = {
                f"t_{name}": table_wise(rank=place % num_ranks, compute_kernel="fused")
                for place, name in enumerate("ab")
            }
            sharder = EmbeddingBagCollectionSharder()
            plan = construct_module_sharding_plan(ebc, kinds, sharder, num_ranks, num_ranks, "cpu")
            env = ShardingEnv.from_process_group(dist.group.WORLD)
            self.model.ebc = sharder.shard(ebc, plan, env, torch.device("cpu"), "ebc")
            ignored = [name for name, _ in self.model.named_parameters() if name.startswith("ebc.")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
            super().model_to_device()

    return Sharded


if __name__ == "__main__":
    main()
