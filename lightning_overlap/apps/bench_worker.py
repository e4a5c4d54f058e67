"""What every rank of `overlap-bench` does: the arms in turns, each step timed, and the report."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .. import versions
from ..distributed import gather_objects
from ..profiling import Span, overlapped_by, timestamps_of, write_html, write_png
from ..schedules import Schedule
from ..tables import find_tables
from . import bench_report, build, config_checks, train_worker
from .bench_arms import Arm, Job, arms
from .bench_collectives import late_all_to_alls
from .bench_report import ArmTurns, Turn
from .config_checks import Config
from .step_timers import Meter

TIMEOUT = timedelta(minutes=5)
"""Of a collective of the arms: one that hangs must not hold up the rest for long."""

DRAIN = 4
"""Steps at the end that do not count: a pipeline that runs empty has less to do."""


def run(config: Config, folder: Path) -> None:
    """Train every arm in every round on this rank; rank 0 prints and writes the report."""
    logs_outside_of_a_trainer = ".*trying to .self.log\\(\\). but the .self.trainer."
    train_worker.prepare(config, logs_outside_of_a_trainer, "You defined a .validation_step. but have no")
    device = _join(config)
    bench = _Bench(config, folder, device)
    results = bench.all_rounds()
    if dist.get_rank() == 0:
        _report(config, folder, results, getattr(bench.data, "batch_size", None), bench.all_reduce_ms)
        _draw(folder, bench.spans, {name: schedule for name, (schedule, _) in config_checks.our_arms(config).items()})
        print(f"\nrun folder: {folder}", flush=True)
    dist.barrier(bench.group)
    dist.destroy_process_group()


def _join(config: Config) -> torch.device:
    """Join the process group that the arms share, and return this rank's device."""
    on_cuda = build.on_cuda(config)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=TIMEOUT)
    return device


class _Bench:
    def __init__(self, config: Config, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        group = dist.new_group(backend="gloo", timeout=TIMEOUT * 2)
        self.group = group
        self.data = build.build_data(config)
        self.batches = _make_batches(self.data, config["num_batches"], pin=device.type == "cuda")
        self.spans: dict[str, list[Span]] = {}
        """Of each mode's last turn, on this rank."""
        self.all_reduce_ms = self._time_all_reduce()
        """What the all-reduce of dense gradients takes by itself."""

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

    def all_rounds(self) -> list[ArmTurns]:
        from tqdm import tqdm  # type: ignore[import-untyped]

        known = arms(self.config)
        ours = config_checks.our_arms(self.config)
        stale = {name: schedule.staleness for name, (schedule, _) in ours.items()} | {"torchrec/semi_sync": 1}
        names, num_rounds = config_checks.arms(self.config), self.config["rounds"]
        results = {name: ArmTurns(name, stale.get(name.partition("+")[0], 0)) for name in names}
        bar = tqdm(total=len(names) * num_rounds, disable=dist.get_rank() != 0, desc="overlap-bench", unit="turn")
        with bar:
            for number in range(num_rounds):
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    bar.set_postfix_str(name)
                    if results[name].failure is None:
                        self._take_turn(known[name], results[name], must_run=name in ours)
                    bar.update()
        return list(results.values())

    def _take_turn(self, arm: Arm, result: ArmTurns, *, must_run: bool) -> None:
        """Train one arm once; all ranks agree on whether it runs."""
        mine: Turn | BaseException
        try:
            mine = self._train(result.name, arm)
        except Exception as err:
            if must_run:
                raise
            mine = RuntimeError(_why(err))
        everyone = gather_objects(mine, self.group)
        failed = [turn for turn in everyone if isinstance(turn, BaseException)]
        if failed:
            result.failure = str(failed[0])
            result.rounds.clear()
        else:
            result.rounds.append(everyone)

    def _train(self, name: str, arm: Arm) -> Turn:
        config = self.config
        warm_up, steps, measured = config["warm_up"], config["steps"], config["measured_steps"]
        meter = Meter(self.device, warm_up, steps, measured, config_checks.per_step(config))
        batches = list(itertools.islice(itertools.cycle(self.batches), warm_up + steps + measured + 1 + DRAIN))
        loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        job = Job(config, self.data, loader, self.device, meter.after_step, self.folder)
        latency_ms = (config["latency"] or {}).get("all_to_all_ms", 0.0)
        try:
            with late_all_to_alls(latency_ms) if latency_ms else nullcontext():
                arm(job)
            turn = meter.turn()
            if meter.spans:
                self.spans[name] = meter.spans
            return turn
        finally:
            meter.close()
            _free(self.device)


def _free(device: torch.device) -> None:
    """Give back the memory of a turn, so that the next one's peak is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _why(err: Exception) -> str:
    """Return what failed in an arm that is not ours, and where in its package."""
    frames = [frame for frame in traceback.extract_tb(err.__traceback__) if "torchrec" in Path(frame.filename).parts]
    where = f" in torchrec's {Path(frames[-1].filename).name}, {frames[-1].name}()" if frames else ""
    return f"{type(err).__name__}{where}: {(str(err).splitlines() or [''])[0]}"


def _make_batches(data: Any, num_batches: int, *, pin: bool) -> list[Any]:
    """Make this rank's batches, on the host, before any clock starts."""
    data.trainer = SimpleNamespace(global_rank=dist.get_rank(), world_size=dist.get_world_size(), current_epoch=0)
    data.prepare_data()
    data.setup("fit")
    batches = list(itertools.islice(data.train_dataloader(), num_batches))
    return [batch.pin_memory() for batch in batches] if pin else batches


def _report(config: Config, folder: Path, turns: list[ArmTurns], batch_size: int | None, all_reduce_ms: float) -> None:
    bound = bench_report.bound_ms(turns[0], all_reduce_ms)
    results = bench_report.evaluate(turns, batch_size, bound)
    about = {
        "config": dict(config),
        "versions": versions.installed(),
        "device": torch.cuda.get_device_name() if build.on_cuda(config) else "cpu",
        "ranks": dist.get_world_size(),
        "dense_all_reduce_ms": all_reduce_ms,
    }
    print(f"\n{bench_report.table(results)}")
    if bound is not None:
        wire = f"the wire with all all-to-alls and the dense all-reduce ({all_reduce_ms:.2f} ms)"
        print(
            f"bound: {bound:.2f} ms: base's slowest rank if it waited for no all-to-all, or {wire}, whichever is busier"
        )
    notes = [*bench_report.disagreements(results), *bench_report.failures(results)]
    for part in (bench_report.collectives_table(results), "\n".join(notes)):
        if part:
            print(f"\n{part}")
    bench_report.write(folder, results, bound, about)


def _draw(folder: Path, spans: Mapping[str, list[Span]], schedules: Mapping[str, Schedule]) -> None:
    """Draw some steps of every mode beneath each other."""
    names: list[int | str] = [name for name in schedules if name in spans]
    if names:
        shown = {name: spans[str(name)] for name in names}
        overlapped = {name: overlapped_by(schedules[str(name)]) for name in names}
        title = "Some steps of rank 0"
        write_png(folder / "timeline.png", shown, num_steps=2, title=title, overlapped=overlapped)
        write_html(folder / "timeline.html", shown, num_steps=3, title=title, overlapped=overlapped)


if __name__ == "__main__":
    train_worker.main(run)
