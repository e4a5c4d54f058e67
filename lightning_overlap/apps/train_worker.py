"""What every rank of `overlap-train` does: train, validate and test each mode in turn, and report."""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import seed_everything
from omegaconf import OmegaConf
from torch import Tensor

from ..distributed import gather_objects
from ..plugin import first_words
from ..schedules import Schedule, Stage
from . import build, launch, train_report
from .config_checks import METRICS, Config, modes
from .step_timers import StepTimer, peak_memory, reset_peak_memory


def run(config: Config, folder: Path) -> None:
    """Train, validate and test every mode on this rank; rank 0 prints and writes the report."""
    prepare(config)
    schedules = modes(config)
    results = []
    for place, schedule in enumerate(schedules, start=1):
        if launch.rank() == 0 and len(schedules) > 1:
            print(f"{schedule.name} ({place} of {len(schedules)})", flush=True)
        results.append(train_mode(config, schedule, folder))
    if launch.rank() == 0:
        train_report.write(folder, results, config["metric"])
        print(f"\n{train_report.table(results)}")
        if len(results) > 1:
            print(train_report.compare(results)[0])
        print(f"run folder: {folder}", flush=True)


def train_mode(config: Config, schedule: Schedule, folder: Path) -> train_report.ModeResult:
    """Train one mode from the config's seed or checkpoint, then test it; or evaluate a checkpoint, as `task` says.

    The result is over all ranks, and the same on every rank.
    """
    seed_everything(config["seed"], verbose=False)
    data = build.build_data(config)
    model = build.build_model(config, data)
    strategy = build.build_strategy(config, schedule, model)
    timer = StepTimer()
    trainer = build.build_trainer(config, strategy, [timer], str(folder / "logs" / schedule.name))
    reset_peak_memory(strategy.root_device)
    metrics: dict[str, float] = {}
    if config["task"] == "train":
        trainer.fit(model, datamodule=data, ckpt_path=config["ckpt_path"])
        metrics |= _numbers(trainer.callback_metrics)
    evaluate = trainer.validate if config["task"] == "validate" else trainer.test
    evaluate(model, datamodule=data, verbose=False, ckpt_path=None if metrics or timer.step_ms else config["ckpt_path"])
    metrics |= _numbers(trainer.callback_metrics)

    memory = peak_memory(strategy.root_device)
    ranks = gather_objects({"losses": timer.losses, "step_ms": timer.step_ms, "peak_memory": memory})
    result = train_report.ModeResult(
        mode=schedule.name,
        stream="-",
        staleness=schedule.staleness,
        num_ranks=trainer.world_size,
        peak_memory={name: max(rank["peak_memory"][name] for rank in ranks) for name in memory},
        metrics=metrics,
    )
    if not timer.step_ms:  # nothing was trained
        return result
    losses_RS = torch.stack([rank["losses"] for rank in ranks])  # R ranks, S steps
    bits_SR = losses_RS.T.contiguous().numpy()
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    batch_size = getattr(data, "batch_size", None)
    slowest_ms = max(sum(rank["step_ms"][1:]) for rank in ranks)
    num_samples = (len(timer.step_ms) - 1) * trainer.world_size * (batch_size or 0)
    return replace(
        result,
        stream=config["stream"]["name"] if lookup is not None and lookup.offset > 0 else "-",
        metrics={name: value for name, value in metrics.items() if name.startswith(METRICS)},
        losses=losses_RS.double().mean(dim=0).tolist(),
        step_ms=timer.step_ms,
        step_ms_median=max(float(np.median(rank["step_ms"])) for rank in ranks),
        step_ms_p90=max(float(np.percentile(rank["step_ms"], 90)) for rank in ranks),
        samples_per_s=num_samples / slowest_ms * 1e3 if batch_size and slowest_ms else None,
        losses_sha256=hashlib.sha256(bits_SR.tobytes()).hexdigest(),
        loss_bits=[step.tobytes() for step in bits_SR],
    )


def write_config(config: Config, folder: Path) -> None:
    """Write the resolved config into the run folder; the ranks run from this file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))), encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """Read what `write_config` wrote."""
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))


def prepare(config: Config, *harmless: str) -> None:
    """Set this rank's threads, and keep back what the libraries say about themselves, with some warnings more."""
    if (num_threads := config["threads_per_rank"] or (None if build.on_cuda(config) else 1)) is not None:
        torch.set_num_threads(num_threads)
    for talkative in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    for pattern in (
        *harmless,
        r".*does not have many workers",
        r".*number of training batches .* is smaller than the logging interval",
        r"Starting from v1\.9\.0, .tensorboardX. has been removed",
    ):
        warnings.filterwarnings("ignore", message=pattern)
    first_words.calm_libraries()
    logging.getLogger(first_words.LOGGER).setLevel(logging.INFO)


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def main(run: Callable[[Config, Path], None]) -> None:
    """Run as a rank that a command started: its arguments are the run folder and the command's process id."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    launch.run_as_rank(lambda: run(read_config(folder), folder), folder, parent)


if __name__ == "__main__":
    main(run)
