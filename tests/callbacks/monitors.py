"""Runs under `OverlapMonitor`. Functions that ranks run."""

import contextlib
import io
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_overlap import MODES, Balance, OverlapMonitor, OverlapTimeline
from lightning_overlap.profiling.overlap import Breakdown, break_down, overlapped_by
from lightning_overlap.profiling.recorder import SpanRecorder
from lightning_overlap.profiling.spans import ALL_TO_ALLS, Category

from ..plugin.strategies import Dense
from ..profiling.virtual import VirtualClock
from ..profiling.virtual import run as run_virtual
from ..support.cases import TABLE_WISE, Batches, Case, Model
from ..support.fits import make_strategy, make_trainer

NUM_STEPS = 16


class _Recorded(Callback):
    """Records two steady steps."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.recorder = SpanRecorder(trainer.strategy.streams)
            self.recorder.start()
            trainer.strategy.watch(self.recorder)
        if batch_idx in (4, 5, 6):
            self.recorder.step()
        if batch_idx == 6:
            self.recorder.stop()
            trainer.strategy.watch(None)


def account_of_a_steady_step(case: Case, pipeline: str) -> Breakdown:
    """Account for a step under a virtual clock, with the all-to-alls of the tables alone."""
    clock, recorded, others = VirtualClock(), _Recorded(), (Category.COMMUNICATION, Category.WAIT)
    with mock.patch.object(time, "perf_counter", clock.now_s):
        run_virtual(case, pipeline, 10, clock, callbacks=[recorded])
    spans = [span for span in recorded.recorder.spans() if span.kind not in others or span.name in ALL_TO_ALLS]
    return break_down(spans, recorded.recorder.windows()[-1], overlapped=overlapped_by(MODES[pipeline]))


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((dict(metrics), step))


def run(
    case: Case,
    pipeline: str,
    *callbacks: Callback,
    model: type[Model] = Model,
    data: type[Batches] = Batches,
    balance: Balance | None = None,
    num_steps: int = NUM_STEPS,
    **options: Any,
) -> dict[str, Any]:
    """Train under monitors and timelines, or none; return what they leave behind."""
    module, logger, printed = model(case), Kept(), io.StringIO()
    with warnings.catch_warnings(record=True, action="always") as caught, contextlib.redirect_stdout(printed):
        trainer = make_trainer(
            make_strategy(module, pipeline, balance=balance), callbacks=list(callbacks), logger=logger, **options
        )
        trainer.fit(module, datamodule=data(case, num_steps))
    monitor = next((one for one in callbacks if isinstance(one, OverlapMonitor)), OverlapMonitor())
    patched = {function.__module__ for function in (dist.all_to_all_single, dist.all_reduce)}
    patched |= {"log", "on_before_backward"} & vars(module).keys()
    return {
        "losses": torch.stack(module.losses).tolist(),
        "is_clean": patched == {"torch.distributed.distributed_c10d"} and trainer.strategy._run is None,  # has a timer
        "logged": {step: values for values, step in logger.logged if "overlap/step_ms" in values},
        "accounts": monitor.accounts,
        "syncs": [(sync.stage, sync.source(), sync.operator) for sync in monitor.syncs or ()],
        "files": [path.name for one in callbacks if isinstance(one, OverlapTimeline) for path in one.files],
        "progress_bar": list(trainer.progress_bar_metrics),
        "printed": printed.getvalue(),
        "warned": [str(one.message) for one in caught if "OverlapTimeline" in str(one.message)],
    }


class Slow(Batches):
    def train_dataloader(self) -> Any:
        for batch in super().train_dataloader():
            time.sleep(0.05)
            yield batch


class Logs(Model):
    def log(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.005)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("batch_idx", batch_idx)
        return super().training_step(batch, batch_idx)


class Validates(Batches):
    val_dataloader = Batches.train_dataloader


class SaysSteps(Callback):
    """Prints the number of each step, as a progress bar would; one of them may fail."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.fails_after = fails_after

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"trained {batch_idx}")
        if batch_idx == self.fails_after:
            raise ValueError("this step fails")


def printed_by_a_failing_fit(folder: str) -> str:
    module, printed = Model(TABLE_WISE), io.StringIO()
    callbacks = [OverlapTimeline(folder, first_step=6, num_steps=2), SaysSteps(fails_after=10)]
    with contextlib.redirect_stdout(printed), contextlib.suppress(ValueError):
        make_trainer(make_strategy(module), callbacks=callbacks).fit(module, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return printed.getvalue()


class Late(Model):
    """Makes a dense gradient of rank 1 late."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.bottom[0].weight.register_hook(lambda _: time.sleep(0.15))


def without_pipeline(strategy: type[DDPStrategy]) -> list[str]:
    """Return what monitor and timeline say of a module without tables, and of the strategies that they cannot watch."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(strategy(), callbacks=[OverlapMonitor(), OverlapTimeline()])
        trainer.fit(Dense())
    return [str(one.message) for one in caught if "Overlap" in str(one.message)]
