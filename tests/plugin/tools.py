"""What stands around a fit: profilers, loggers' files, progress bars, writers, summaries. Run by ranks."""

import csv
import io
import re
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer
from .features import Data, Recorded, Seen, TakesIterator, indices, make_strategy, shared_folder

PROFILERS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def profiled_actions(pipeline: str | None, kind: str, folder: str) -> dict[str, int]:
    """Return the actions that a profiler saw, each with its count; the strategy's own name left out."""
    model = Recorded(fused=pipeline is not None)
    path = shared_folder(folder)
    profiler = PROFILERS[kind](dirpath=path, filename="profile")
    strategy = make_strategy(pipeline)
    trainer = make_trainer(strategy, profiler=profiler, max_epochs=2)
    trainer.fit(model, datamodule=Data("train", "evaluate"))
    if kind == "simple":
        actions = [action for action, durations in profiler.recorded_durations.items() for _ in durations]
    elif kind == "advanced":
        rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
        report = (path / f"fit-profile{rank}.txt").read_text()
        actions = re.findall("Profile stats for: (.*?)(?: rank: .*)?\n", report)
    else:
        # Not its marks of modules: those that became sharded modules after it had looked around are missing.
        actions = [event.name for event in profiler.function_events if event.name.startswith("[pl][profile]")]
    actions = [action.replace(type(strategy).__name__, "TheStrategy") for action in actions]
    return {action: actions.count(action) for action in actions}


def csv_rows(pipeline: str | None, folder: str) -> list[dict[str, str]]:
    """Return the rows of Lightning's CSV file; only the first rank writes one."""
    path = shared_folder(folder)
    model = Recorded(fused=pipeline is not None)
    logger = CSVLogger(path, name="", version="", flush_logs_every_n_steps=3)
    trainer = make_trainer(make_strategy(pipeline), logger=logger, max_epochs=2, log_every_n_steps=2)
    trainer.fit(model, datamodule=Data("train", "evaluate"))
    trainer.strategy.barrier()
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__(refresh_rate=2)
        self.shown: list[Any] = []

    def init_train_tqdm(self) -> Any:
        return self._to_nowhere(super().init_train_tqdm())

    def init_validation_tqdm(self) -> Any:
        return self._to_nowhere(super().init_validation_tqdm())

    def _to_nowhere(self, bar: Any) -> Any:
        bar.fp = io.StringIO()
        return bar

    def _write(self, hook: str, bar: Any) -> None:
        self.shown.append((hook, bar.n, bar.total, bar.desc, bar.disable))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self._write("train_batch", self.train_progress_bar)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_epoch_end(trainer, *args)
        self._write("train_epoch", self.train_progress_bar)
        metrics = self.get_metrics(trainer, *args)
        self.shown.append({name: value for name, value in metrics.items() if "loss" not in name})

    def on_validation_batch_end(self, *args: Any) -> None:
        super().on_validation_batch_end(*args)
        self._write("validation_batch", self.val_progress_bar)


def shown_by_bar(pipeline: str | None, kwargs: dict[str, Any], train: str = "train") -> list[Any]:
    bar = Bar()
    trainer = make_trainer(
        make_strategy(pipeline), enable_progress_bar=True, callbacks=[bar], **{"max_epochs": 2, **kwargs}
    )
    trainer.fit(Recorded(fused=pipeline is not None), datamodule=Data(train, "evaluate"))
    return bar.shown


def fits_with_rich_bar(pipeline: str) -> int:
    from lightning.pytorch.callbacks import RichProgressBar

    trainer = make_trainer(make_strategy(pipeline), enable_progress_bar=True, callbacks=[RichProgressBar()])
    trainer.fit(Recorded(fused=True), datamodule=Data("train", "evaluate"))
    return trainer.global_step


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.handed: list[Any] = []
        self.losses: list[float] = []

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Tensor, *given: Any) -> None:
        batch_indices, batch, batch_idx, dataloader_idx = given
        self.handed.append((batch_indices, indices(batch), batch_idx, dataloader_idx))
        self.losses.append(prediction.item())

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.handed.append((len(predictions), batch_indices))
        self.losses += [prediction.item() for prediction in predictions]


