"""The work of one rank of `overlap-bench`: train the arms in turns, time each step, and report."""

import itertools
import os
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm

from .. import versions
from ..distributed import gather_objects
from ..profiling import Span, overlapped_by, timestamps_of, write_png
from ..schedules import Schedule
from ..tables import find_tables
from . import bench_report, build, config_checks, train_worker
from .bench_arms import Job, train
from .bench_report import ArmTurns, Turn
from .config_checks import Config
from .step_timers import Meter, free_memory

TIMEOUT = timedelta(minutes=5)  # of the arms' collectives; an arm that hangs must not block the others for long
DRAIN = 4  # uncounted steps at the end, in which a draining pipeline has less work


def run(config: Config, folder: Path) -> None:
    """Train every arm in every round on this rank; rank 0 prints and writes the report."""
    logs_outside_of_a_trainer = ".*trying to .self.log\\(\\). but the .self.trainer."
    train_worker.prepare(config, logs_outside_of_a_trainer, "You defined a .validation_step. but have no")
    if config["deterministic"]:
        _be_deterministic()
    on_cuda = build.on_cuda(config)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT)
    bench = _Bench(config, folder, device)
    turns = bench.all_rounds()
    if dist.get_rank() == 0:
        bench.report(turns)
        bench.draw()
        print(f"\nrun folder: {folder}", flush=True)
    dist.barrier(bench.group)
    dist.destroy_process_group()


