"""A module that logs in every manner, and hooks that come in the middle of a run. Functions that ranks run."""

import warnings
from contextlib import suppress
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torchmetrics
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from ..support.cases import TABLE_WISE, Batch, Batches, Model, make_batch
from ..support.fits import make_trainer
from .features import Notebook, make_strategy, shared_folder

NUM_BATCHES = 7


class Summed(Metric):
    """States of both kinds: a tensor and a list."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.sum()
        self.seen.append(value.reshape(-1))

    def compute(self) -> Tensor:
        return self.total + torch.cat([part.reshape(-1) for part in self.seen]).max()  # synchronized, they are one


Shown = list[tuple[str, dict[str, str]]]


class Logs(Model):
    def __init__(self, fused: bool) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=fused)
        self.fused = fused
        self.shown: Shown = []
        self.mean, self.summed = torchmetrics.MeanMetric(), Summed()
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())  # one made of another
        self.several = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])

    def show(self, when: str) -> None:
        trainer = self.trainer
        for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.shown.append((when, {name: repr(float(value)) for name, value in sorted(metrics.items())}))

    def _log_all(self, prefix: str, batch: Batch) -> None:
        value = batch.dense.abs().mean()
        for metric in (self.mean, self.summed, self.extremes, self.several):
            metric.update(value)
        self.log(prefix + "at_step", value, on_step=True, on_epoch=False, prog_bar=True)
        self.log(prefix + "epoch", value, on_step=False, on_epoch=True)
        self.log(prefix + "both", value, on_step=True, on_epoch=True, batch_size=3)
        self.log(prefix + "synced", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log(prefix + "graph", value.clone().requires_grad_() * 2, on_step=True, enable_graph=True)
        for name in ("min", "max", "sum"):
            self.log(prefix + name, value, on_step=True, on_epoch=True, reduce_fx=name, sync_dist=True)
        self.log(prefix + "number", 3, on_step=True, on_epoch=True)
        self.log(prefix + "double", value.double(), on_step=True, on_epoch=True)
        self.log_dict({prefix + "a": value, prefix + "b": self.summed}, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log(prefix + "mean", self.mean, on_step=True, on_epoch=True)
        if self.trainer.training:  # an attribute's name is looked for in the module itself
            self.extremes.compute()
        self.log(prefix + "smallest", self.extremes.min_val.clone(), on_step=True, on_epoch=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._log_all("", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_all("val_", batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("at_batch_end", float(args[2]), on_step=True, on_epoch=True)
        self.show("batch")

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", 1.5)
        self.show("epoch")

    def on_validation_epoch_end(self) -> None:
        self.show("validation")

    def configure_optimizers(self) -> Any:
        if self.fused:
            return super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), 0.1)


class Evaluated(Batches):
    def val_dataloader(self) -> DataLoader:
        batches = [make_batch(self.case, 1000 + i, self.trainer.global_rank) for i in range(3)]
        return DataLoader(batches, batch_size=None)


def logged_in_every_manner(pipeline: str | None, folder: str) -> tuple[Shown, list[Any]]:
    """Fit two epochs with a checkpoint in the middle of the second, and go on from it; return what was logged."""
    path, shown, pages = shared_folder(folder), [], []
    for resume in (None, str(path / "step=10.ckpt")):
        model, notebook = Logs(fused=pipeline is not None), Notebook()
        trainer = make_trainer(
            make_strategy(pipeline),
            max_epochs=2,
            logger=notebook,
            log_every_n_steps=2,
            val_check_interval=3,
            num_sanity_val_steps=1,
            enable_checkpointing=True,
            default_root_dir=path,
            callbacks=[ModelCheckpoint(path, "{step}", every_n_train_steps=5, save_top_k=-1)],
        )
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(model, datamodule=Evaluated(TABLE_WISE, NUM_BATCHES), ckpt_path=resume)
        model.show("after")
        shown += model.shown
        pages += [(step, {name: repr(float(value)) for name, value in page.items()}) for step, page in notebook.pages]
    return shown, pages


def num_moves(pipeline: str | None) -> tuple[int, int]:
    """Return how often a fit that logs twice a step moves logged values, and how many steps it has."""

    class Twice(Logs):
        def _log_all(self, prefix: str, batch: Batch) -> None:
            value = batch.dense.mean()
            self.mean.update(value)
            self.log("value", value, on_step=True, on_epoch=True)
            self.log("metric", self.mean, on_step=True, on_epoch=True)

        on_train_batch_end, on_train_epoch_end = LightningModule.on_train_batch_end, LightningModule.on_train_epoch_end

    trainer = make_trainer(make_strategy(pipeline))
    moves = []

    def apply(value: Any, kinds: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is move_data_to_device and "is_tensor" in value:  # not a collection of them
            moves.append(value)
        return apply_to_collection(value, kinds, function, *args, **kwargs)

    with mock.patch.object(result, "apply_to_collection", apply), warnings.catch_warnings(action="ignore"):
        trainer.fit(Twice(fused=pipeline is not None), datamodule=Batches(TABLE_WISE, NUM_BATCHES))
    return len(moves), trainer.global_step


def moved_between_devices() -> list[Any]:
    """Log values that come from one device after another (one of them has no memory); return where their states are."""
    results, metric, where = _ResultCollection(training=True), Summed(), []
    for device in ("cpu", "cpu", "meta", "meta"):
        metric.to(device)
        metric.update(torch.ones(2, device=device))
        for name, kind in {"a": torch.mean, "b": torch.max}.items():
            value = torch.tensor(2.0, device=device)
            results.log("training_step", name, value, on_step=True, on_epoch=True, reduce_fx=kind, batch_size=2)
        results.log("training_step", "metric", metric, on_step=True, on_epoch=True)
        logged = list(results.values())
        states = [s for one in logged for name in one._defaults for s in (getattr(one, name), one._defaults[name])]
        where.append([device, logged[-1].value.total.device.type, *(state.device.type for state in states)])
    return where


Calls = list[tuple[str, int]]


class Meddler(Callback):
    """From batch to batch, gives hooks to what had none."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def note(self, name: str, module: LightningModule, batch_idx: int) -> Any:
        return lambda *args, **kwargs: self.calls.append((f"{name} {module._current_fx_name}", batch_idx))

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        def note(name: str) -> Any:
            return self.note(name, module, batch_idx)

        if batch_idx == 1:
            late = Callback()
            late.on_before_zero_grad = note("callback's instance")  # type: ignore[method-assign]
            late.on_train_batch_start = note("in the same hook")  # type: ignore[method-assign]
            trainer.callbacks.append(late)  # type: ignore[attr-defined]
        if batch_idx == 2:
            module.on_after_backward = MethodType(note("module's instance"), module)  # type: ignore[method-assign]
        if batch_idx == 3:
            type(module).on_before_backward = note("module's class")  # type: ignore[method-assign]
        if batch_idx == 4:
            trainer.strategy.on_train_batch_start = note("strategy")  # type: ignore[method-assign]


