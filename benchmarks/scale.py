"""What a rank's host does in a step as ranks and tables grow: one process is rank 0 of many, and nothing is sent.

    python benchmarks/scale.py                                        # all sizes, about 15 minutes
    python benchmarks/scale.py --ranks 256 1024 --tables 64           # some of them
    python benchmarks/scale.py --ranks 1024 --tables 64 --profile fused_sparse_dist

The other ranks are made up: each of them does what rank 0 does, with the same batch. So an all-to-all gives rank 0 what
it sends to itself, once from each rank. Times are CPU time of the training thread, without the time in collectives:
whoever waits, or copies, is not counted. `torchrec` is TrainPipelineSparseDist in a bare loop, whose plan the other
arms have too; these are whole steps under Lightning's Trainer. `torchrec/lightning` is that pipeline there: a manual
`training_step(self, dataloader_iter)` calls `progress`. `lightning` has no pipeline: DistributedModelParallel in an
automatic `training_step`, as users of the modes write it. Each size has a process of its own, with a limit on its time
and memory. The arms take turns. A time is the tenth percentile of a round's steps, since other work on the host
lengthens the CPU time of a thread; ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import quiet

if TYPE_CHECKING:
    import torch

REFERENCES = ("torchrec", "torchrec/lightning", "lightning")
ARMS = (*REFERENCES, "base", "fused_sparse_dist", "split_backward")
WARM_UP, TAIL = 6, 10  # steps that are not counted: the first, and those near the end, whose batches are all polled
ROWS, DIM, BAG = 100, 8, 2
COLUMNS = (
    *("ranks", "tables", "arm", "ms a step"),
    *(column for reference in REFERENCES for column in (f"of {reference}", "by round")),
    *("collectives", "KiB sent", "first step, ms"),
)
RANKS_PER_HOST = 8


def main() -> None:
    """Measure each size in a process of its own, or be one of these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 256, 1024])
    parser.add_argument("--tables", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--sharding", choices=("table_wise", "row_wise"), default="table_wise")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help=f"{', '.join(REFERENCES)}, and names of modes")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=30, help="steps per arm and round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the arms take turns in each")
    parser.add_argument("--limit-s", type=int, default=240, help="seconds for one size")
    parser.add_argument("--limit-gb", type=float, default=8, help="memory for one size")
    parser.add_argument("--profile", help="an arm of the first size: print the functions that take most of its steps")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _be_rank_zero(options)
        return
    from tqdm import tqdm

    sizes = [(ranks, tables) for ranks in options.ranks for tables in options.tables]
    if options.profile:
        print(_measure(options, *sizes[0], profile=True))
        return
    lines = []
    for ranks, tables in tqdm(sizes, leave=False):
        lines += _lines(ranks, tables, _measure(options, ranks, tables))
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    print("\n".join(lines))


def rows_of(ranks: int) -> int:
    """Return the rows of a table: row-wise each rank has some."""
    return max(ROWS, 2 * ranks)


def environment(ranks: int) -> dict[str, str]:
    """Return the variables of rank 0 of so many."""
    local = min(RANKS_PER_HOST, ranks)
    return {
        **{"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local)},
        **{"TORCHELASTIC_RUN_ID": "scale", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"},
    }


def _measure(options: argparse.Namespace, ranks: int, tables: int, *, profile: bool = False) -> Any:
    """Return what a new process has measured with so many ranks and tables, or why it has not."""
    arguments = [*sys.argv[1:], "--ranks", str(ranks), "--tables", str(tables)]
    try:
        ran = subprocess.run(
            [sys.executable, os.path.abspath(__file__), *arguments],
            env=os.environ | environment(ranks),
            capture_output=True,
            text=True,
            timeout=options.limit_s,
        )
    except subprocess.TimeoutExpired:
        return f"not within {options.limit_s} s"
    if ran.returncode != 0:
        if "MemoryError" in ran.stderr or "not enough memory" in ran.stderr:
            return f"not within {options.limit_gb:g} GB"
        sys.exit(ran.stderr)
    return ran.stdout if profile else json.loads(ran.stdout.splitlines()[-1])


def _lines(ranks: int, tables: int, measured: dict[str, Any] | str) -> list[str]:
    if isinstance(measured, str):
        return [f"| {ranks:,} | {tables} | {measured} |" + " |" * (len(COLUMNS) - 3)]
    lines = []
    for name, arm in measured.items():
        of_others = [_ratio(arm, measured.get(other)) for other in REFERENCES]
        cells = [
            *(f"{ranks:,}", str(tables), name, f"{statistics.median(arm['step_ms']):.2f}", *sum(of_others, ())),
            *(f"{arm['num_collectives']:.0f}", f"{arm['num_bytes'] / 1024:.0f}"),
            f"{statistics.median(arm['first_ms']):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(arm: dict[str, Any], reference: dict[str, Any] | None) -> tuple[str, str]:
    """Return how long an arm's step takes as a multiple of another's, and the smallest and largest of a round."""
    if reference is None:
        return "", ""
    by_round = [one / other for one, other in zip(arm["step_ms"], reference["step_ms"], strict=True)]
    ratio = statistics.median(arm["step_ms"]) / statistics.median(reference["step_ms"])
    return f"{ratio:.2f}", f"{min(by_round):.2f} to {max(by_round):.2f}"


# -- ranks that are made up ------------------------------------------------------------------------------------------


class Counts:
    """What the collectives of this process were: how many, their bytes, and the CPU time of this thread in them."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()  # by name
        self.num_bytes = 0.0  # that this rank sends to others
        self.seconds = 0.0
        self.store: Any = None  # torch does not keep the Python object


def make_ranks(num_ranks: int) -> Counts:
    """Make this process rank 0 of so many, of which each does what it does; return what is counted."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup, _create_work_from_future

    counts = Counts()

    class AlikeRanks(dist.ProcessGroup):
        """Every rank sends what this one sends: the fake group's collectives, but for all-to-alls."""

        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)  # type: ignore[call-arg]
            self._fake = FakeProcessGroup._create_internal(rank, size)
            self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._fake)

        def alltoall_base(
            self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
        ) -> Any:
            """Give this rank, from each rank, what it sends to itself: as often as it has place, or its beginning."""
            began = time.thread_time()
            size, me = self.size(), self.rank()
            output, input = output.detach(), input.detach()
            per_rank = input.shape[0] // size
            first, num = (sum(input_sizes[:me]), input_sizes[me]) if len(input_sizes) else (me * per_rank, per_rank)
            mine = input.narrow(0, first, num)
            counts.num_bytes += input.nbytes - mine.nbytes
            sizes = list(output_sizes) or [output.shape[0] // size] * size
            if num and all(one == num for one in sizes):
                output.view(size, num, *output.shape[1:]).copy_(mine)
            else:
                output.fill_(0)  # embeddings and gradients of tables that other ranks have
            return self._done("all_to_all", began, output)

        all_to_all_single = alltoall_base

        def _done(self, name: str, began: float, result: Any) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(result)  # DistributedDataParallel takes gradients from there
            counts.num[name] += 1
            counts.seconds += time.thread_time() - began
            return _create_work_from_future(future)

    def hand_on(name: str, method: str) -> Any:
        def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            size = self.size()
            if name == "allreduce":  # of a ring
                counts.num_bytes += sum(one.nbytes for one in args[0]) * 2 * (size - 1) / size
            elif name == "broadcast":  # of a tree: rank 0 is not the only one that sends
                counts.num_bytes += sum(one.nbytes for one in args[0])
            elif name in ("allgather", "_allgather_base"):
                mine = args[1][0] if name == "allgather" else args[1]
                counts.num_bytes += (mine[0] if isinstance(mine, list) else mine).nbytes * (size - 1)
            getattr(self._fake, method)(*args, **kwargs)
            return self._done(name, began, args[0] if args else None)

        return collective

    names = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base")
    newer = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
    for name, method in {**dict(zip(names, names, strict=True)), **newer, "barrier": "barrier"}.items():
        setattr(AlikeRanks, name, hand_on(method, method))

    class AlikeStore(dist.Store):  # type: ignore[name-defined, misc]
        """What one rank adds to a number, all have added."""

        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self._values[key] = value if isinstance(value, bytes) else value.encode()

        def get(self, key: str) -> bytes:
            return self._values[key]

        def add(self, key: str, amount: int) -> int:
            counts.num["store"] += 1
            number = int(self._values.get(key, b"0")) + amount * num_ranks
            self._values[key] = str(number).encode()
            return number

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            counts.num["store"] += 1
            expected, desired = (one if isinstance(one, bytes) else one.encode() for one in (expected, desired))
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
            return self._values.get(key, b"")

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            pass

    dist.Backend.register_backend("alike", lambda store, rank, size, timeout: AlikeRanks(rank, size), devices=["cpu"])
    counts.store = AlikeStore()
    dist.init_process_group("alike", store=counts.store, rank=0, world_size=num_ranks)
    new_group = dist.new_group
    # Groups of gloo for messages on the host would wait for the other ranks.
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "alike"})
    return counts


# -- the arms --------------------------------------------------------------------------------------------------------


def _be_rank_zero(options: argparse.Namespace) -> None:
    """Measure one size and print the results as JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(options.limit_gb * 2**30), -1))
    import torch

    quiet.be_quiet()
    torch.set_num_threads(1)
    [ranks], [tables] = options.ranks, options.tables
    counts = make_ranks(ranks)
    arms = Arms(options, ranks, tables, counts)
    if options.profile:
        profiler = cProfile.Profile(time.thread_time)
        arms.run(options.profile, profiler)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return
    measured: dict[str, Any] = {
        name: {"step_ms": [], "first_ms": [], "num_collectives": 0, "num_bytes": 0} for name in options.arms
    }
    for turn in range(options.rounds):
        shift = turn % len(options.arms)
        for name in options.arms[shift:] + options.arms[:shift]:
            for what, number in arms.run(name).items():
                into = measured[name]
                into[what] = [*into[what], number] if isinstance(into[what], list) else number
    print(json.dumps(measured))


class Arms:
    """Trains the same model with each arm."""

    def __init__(
        self, options: argparse.Namespace, ranks: int, tables: int, counts: Counts, num_steps: int | None = None
    ) -> None:
        import torch

        self._options, self._ranks, self._counts = options, ranks, counts
        self._names = [f"table_{number}" for number in range(tables)]
        self._num_steps = num_steps or WARM_UP + options.steps + TAIL
        generator = torch.Generator().manual_seed(1)
        num = tables * options.batch_size
        self._ids = torch.randint(0, rows_of(ranks), (num * BAG,), generator=generator)
        self._lengths = torch.full((num,), BAG)
        self._times: list[tuple[float, int, float]] = []  # at the beginning of each step

    def _batch(self) -> Any:
        import torch
        from torchrec import KeyedJaggedTensor

        from lightning_overlap.data import RecBatch

        size = self._options.batch_size
        kjt = KeyedJaggedTensor(list(self._names), self._ids, lengths=self._lengths)  # nothing is known of it yet
        return RecBatch(torch.ones(size, 4), kjt, torch.ones(size))

    def _note(self) -> None:
        counts = self._counts
        self._times.append((time.thread_time() - counts.seconds, counts.num.total(), counts.num_bytes))

    def _network(self) -> Any:
        """Return a module whose `forward(batch)` returns a loss."""
        import torch
        from torch import nn
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        class Network(nn.Module):
            def __init__(self, names: list[str], num_rows: int) -> None:
                super().__init__()
                tables = [
                    EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=num_rows, embedding_dim=DIM)
                    for name in names
                ]
                self.ebc = EmbeddingBagCollection(tables)
                self.dense = nn.Linear(DIM * len(names), 1)

            def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
                loss = self.dense(self.ebc(batch.sparse).values()).square().mean()
                return loss, loss.detach()

        torch.manual_seed(1)
        return Network(self._names, rows_of(self._ranks))

    def _plan(self, bags: Any, path: str) -> Any:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
        from torchrec.distributed.types import ShardingPlan

        table_by_table = self._options.sharding == "table_wise"
        kinds = {
            name: table_wise(rank=number % self._ranks, compute_kernel="fused")
            if table_by_table
            else row_wise(compute_kernel="fused")
            for number, name in enumerate(self._names)
        }
        local = min(RANKS_PER_HOST, self._ranks)
        sharder = EmbeddingBagCollectionSharder()
        return ShardingPlan({path: construct_module_sharding_plan(bags, kinds, sharder, local, self._ranks, "cpu")})

    def run(self, name: str, profiler: cProfile.Profile | None = None) -> dict[str, float]:
        """Train with an arm; return milliseconds of a step and of its first, and what it sends in a step."""
        self._times = []
        with _profiled(profiler, self):
            self.run_once(name)
        steps = [
            [later - earlier for earlier, later in zip(one, other, strict=True)]
            for one, other in zip(self._times, self._times[1:], strict=False)
        ]
        counted = steps[WARM_UP : WARM_UP + self._options.steps]
        times, *sent = zip(*counted, strict=True)
        num_collectives, num_bytes = map(statistics.median, sent)
        first_ms = steps[0][0] * 1e3
        return {
            **{"step_ms": statistics.quantiles(times, n=10)[0] * 1e3, "first_ms": first_ms},
            **{"num_collectives": num_collectives, "num_bytes": num_bytes},
        }

    def run_once(self, name: str) -> None:
        """Train with an arm."""
        others = dict(zip(REFERENCES, (self._run_torchrec, self._run_pipeline, self._run_lightning), strict=True))
        others.get(name, self._run_ours)(name)

    def _run_torchrec(self, name: str) -> None:
        network = self._network()
        pipeline = self._pipeline(network, self._dense_optimizer(network))
        batches = iter([self._batch() for _ in range(self._num_steps)])
        for _ in range(self._num_steps):
            self._note()
            pipeline.progress(batches)
        self._note()

    def _run_pipeline(self, name: str) -> None:
        from lightning.pytorch import LightningModule

        arms, network = self, self._network()

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.network = network
                self.batches: Iterator[Any] | None = None

            def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
                arms._note()
                if self.batches is None:
                    self.batches = (batch for batch, _, _ in dataloader_iter)
                    self.pipeline = arms._pipeline(self.network, self.optimizers())  # which counts the steps
                loss: torch.Tensor = self.pipeline.progress(self.batches)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return arms._dense_optimizer(self.network)

        self._fit(Module(), _without_ddp())

    def _run_lightning(self, name: str) -> None:
        network = self._network()
        sharded = functools.cache(lambda: self._sharded(network))  # in the first step
        self._fit(self._module(network, lambda batch: sharded()(batch)[0]), _without_ddp())

    def _run_ours(self, name: str) -> None:
        import torch

        from lightning_overlap import OverlapEmbeddingStrategy

        network = self._network()
        strategy = OverlapEmbeddingStrategy(
            name, sharding=self._plan(network.ebc, "network.ebc"), fused_optimizer=(torch.optim.SGD, {"lr": 0.1})
        )
        self._fit(self._module(network, lambda batch: network(batch)[0]), strategy)

    def _module(self, network: Any, loss_of: Callable[[Any], torch.Tensor]) -> Any:
        """Return a module as users write it."""
        from lightning.pytorch import LightningModule

        arms = self

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                arms._note()
                return loss_of(batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return arms._dense_optimizer(network)

        return Module()

    def _dense_optimizer(self, network: Any) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(network.dense.parameters(), 0.1)

    def _pipeline(self, network: Any, optimizer: Any) -> Any:
        """Return TorchRec's pipeline of the network, which it shards."""
        import torch
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        return TrainPipelineSparseDist(self._sharded(network), optimizer, torch.device("cpu"))

    def _sharded(self, network: Any) -> Any:
        """Return the network in TorchRec's DistributedModelParallel."""
        import torch
        import torch.distributed as dist
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        apply_optimizer_in_backward(torch.optim.SGD, network.ebc.parameters(), {"lr": 0.1})
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        return DistributedModelParallel(
            network,
            env,
            device=torch.device("cpu"),
            plan=self._plan(network.ebc, "ebc"),
            sharders=[EmbeddingBagCollectionSharder()],
        )

    def _fit(self, module: Any, strategy: Any) -> None:
        from lightning.pytorch import Trainer
        from torch.utils.data import DataLoader

        local = min(RANKS_PER_HOST, self._ranks)
        trainer = Trainer(
            accelerator="cpu",
            devices=local,
            num_nodes=self._ranks // local,
            max_epochs=1,
            strategy=strategy,
            **quiet.OPTIONS,
        )
        batches: Any = [self._batch() for _ in range(self._num_steps)]
        with mock.patch.object(sys, "stdout", sys.stderr):
            trainer.fit(module, DataLoader(batches, batch_size=None))
        self._note()


def _without_ddp() -> Any:
    """Return Lightning's DDPStrategy, which leaves the dense part's DDP to DistributedModelParallel."""
    from lightning.pytorch.strategies import DDPStrategy

    class WithoutDDP(DDPStrategy):
        def configure_ddp(self) -> None:
            """Wrap nothing."""

    return WithoutDDP()


@contextmanager
def _profiled(profiler: cProfile.Profile | None, arms: Arms) -> Iterator[None]:
    """Let a profiler watch the steps that are counted."""
    if profiler is None:
        yield
        return
    note = arms._note

    def note_and_switch() -> None:
        num = len(arms._times)
        if num == WARM_UP:
            profiler.enable()
        elif num == WARM_UP + arms._options.steps:
            profiler.disable()
        note()

    with mock.patch.object(arms, "_note", note_and_switch):
        yield


if __name__ == "__main__":
    main()