def _be_deterministic() -> None:
    """Let this process, which trains nothing else, use deterministic algorithms; warn of operators that have none."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as PyTorch's notes on reproducibility ask
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid, slow
    torch.use_deterministic_algorithms(True, warn_only=True)


class _Bench:
    def __init__(self, config: Config, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT * 2)
        self.ours = config_checks.our_arms(config)
        self.data = build.build_data(config)
        alone = SimpleNamespace(global_rank=dist.get_rank(), world_size=dist.get_world_size(), current_epoch=0)
        self.data.trainer = alone  # type: ignore[assignment]
        self.data.prepare_data()
        self.data.setup("fit")
        # On the host, before timing starts.
        batches = list(own_batches(config, self.data.train_dataloader(), alone.global_rank, alone.world_size))
        self.batches = [batch.pin_memory() for batch in batches] if device.type == "cuda" else batches
        self.spans: dict[str, list[Span]] = {}  # this rank's spans of each mode's last turn
        self.all_reduce_ms = self._time_all_reduce()  # of dense gradients, without other work

    def _time_all_reduce(self, rounds: int = 5) -> float:
        model = build.build_model(self.config, self.data)
        tables = {id(table.parameter) for table in find_tables(model)}
        num = sum(one.numel() for one in model.parameters() if one.requires_grad and id(one) not in tables)
        if not num or dist.get_world_size() == 1:
            return 0.0
        clock, times_ms = timestamps_of(self.device), []
        for _ in range(rounds):
            gradients = torch.zeros(num, device=self.device)
            dist.barrier(group=self.group)
            start = time.perf_counter()
            dist.all_reduce(gradients)
            clock.wait()
            times_ms.append((time.perf_counter() - start) * 1e3)
        return median(times_ms)

    def _schedule_of(self, arm: str) -> Schedule | None:
        return self.ours.get(config_checks.split_arm(arm)[0], (None, ""))[0]

    def all_rounds(self) -> list[ArmTurns]:
        arms = []
        for name in config_checks.arms(self.config):
            if (schedule := self._schedule_of(name)) is not None:
                arms.append(ArmTurns(name, schedule.staleness))
            else:
                arms.append(ArmTurns(name, int(config_checks.split_arm(name)[0] == "torchrec/semi_sync")))
        shifts = [number % len(arms) for number in range(self.config["rounds"])]
        in_turn = [arm for shift in shifts for arm in arms[shift:] + arms[:shift]]
        bar = tqdm(in_turn, disable=dist.get_rank() != 0, desc="overlap-bench", unit="turn")
        for arm in bar:
            bar.set_postfix_str(arm.name)
            if arm.failure is not None:
                continue
            mine: Turn | str
            try:
                mine = self._train(arm.name)
            except Exception as err:
                if self._schedule_of(arm.name) is not None:  # our modes must run
                    raise
                mine = _why(err)
            everyone = gather_objects(mine, self.group)  # so that all ranks agree on whether it runs
            arm.failure = next((turn for turn in everyone if isinstance(turn, str)), None)
            arm.rounds = [] if arm.failure else [*arm.rounds, everyone]
        return arms

    def _train(self, name: str) -> Turn:
        meter = Meter(self.device, self.config)
        num_batches = sum(self.config[name] for name in ("warm_up", "steps", "measured_steps")) + 1 + DRAIN
        batches: Any = list(itertools.islice(itertools.cycle(self.batches), num_batches))
        loader: DataLoader[Any] = DataLoader(batches, batch_size=None)
        try:
            train(name, Job(self.config, self.data, loader, self.device, meter.after_step, self.folder))
            turn, self.spans[name] = meter.turn()
            return turn
        finally:
            meter.close()
            free_memory(self.device)

    def report(self, turns: list[ArmTurns]) -> None:
        bound = bench_report.bound_ms(turns[0], self.all_reduce_ms)
        results = bench_report.evaluate(turns, getattr(self.data, "batch_size", None))
        print(f"\n{bench_report.table(results)}")
        if bound is not None:
            wire = f"the time of all all-to-alls and of the dense all-reduce ({self.all_reduce_ms:.2f} ms)"
            print(f"bound: {bound:.2f} ms, the larger of: base's slowest rank without waits for all-to-alls; {wire}")
        for part in (bench_report.collectives_table(results), "\n".join(bench_report.notes(turns, results))):
            if part:
                print(f"\n{part}")
        about = {
            "config": dict(self.config),
            "versions": versions.installed(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "ranks": dist.get_world_size(),
            "dense_all_reduce_ms": self.all_reduce_ms,
        }
        bench_report.write(self.folder, turns, results, bound, about)

    def draw(self) -> None:
        shown: dict[int | str, list[Span]] = {}
        overlapped: dict[int | str, Any] = {}
        for name, spans in self.spans.items():
            if spans and (schedule := self._schedule_of(name)) is not None:
                shown[name], overlapped[name] = spans, overlapped_by(schedule)
        if shown:
            title = "Some steps of rank 0"
            try:
                write_png(self.folder / "timeline.png", shown, num_steps=2, title=title, overlapped=overlapped)
            except ImportError as err:  # the numbers are there without it
                print(f"\n{err}")


def own_batches(config: Config, loader: Any, rank: int, num_ranks: int) -> Iterator[Any]:
    """Yield this rank's batches of a loader; raise a ValueError if it has fewer batches than there are ranks."""
    num = config["num_batches"]
    if not build.deals_batches_out(config, loader):
        yield from itertools.islice(loader, num)
    elif len(loader) < num_ranks:
        raise ValueError(
            f"the loader of data has {len(loader)} batches for {num_ranks} ranks, each of which needs its own. Make "
            "data.batch_size smaller, or set trainer.use_distributed_sampler=false if it has each rank's own rows."
        )
    else:
        yield from itertools.islice(loader, rank, num * num_ranks, num_ranks)


def _why(err: Exception) -> str:
    """Return an error's first line, and the function of TorchRec that raised it."""
    frames = [frame for frame in traceback.extract_tb(err.__traceback__) if "torchrec" in Path(frame.filename).parts]
    where = f" in torchrec's {Path(frames[-1].filename).name}, {frames[-1].name}()" if frames else ""
    return f"{type(err).__name__}{where}: {(str(err).splitlines() or [''])[0]}"
