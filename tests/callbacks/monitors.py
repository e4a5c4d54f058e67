"""Runs under `OverlapMonitor`. Functions that ranks run."""

import contextlib
import inspect
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

import lightning_overlap.callbacks.timeline as timeline_module
from lightning_overlap import MODES, OverlapMonitor, OverlapTimeline
from lightning_overlap.profiling.overlap import Breakdown, break_down, mean, overlapped_by
from lightning_overlap.profiling.recorder import SpanRecorder
from lightning_overlap.profiling.spans import ALL_TO_ALLS, Category

from ..plugin.strategies import Dense
from ..profiling.virtual import VirtualClock
from ..profiling.virtual import run as run_virtual
from ..support.cases import Batches, Case, Model, ReadsItsLoss
from ..support.fits import make_strategy, make_trainer

NUM_STEPS = 16


class _Recorded(Callback):
    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.recorder = SpanRecorder(trainer.strategy.streams)
            self.recorder.start()
            trainer.strategy.watch(self.recorder)
        if self.first <= batch_idx <= self.first + 2:
            self.recorder.step()
        if batch_idx == self.first + 2:
            self.recorder.stop()
            trainer.strategy.watch(None)


def account_of_a_steady_step(case: Case, pipeline: str) -> dict[str, Any]:
    """Account for a step under a virtual clock, with the all-to-alls of the tables alone."""
    clock, recorded = VirtualClock(), _Recorded(4)
    with mock.patch.object(time, "perf_counter", clock.now_s):
        run_virtual(case, pipeline, 10, clock, callbacks=[recorded])
    spans = [
        span
        for span in recorded.recorder.spans()
        if span.kind not in (Category.COMMUNICATION, Category.WAIT) or span.name in ALL_TO_ALLS
    ]
    result = break_down(spans, recorded.recorder.windows()[-1], overlapped=overlapped_by(MODES[pipeline]))
    return {
        **{kind: (round(one.busy_ms, 6), round(one.hidden_ms, 6)) for kind, one in result.categories.items()},
        "step": round(result.step_ms, 6),
        "blocked": round(result.blocked_ms, 6),
        "merge": round(result.merge_wait_ms, 6),
        "bound": (result.bound[0], round(result.bound[1], 6)),
    }


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((dict(metrics), step))


def _fit(model: Model, pipeline: str, *callbacks: Callback, data: Any = None, **kwargs: Any) -> Any:
    trainer = make_trainer(make_strategy(model, pipeline), callbacks=list(callbacks), **kwargs)
    trainer.fit(model, datamodule=data or Batches(model.case, NUM_STEPS))
    return trainer


def losses_without(case: Case, pipeline: str) -> list[float]:
    model = Model(case)
    _fit(model, pipeline)
    return torch.stack(model.losses).tolist()