def hooks_that_come_late(pipeline: str | None) -> Calls:
    """Return the calls of hooks that were not there when the fit began."""

    class Meddled(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters() if pipeline is None else self.top.parameters(), 0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                self.trainer.profiler.start = meddler.note("profiler", self, 5)  # type: ignore[attr-defined]
            if batch_idx == 6:  # a step of another signature, from the next batch on
                self.training_step = lambda batch: super(Meddled, self).training_step(batch, 7)  # type: ignore
            return super().training_step(batch, batch_idx)

    meddler = Meddler()
    trainer = make_trainer(make_strategy(pipeline), callbacks=[meddler])
    trainer.fit(Meddled(TABLE_WISE, fused_optimizer=pipeline is not None), datamodule=Batches(TABLE_WISE, 9))
    # A lookahead fetches elsewhere in a step.
    fetches = ("profiler None", "profiler backward", "profiler batch_to_device")
    return [one for one in meddler.calls if one[0] not in fetches and "transfer" not in one[0]]


def _lightning() -> list[Any]:
    names = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
    return [*(getattr(call, name) for name in names), _ResultMetric.to]


def left_behind(fails: bool) -> list[str]:
    """Return what is not Lightning's own after a fit, or after one that an error ended; and that it was not, within."""

    class Ends(Callback):
        within: list[Any]

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
            self.within = _lightning()
            if fails and args[-1] == 2:
                raise InterruptedError

    before, ends = _lightning(), Ends()
    trainer = make_trainer(make_strategy("fused_sparse_dist"), callbacks=[ends])
    with suppress(InterruptedError), warnings.catch_warnings(action="ignore"):
        trainer.fit(Logs(fused=True), datamodule=Batches(TABLE_WISE, NUM_BATCHES))
    assert not set(before) & set(ends.within)
    return [one.__name__ for one in _lightning() if one not in before]
