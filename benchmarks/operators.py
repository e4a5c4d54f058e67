"""Where the time of a step on CPUs goes, by operator: a mode of this package beside TorchRec's pipeline.

    python benchmarks/operators.py                                      # three models, 2 CPU ranks: about two minutes
    python benchmarks/operators.py --benches weighted --arms base torchrec/base --top 30

The models are those of `overlap-bench bench=...`; the arms take turns, each with the profiler on for some steps. A line
has the operator's own time in a step, without that of the operators within it, and how often it ran, on rank 0. Times
of waits (`All2All_Pooled_Wait`, `c10d::...`) are those for the other rank too. The profiler slows small operators down
most: read differences between the arms, and take step times from `overlap-bench`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

BENCHES = ("two_cpu_ranks", "sparse_data_dist_base", "weighted")
WARM_UP = 5

Profile = Mapping[str, tuple[float, float]]  # operator -> own milliseconds in a step, calls in a step


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benches", nargs="+", default=BENCHES, help="models, by the names in conf/bench")
    parser.add_argument(
        "--arms", nargs=2, default=("fused_sparse_dist", "torchrec/sparse_dist"), help="as overlap-bench"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the arms take turns in each")
    parser.add_argument("--steps", type=int, default=10, help="profiled steps per arm and round")
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
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rounds = measure(config, options.arms, options.rounds, options.steps)
    if dist.get_rank() == 0:
        print(f"\n{bench}\n{table(rounds, options.top)}", flush=True)
    dist.barrier()


def config_of(bench: str, num_ranks: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config of a model, a name in conf/bench, on this many CPU ranks; `overrides` as overlap-bench."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from lightning_overlap.apps import hydra_command

    given = [f"bench={bench}", f"trainer.devices={num_ranks}", "num_batches=10", *overrides]
    with initialize_config_module("lightning_overlap.conf", version_base="1.3"):
        composed = compose("bench", list(map(hydra_command.add_or_override, given)))
    return dict(OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def measure(config: dict[str, Any], arms: Sequence[str], num_rounds: int, num_steps: int) -> dict[str, list[Profile]]:
    """Return, by arm, this rank's profile of each round; all ranks of the process group call this."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    from lightning_overlap.apps import build
    from lightning_overlap.apps.bench_worker import own_batches

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    data: Any = build.build_data(config)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=num_ranks, current_epoch=0)
    data.setup("fit")
    batches = list(own_batches(config, data.train_dataloader(), rank, num_ranks))
    cycled = list(itertools.islice(itertools.cycle(batches), WARM_UP + num_steps + 4))
    loader = torch.utils.data.DataLoader(cycled, batch_size=None)  # type: ignore[arg-type,var-annotated]
    rounds: dict[str, list[Profile]] = {arm: [] for arm in arms}
    for number in range(num_rounds):
        for arm in arms if number % 2 else reversed(arms):
            rounds[arm].append(_profiled(arm, config, data, loader, num_steps))
    return rounds


def _profiled(arm: str, config: Any, data: Any, loader: Any, num_steps: int) -> Profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lightning_overlap.apps.bench_arms import Job, train

    profiler, num_done = profile(activities=[ProfilerActivity.CPU]), itertools.count(1)

    def after_step(*_: Any) -> None:
        done = next(num_done)
        if done == WARM_UP:
            profiler.start()
        elif done == WARM_UP + num_steps:
            profiler.stop()

    train(arm, Job(config, data, loader, torch.device("cpu"), after_step, Path(gettempdir())))
    found: dict[str, tuple[float, float]] = {}
    for one in profiler.key_averages():
        name = re.sub(r" \d+ ##$", " ##", one.key)  # a stage, whose range has the number of its batch
        ms, calls = found.get(name, (0.0, 0.0))
        found[name] = ms + one.self_cpu_time_total / 1e3 / num_steps, calls + one.count / num_steps
    return found


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