def told_by_a_run(case: Case, pipeline: str) -> dict[str, Any]:
    originals = dist.all_to_all_single, dist.all_reduce
    model, monitor, logger, printed = Model(case), OverlapMonitor(every_n_steps=4), Kept(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = _fit(model, pipeline, monitor, logger=logger)
    return {
        "losses": torch.stack(model.losses).tolist(),
        "nothing_patched": originals == (dist.all_to_all_single, dist.all_reduce),
        "num_accounts": len(monitor.accounts),
        "stages": list(monitor.accounts[0].stages),
        "logged": [values for values, _ in logger.logged if "overlap/step_ms" in values],
        "progress_bar": list(trainer.progress_bar_metrics),
        "printed": printed.getvalue(),
    }


def slow_loader_and_log(case: Case, wait_ms: float, log_ms: float) -> tuple[Breakdown, float, str, bool]:
    """Return the first account, what `self.log` took, what was printed, and whether anything is left on the module."""

    class Slow(Batches):
        def train_dataloader(self) -> Any:
            for batch in super().train_dataloader():
                time.sleep(wait_ms / 1e3)
                yield batch

    class Logs(Model):
        def log(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(log_ms / 1e3)
            super().log(*args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    model, monitor, printed = Logs(case), OverlapMonitor(every_n_steps=4), io.StringIO()
    with contextlib.redirect_stdout(printed):
        _fit(model, "fused_sparse_dist", monitor, data=Slow(case, NUM_STEPS))
    # The last accounts may have fetched all data.
    return monitor.accounts[0], mean(monitor.accounts).log_ms, printed.getvalue(), "log" in vars(model)


def audited(case: Case, pipeline: str) -> dict[str, Any]:
    """Return the syncs of the step that was audited, and the line of the one that the user wrote."""
    monitor, logger = OverlapMonitor(every_n_steps=4, table=False), Kept()
    _fit(ReadsItsLoss(case), pipeline, monitor, logger=logger)
    source, first = inspect.getsourcelines(ReadsItsLoss)
    assert monitor.syncs is not None
    return {
        "places": [(sync.stage, sync.source(), sync.operator) for sync in monitor.syncs],
        "line": first + next(place for place, line in enumerate(source) if ".item()" in line),
        "logged": list(logger.logged[-1][0]),
    }


def without_pipeline(strategy: type[DDPStrategy]) -> list[str]:
    """Return what monitor and timeline say of a module without tables, and of the strategies that they cannot watch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy(), callbacks=[OverlapMonitor(), OverlapTimeline()])
        trainer.fit(Dense())
    return [str(one.message) for one in caught if "Overlap" in str(one.message)]


def validates_every_other_step(case: Case) -> tuple[int, int, bool]:
    """Return how often a fit validated, what was measured in between, and whether a clock is left behind."""
    monitor = OverlapMonitor(every_n_steps=3, table=False)

    class Validates(Batches):
        val_dataloader = Batches.train_dataloader

    class Counts(Model):
        num_validations = 0

        def on_validation_start(self) -> None:
            self.num_validations += 1

    model = Counts(case)
    options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = _fit(model, "fused_sparse_dist", monitor, data=Validates(case, NUM_STEPS), **options)
    return model.num_validations, len(monitor.accounts), trainer.strategy._run is not None  # with a timer


def measured_and_drawn(
    case: Case, pipeline: str, folder: str, monitor_first: bool
) -> tuple[Breakdown, Breakdown, list[int], str]:
    """Train under both instruments; return what each says of the steps drawn, the steps measured, and what was said."""
    model, monitor, logger, printed = Model(case), OverlapMonitor(every_n_steps=4), Kept(), io.StringIO()
    timeline, summaries = OverlapTimeline(folder, first_step=6, num_steps=3), []
    summarize = timeline_module.profiling.summarize

    def kept(*args: Any) -> Any:
        summaries.append(summarize(*args))
        return summaries[-1]

    callbacks = [monitor, timeline] if monitor_first else [timeline, monitor]
    functions = dist.all_to_all_single, dist.all_reduce
    with contextlib.redirect_stdout(printed), mock.patch.object(timeline_module.profiling, "summarize", kept):
        _fit(model, pipeline, *callbacks, logger=logger)
    assert functions == (dist.all_to_all_single, dist.all_reduce), "left in place"
    assert "log" not in vars(model)
    steps = [step for values, step in logger.logged if "overlap/step_ms" in values]
    of_drawn = [account for account, step in zip(monitor.accounts, steps, strict=True) if step in (6, 7, 8)]
    return mean(of_drawn), summaries[0] if summaries else mean(of_drawn), steps, printed.getvalue()


def drawn(case: Case, pipeline: str, folder: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    model, timeline, printed = Model(case), OverlapTimeline(folder, first_step=6, num_steps=2), io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        _fit(model, pipeline, timeline, data=Batches(case, num_steps))
    return {
        "files": [str(path) for path in timeline.files],
        "printed": printed.getvalue(),
        "warned": [str(one.message) for one in caught if "OverlapTimeline" in str(one.message)],
        "losses": torch.stack(model.losses).tolist(),
        "patched": dist.all_to_all_single.__module__ != "torch.distributed.distributed_c10d",
    }


def late_with_dense_gradients(case: Case, late_ms: float) -> tuple[Breakdown, bool]:
    """Train while rank 1 makes a dense gradient late; return this rank's account, and whether a hook is left behind."""

    class Late(Model):
        def on_train_start(self) -> None:
            if self.global_rank == 1:
                self.bottom[0].weight.register_hook(lambda _: time.sleep(late_ms / 1e3))

    model, monitor = Late(case), OverlapMonitor(every_n_steps=4, table=False)
    _fit(model, "base", monitor)
    return mean(monitor.accounts), "on_before_backward" in vars(model)
