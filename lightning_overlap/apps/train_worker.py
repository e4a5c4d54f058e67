"""The work of one rank of `overlap-train`: train, validate and test each mode in turn, and report."""

import hashlib
import logging
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from ..distributed import gather_objects
from ..plugin import first_words
from ..schedules import Mode
from . import build, launch, train_report
from .config_checks import METRICS, Config, looks_up_early, modes
from .step_timers import StepTimer, free_memory, peak_memory, reset_peak_memory


def run(config: Config, folder: Path) -> None:
    """Train, validate and test every mode on this rank; rank 0 prints and writes the report."""
    prepare(config)
    to_train = modes(config)
    results = []
    for place, mode in enumerate(to_train, start=1):
        if launch.rank() == 0 and len(to_train) > 1:
            print(f"{mode.schedule.name} ({place} of {len(to_train)})", flush=True)
        results.append(train_mode(config, mode, folder))
    if launch.rank() == 0:
        train_report.write(folder, results, config["metric"])
        print(f"\n{train_report.table(results)}")
        if len(results) > 1:
            print(train_report.compare(results)[0])
        print(f"run folder: {folder}", flush=True)


def train_mode(config: Config, mode: Mode, folder: Path) -> train_report.ModeResult:
    """Train one mode from the seed or checkpoint and test it; or only evaluate the checkpoint, depending on `task`.

    A module or data module that has nothing to test is trained alone.
    """
    seed_everything(config["seed"], verbose=False)
    data = build.build_data(config)
    model = build.build_model(config, data)
    schedule = mode.schedule
    strategy = build.build_strategy(config, mode, model)
    timer = StepTimer()
    trainer = build.build_trainer(config, strategy, [timer], str(folder / "logs" / schedule.name))
    free_memory(strategy.root_device)
    reset_peak_memory(strategy.root_device)
    metrics: dict[str, Tensor] = {}
    if config["task"] == "train":
        trainer.fit(model, datamodule=data, ckpt_path=config["ckpt_path"])
        metrics |= trainer.callback_metrics
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            # TensorBoard names a file after the current second: the evaluation's must not replace the fit's.
            time.sleep(1 - time.time() % 1)
    task = "test" if config["task"] == "train" else config["task"]
    missing = build.why_no_evaluation(task, model, data)
    if missing and launch.rank() == 0:
        print(f"no test after the training: {missing}.", flush=True)
    if not missing:
        evaluate = trainer.validate if task == "validate" else trainer.test
        path = None if metrics or timer.step_ms else config["ckpt_path"]
        evaluate(model, datamodule=data, verbose=False, ckpt_path=path)
        metrics |= trainer.callback_metrics

    num_steps = len(timer.step_ms)
    mine = (
        torch.tensor([*map(float, timer.losses)]),
        timer.step_ms,
        peak_memory(strategy.root_device),
        timer.num_samples,
    )
    all_losses, all_step_ms, peaks, samples = zip(*gather_objects(mine), strict=True)
    losses_RS, step_ms_RS = torch.stack(all_losses).numpy(), np.array(all_step_ms)  # R ranks, S steps
    slowest_ms = step_ms_RS[:, 1:].sum(axis=1).max()
    timed = [num for of_rank in samples for num in of_rank[1:]]
    num_samples = None if None in timed else sum(timed)
    summary = {
        "mode": schedule.name,
        "stream": config["stream"]["name"] if num_steps and looks_up_early(schedule) else "-",
        "staleness": schedule.staleness,
        "num_ranks": trainer.world_size,
        "peak_memory": {name: max(peak[name] for peak in peaks) for name in peaks[0]},  # largest rank, bytes
        "metrics": {name: float(value) for name, value in metrics.items() if not num_steps or name.startswith(METRICS)},
        # slowest rank
        "step_ms_median": float(np.median(step_ms_RS, axis=1).max()) if num_steps else None,
        "step_ms_p90": float(np.percentile(step_ms_RS, 90, axis=1).max()) if num_steps else None,
        # all ranks, without the first step
        "samples_per_s": num_samples / slowest_ms * 1e3 if num_samples and slowest_ms else None,
        "losses_sha256": hashlib.sha256(losses_RS.T.tobytes()).hexdigest() if num_steps else None,
        "num_steps": num_steps,
        "final_loss": float(losses_RS[:, -1].mean(dtype=np.float64)) if num_steps else None,
    }
    return train_report.ModeResult(summary, losses_RS, timer.step_ms)


def prepare(config: Config, *harmless: str) -> None:
    """Set this rank's threads, and silence library logs and warnings that match `harmless` or a built-in list."""
    if (num_threads := config["threads_per_rank"] or (None if build.on_cuda(config) else 1)) is not None:
        torch.set_num_threads(num_threads)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in (
        *harmless,
        r".*does not have many workers",
        r".*number of training batches .* is smaller than the logging interval",
        r"Starting from v1\.9\.0, .tensorboardX. has been removed",
    ):
        warnings.filterwarnings("ignore", message=pattern)
    first_words.calm_libraries()
    logging.getLogger(first_words.LOGGER).setLevel(logging.INFO)
