"""Where the time of a step on CPUs goes, by operator: a mode of this package beside TorchRec's pipeline.

    python benchmarks/operators.py                                      # three models, 2 CPU ranks: about two minutes
    python benchmarks/operators.py --benches weighted --arms base torchrec/base --top 30
    python benchmarks/operators.py --bare --benches weighted --arms "base at_rate_0=4" "base frozen=4"

The models are those of `overlap-bench bench=...`; the arms take turns, each with the profiler on for some steps. A line
has the operator's own time in a step, without that of the operators within it, and how often it ran, on rank 0. Times
of waits (`All2All_Pooled_Wait`, `c10d::...`) are those for the other rank too. The profiler slows small operators down
most: read differences between the arms, and take step times from `overlap-bench` or `--bare`.

An arm is a name of `overlap-bench` and what is set otherwise for it alone: any override of `overlap-bench`
(`strategy.gradient_as_bucket_view=false`), `frozen=4` (the model's first four tables have requires_grad=False) or
`at_rate_0=4` (SGD updates them at a rate of 0). With `--bare` there is no profiler. A line has an arm's CPU time and
time of a step, means of the ranks, as medians of the rounds, and the ratios to the first arm's of the same round.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

BENCHES = ("two_cpu_ranks", "sparse_data_dist_base", "weighted")
WARM_UP = 5
LEFT_ALONE = ("frozen", "at_rate_0")  # what an arm may say of the model's first tables

Profile = Mapping[str, tuple[float, float]]  # operator -> own milliseconds in a step, calls in a step


class Times(NamedTuple):
    """Milliseconds of a step in one round, the mean of the ranks; and rank 0's losses."""

    cpu: float
    step: float
    losses: list[float]


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benches", nargs="+", default=BENCHES, help="models, by the names in conf/bench")
    parser.add_argument("--arms", nargs="+", default=("fused_sparse_dist", "torchrec/sparse_dist"), help="see above")
    parser.add_argument("--bare", action="store_true", help="time steps without a profiler")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the arms take turns in each")
    parser.add_argument("--steps", type=int, default=10, help="counted steps per arm and round")
    parser.add_argument("--top", type=int, default=12, help="how many operators to print")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--set", nargs="+", default=(), help="overrides of overlap-bench: strategy.find_unused_parameters=true"
    )
    options = parser.parse_args()
    if "RANK" in os.environ:
        for bench in options.benches:
            _measure(bench, options)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    subprocess.check_call([*launcher, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"})


def _measure(bench: str, options: argparse.Namespace) -> None:
    import torch.distributed as dist

    from lightning_overlap.apps import train_worker

    config = config_of(bench, options.ranks, options.set)
    train_worker.prepare(config, ".*")
    logging.getLogger("lightning.pytorch.lightning_overlap").setLevel(logging.WARNING)  # else each fit names its tables
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    configs = {arm: config_of(bench, options.ranks, [*options.set, *others_in(arm)]) for arm in options.arms}
    if options.bare:
        found = timed_table(measure(configs, timed, options.rounds, options.steps))
    else:
        found = table(measure(configs, profiled, options.rounds, options.steps), options.top)
    if dist.get_rank() == 0:
        print(f"\n{bench}\n{found}", flush=True)
    dist.barrier()


def others_in(arm: str) -> list[str]:
    """Return what an arm overrides in the config."""
    return [word for word in arm.split()[1:] if word.partition("=")[0] not in LEFT_ALONE]


def config_of(bench: str, num_ranks: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config of a model, a name in conf/bench, on this many CPU ranks; `overrides` as overlap-bench."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from lightning_overlap.apps import hydra_command

    given = [f"bench={bench}", f"trainer.devices={num_ranks}", "num_batches=10", *overrides]
    with initialize_config_module("lightning_overlap.conf", version_base="1.3"):
        composed = compose("bench", list(map(hydra_command.add_or_override, given)))
    return dict(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def measure(
    configs: Mapping[str, dict[str, Any]], run: Callable[[str, Any, int], Any], num_rounds: int, num_steps: int
) -> dict[str, list[Any]]:
    """Return, by arm, what `run` returns in each round; all ranks of the process group call this.

    `configs` has the config of each arm; the batches are those of the first. `run` gets the arm's name, without what is
    set for it, its `Job` with any `after_step`, and the number of steps to count.
    """
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from lightning_overlap.apps import build
    from lightning_overlap.apps.bench_worker import own_batches

    rank, num_ranks, first = dist.get_rank(), dist.get_world_size(), next(iter(configs.values()))
    data: Any = build.build_data(first)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=num_ranks, current_epoch=0)
    data.setup("fit")
    batches = list(own_batches(first, data.train_dataloader(), rank, num_ranks))
    cycled = list(itertools.islice(itertools.cycle(batches), WARM_UP + num_steps + 4))
    loader = torch.utils.data.DataLoader(cycled, batch_size=None)  # type: ignore[arg-type,var-annotated]
    rounds: dict[str, list[Any]] = {arm: [] for arm in configs}
    for number in range(num_rounds):
        for arm in configs if number % 2 else reversed(configs):
            name, *words = arm.split()
            job = _job(configs[arm], data, loader, dict(word.split("=", 1) for word in words if "=" in word))
            rounds[arm].append(run(name, job, num_steps))
    return rounds


def _job(config: dict[str, Any], data: Any, loader: Any, words: Mapping[str, str]) -> Any:
    """Return the `Job` of an arm for which `words` are set."""
    import torch
    from torch.distributed.optim import _apply_optimizer_in_backward

    from lightning_overlap.apps.bench_arms import Job
    from lightning_overlap.tables import find_tables

    class Leaves(Job):
        """Leaves some tables as they are, in one of two ways."""

        def make_model(self) -> Any:
            model = super().make_model()
            for way in LEFT_ALONE:
                for table in find_tables(model)[: int(words.get(way, 0))]:
                    # Anew, without the model's optimizer of tables.
                    weight = torch.nn.Parameter(table.parameter.detach(), requires_grad=way != "frozen")
                    model.get_submodule(table.module).embedding_bags[table.name].weight = weight
                    if way == "at_rate_0":  # as a kernel updates a frozen table, if its lookups have a graph
                        _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.0, "weight_decay": 0.0})
            return model

    return Leaves(config, data, loader, torch.device("cpu"), lambda *_: None, Path(gettempdir()))


def timed(arm: str, job: Any, num_steps: int) -> Times:
    """Train an arm; return the times of its steps."""
    import torch.distributed as dist

    from lightning_overlap.apps.bench_arms import train

    marks, losses = [], []

    def after_step(loss: Any, *_: Any) -> None:
        losses.append(loss.item())
        marks.append((time.process_time(), time.perf_counter()))

    train(arm, dataclasses.replace(job, after_step=after_step))
    first, last = marks[WARM_UP - 1], marks[WARM_UP + num_steps - 1]
    own = [(end - start) * 1e3 / num_steps for start, end in zip(first, last, strict=True)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return Times(*map(statistics.mean, zip(*found, strict=True)), losses=losses)


def profiled(arm: str, job: Any, num_steps: int) -> Profile:
    """Train an arm; return the times of the operators in its steps."""
    from torch.profiler import ProfilerActivity, profile

    from lightning_overlap.apps.bench_arms import train

    profiler, num_done = profile(activities=[ProfilerActivity.CPU]), itertools.count(1)

    def after_step(*_: Any) -> None:
        done = next(num_done)
        if done == WARM_UP:
            profiler.start()
        elif done == WARM_UP + num_steps:
            profiler.stop()

    train(arm, dataclasses.replace(job, after_step=after_step))
    found: dict[str, tuple[float, float]] = {}
    for one in profiler.key_averages():
        name = re.sub(r" \d+ ##$", " ##", one.key)  # a stage, whose range has the number of its batch
        ms, calls = found.get(name, (0.0, 0.0))
        found[name] = ms + one.self_cpu_time_total / 1e3 / num_steps, calls + one.count / num_steps
    return found


def timed_table(rounds: Mapping[str, list[Times]]) -> str:
    """Return a line for each arm: medians of the rounds, and ratios to the first arm, of which `(least to most)`."""
    from lightning_overlap.text import aligned

    first = next(iter(rounds.values()))
    lines = [["arm", "CPU of a step", "of the first", "step", "of the first", "same losses"]]
    for arm, found in rounds.items():
        cells = []
        for part in ("cpu", "step"):
            mine, theirs = ([getattr(one, part) for one in of_arm] for of_arm in (found, first))
            ratios = sorted(one / other for one, other in zip(mine, theirs, strict=True))
            cells += [
                f"{statistics.median(mine):.2f} ms",
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            ]
        lines.append([arm, *cells, "yes" if found[0].losses == first[0].losses else "no"])
    return aligned(lines)


def table(rounds: Mapping[str, list[Profile]], top: int) -> str:
    """Return the operators that take most of a step in any arm: medians over the rounds."""
    from lightning_overlap.text import aligned

    names = {name for profiles in rounds.values() for one in profiles for name in one}
    found = {arm: {name: _median(profiles, name) for name in names} for arm, profiles in rounds.items()}
    sums = {arm: sum(ms for ms, _ in of_arm.values()) for arm, of_arm in found.items()}
    order = sorted(names, key=lambda name: -max(of_arm[name][0] for of_arm in found.values()))[:top]
    lines = [["operator", *itertools.chain.from_iterable((arm, "calls") for arm in found)]]
    for name in order:
        cells = [(f"{of_arm[name][0]:.2f} ms", f"{of_arm[name][1]:.0f}") for of_arm in found.values()]
        lines.append([name[:70], *itertools.chain.from_iterable(cells)])
    lines.append(["all", *itertools.chain.from_iterable((f"{one:.2f} ms", "") for one in sums.values())])
    return aligned(lines)


def _median(profiles: list[Profile], name: str) -> tuple[float, float]:
    found = [one.get(name, (0.0, 0.0)) for one in profiles]
    return statistics.median(ms for ms, _ in found), statistics.median(calls for _, calls in found)


if __name__ == "__main__":
    main()
