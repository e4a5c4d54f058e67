"""Step times of each mode when an all-to-all takes 40 ms and dense forward, backward and step 50 ms each.

Two CPU processes, gloo, real all-to-alls with a latency put on top: `wait()` returns no earlier than 40 ms after the
issue. The dense part sleeps. What is left of the latency in a step is what the mode's schedule does not hide.

    python benchmarks/latency.py            # both ranks, about a minute
    python benchmarks/latency.py --steps 40
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any
from unittest import mock

ALL_TO_ALL_S, COMPUTE_S = 0.040, 0.050
NUM_RANKS = 2
WARM_UP = 4


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per mode and round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the modes take turns in each")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        sys.exit(subprocess.call([*command, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}))
    warnings.simplefilter("ignore")
    _measure(options.steps, options.rounds)


def _measure(num_steps: int, num_rounds: int) -> None:
    import torch.distributed as dist
    from tqdm import tqdm

    from lightning_overlap import MODES

    for logger in ("torchrec", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    steps_ms: dict[str, list[float]] = {name: [] for name in MODES}
    losses: dict[str, float] = {}
    turns = [(turn, name) for turn in range(num_rounds) for name in MODES]
    for _, name in tqdm(turns, disable=os.environ["RANK"] != "0", desc="modes"):
        times_ms, losses[name] = _fit(name, num_steps)
        steps_ms[name] += times_ms
    everyone: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(everyone, {name: statistics.median(times) for name, times in steps_ms.items()})
    if dist.get_rank() == 0:
        slowest = {name: max(rank[name] for rank in everyone) for name in MODES}
        print(f"{'mode':36s}{'median step':>13s}{'of base':>9s}{'last loss':>14s}")
        for name, step_ms in slowest.items():
            print(f"{name:36s}{step_ms:10.1f} ms{step_ms / slowest['base']:9.3f}{losses[name]:14.9f}")


def _fit(pipeline: str, num_steps: int) -> tuple[list[float], float]:
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Trainer, seed_everything

    from lightning_overlap import OverlapEmbeddingStrategy
    from lightning_overlap.data import SyntheticDataModule
    from lightning_overlap.models import DLRM

    real = dist.all_to_all_single

    class Late(dist.Work):
        def __init__(self, work: dist.Work) -> None:
            super().__init__()
            self.work, self.over = work, time.perf_counter() + ALL_TO_ALL_S

        def wait(self, timeout: Any = None) -> bool:
            time.sleep(max(0.0, self.over - time.perf_counter()))
            return bool(self.work.wait())

    def all_to_all_single(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        late = Late(real(*args, async_op=True, **kwargs))
        return late if async_op else late.wait() and None

    class Slow(DLRM):
        """A DLRM with a large dense part."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            starts.append(time.perf_counter())
            loss = super().training_step(batch, batch_idx)
            time.sleep(COMPUTE_S)
            loss.register_hook(lambda grad: time.sleep(COMPUTE_S))
            last.append(loss.detach())
            return loss

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if not optimizer.defaults.get("hooked"):
                optimizer.defaults["hooked"] = True
                optimizer.register_step_post_hook(lambda *_: time.sleep(COMPUTE_S))

    starts: list[float] = []
    last: list[torch.Tensor] = []
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    data = SyntheticDataModule(batch_size=64, num_batches=num_steps + WARM_UP)
    model = Slow(data.table_sizes, data.num_dense, table_learning_rate=0.1)
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        max_epochs=1,
        strategy=OverlapEmbeddingStrategy(pipeline=pipeline, sharding="table_wise"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    with mock.patch.object(dist, "all_to_all_single", all_to_all_single):
        trainer.fit(model, datamodule=data)
    times_ms = [(late - early) * 1e3 for early, late in itertools.pairwise(starts)]
    return times_ms[WARM_UP:], float(last[-1])


if __name__ == "__main__":
    main()