def written_predictions(pipeline: str | None, fit_first: bool) -> tuple[list[Any], list[float]]:
    """Predict on samples that Lightning deals out; return what the writer was handed, and the predictions."""
    writer, model, data = Writer(), Recorded(fused=pipeline is not None), Data("samples", "evaluate_samples")
    trainer = make_trainer(make_strategy(pipeline), callbacks=[writer], use_distributed_sampler=True)
    if fit_first:
        trainer.fit(model, datamodule=data)
    trainer.predict(model, datamodule=data, return_predictions=False)
    return writer.handed, writer.losses


class _AtFitStart(Callback):
    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.summary = summarize(module, max_depth=2)


def summary_of_sharded_module() -> tuple[dict[str, int], int, int]:
    """Return the parameters by layer that ModelSummary counts on this rank, in all, and the tables' own count."""
    at_start = _AtFitStart()
    model = Model(TABLE_WISE)
    num_table_parameters = sum(p.numel() for p in model.ebc.parameters())
    callbacks = [ModelSummary(max_depth=2), at_start]
    trainer = make_trainer(make_strategy("fused_sparse_dist"), enable_model_summary=True, callbacks=callbacks)
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 1))
    counts = dict(zip(at_start.summary.layer_names, at_start.summary.param_nums, strict=True))
    return counts, at_start.summary.total_parameters, num_table_parameters


def compiled(pipeline: str) -> list[tuple[list[float], int, list[str]]]:
    """Fit a module, and the same one compiled; return of each losses, early embeddings used, what was said."""
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model, seen = Model(TABLE_WISE), Seen()
        given: Any = torch.compile(model, backend="eager") if compile_it else model
        with warnings.catch_warnings(record=True, action="always") as caught:
            make_trainer(make_strategy(pipeline, seen)).fit(given, datamodule=Batches(TABLE_WISE, 6))
        said = [str(w.message) for w in caught if "early" in str(w.message) or "lookup" in str(w.message)]
        results.append(([loss.item() for loss in model.losses], seen.num_early, said))
    return results


def train_only(pipeline: str, train: str, takes_iterator: bool, **kwargs: Any) -> tuple[list[float], int, int]:
    """Fit a module that takes `dataloader_iter`, or the same one that does not: losses, steps, early lookups."""
    model = (TakesIterator if takes_iterator else Recorded)(fused=True)
    trainer = make_trainer(make_strategy(pipeline, model.seen), limit_val_batches=0, **kwargs)
    trainer.fit(model, datamodule=Data(train, "evaluate"))
    return model.seen.losses, trainer.global_step, model.seen.num_early


def message_of_sequential(pipeline: str | None) -> tuple[str, int]:
    """Train on a sequential CombinedLoader; return what the user reads, then the steps of a fit that is right."""
    model, trainer = Recorded(fused=pipeline is not None), make_trainer(make_strategy(pipeline))
    with pytest.raises(ValueError, match="sequential") as caught:
        make_trainer(make_strategy(pipeline)).fit(model, datamodule=Data("one_sequential", "evaluate"))
    trainer.fit(model, datamodule=Data("one_min_size", "evaluate"))
    return str(caught.value), trainer.global_step


def validates_by_the_clock(pipeline: str) -> list[Any]:
    """Fit with a validation every two "seconds"; the clock of a rank is the slower the higher its number."""
    model = Recorded(fused=True)
    ticks = iter(range(10_000))
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / (1 + dist.get_rank()))
    with ExitStack() as patches:
        for loop in (training_epoch_loop, fit_loop, evaluation_loop):
            if hasattr(loop, "time"):
                patches.enter_context(mock.patch.object(loop, "time", clock))
        trainer = make_trainer(make_strategy(pipeline), val_check_interval="00:00:00:02", max_epochs=2)
        trainer.fit(model, datamodule=Data("train", "evaluate"))
    steps = [entry for entry in model.seen.trace if isinstance(entry, tuple)]
    return [(event, batch_idx) for event, batch_idx, *_ in steps if event in ("training_step", "validate")]
