"""Lightning's features under the strategy: hooks, logs and counts of DDPStrategy, losses of `base`."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.sparse.module_flight import ModuleFlight

from ..support.cases import TABLE_WISE, Batch, Model, make_batch
from ..support.fits import make_trainer
from ..support.ranks import Ranks

NUM_TRAIN, NUM_EVAL = 7, 3
CALLED_ELSEWHERE = {"on_before_batch_transfer", "on_after_batch_transfer", "on_load_checkpoint"}
"""A lookahead transfers earlier (test_fit_loop.py counts), and weights are loaded once tables are sharded."""


def _hooks(cls: type) -> list[str]:
    hooks = {name for name in dir(cls) if name.startswith("on_")} - CALLED_ELSEWHERE - {"on_gpu"}
    return sorted(name for name in hooks if "_model_" not in name)  # those put the module into a mode


class Unsized(IterableDataset):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def _batches(first: int, num: int, rank: int, ids: bool = True) -> list[Batch]:
    """Return `num` batches from index `first` on; without ids they hold dense features alone."""
    batches = [make_batch(TABLE_WISE, first + index, rank, batch_size=4) for index in range(num)]
    for index, batch in enumerate(batches if not ids else []):
        batch.inputs["sparse"] = (None, first + index)
    return batches


def _loader(first: int, num: int, rank: int, ids: bool = True, sized: bool = True) -> DataLoader:
    batches = _batches(first, num, rank, ids)
    return DataLoader(batches if sized else Unsized(batches), batch_size=None)


def _dealt_out(first: int, num: int, shuffle: bool) -> DataLoader:
    """The same data on every rank: Lightning deals it out."""
    return DataLoader(_batches(first, num, 0), batch_size=1, shuffle=shuffle, collate_fn=itemgetter(0))


def _combined(mode: str, rank: int, sized: bool = True) -> CombinedLoader:
    """Combine two loaders, the longer one without ids."""
    return CombinedLoader({"a": _loader(0, 5, rank, sized=sized), "b": _loader(100, 7, rank, False, sized)}, mode)


def _three(mode: str, rank: int) -> CombinedLoader:
    """Combine three loaders, the last one without ids."""
    return CombinedLoader([_loader(0, 5, rank), _loader(100, 7, rank), _loader(200, 2, rank, False)], mode)


LOADERS: dict[str, Callable[[int], Any]] = {
    "train": lambda rank: _loader(0, NUM_TRAIN, rank),
    "evaluate": lambda rank: _loader(1000, NUM_EVAL, rank),
    "evaluate_unsized": lambda rank: [_loader(1000, 3, rank, sized=False), _loader(2000, 4, rank, sized=False)],
    "evaluate_several": lambda rank: [_loader(1000, 3, rank), _loader(2000, 2, rank), _loader(3000, 1, rank, False)],
    "evaluate_combined": lambda rank: CombinedLoader({"a": _loader(1000, 3, rank), "b": _loader(2000, 2, rank)}),
    "nested": lambda rank: {"a": _loader(0, 5, rank), "b": [_loader(100, 4, rank, False), _loader(200, 3, rank)]},
    "samples": lambda rank: _dealt_out(0, 12, shuffle=True),
    "evaluate_samples": lambda rank: _dealt_out(1000, 8, shuffle=False),
    "unsized_min_size": lambda rank: _combined("min_size", rank, sized=False),
    "one_min_size": lambda rank: _combined("min_size", rank),
    "one_max_size": lambda rank: _combined("max_size", rank),
    "one_max_size_cycle": lambda rank: _combined("max_size_cycle", rank),
    "one_sequential": lambda rank: _combined("sequential", rank),
    "both_min_size": lambda rank: _three("min_size", rank),
    "both_max_size_cycle": lambda rank: _three("max_size_cycle", rank),
}


class Data(LightningDataModule):
    def __init__(self, train: str, evaluate: str) -> None:
        super().__init__()
        self.train, self.evaluate = train, evaluate

    def _evaluate(self) -> Any:
        return LOADERS[self.evaluate](self.trainer.global_rank)

    def train_dataloader(self) -> Any:
        return LOADERS[self.train](self.trainer.global_rank)

    val_dataloader = test_dataloader = predict_dataloader = _evaluate


def parts(batch: Any) -> list[Batch]:
    """Return the batches of several loaders as a list; a loader that has ended gives none."""
    found: list[Batch] = []
    apply_to_collection(batch, Batch, found.append)
    return found


def indices(batch: Any) -> Any:
    """Return which batch this is, in the structure that it has."""
    return apply_to_collection(batch, Batch, lambda part: part.inputs["sparse"][1])


@dataclass
class Seen:
    trace: list[Any] = field(default_factory=list)
    logged: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    num_early: int = 0  # early embeddings that the module used


def _values(metrics: Mapping[str, Any], seen: Seen) -> dict[str, str]:
    """Return the metrics that the data determine; those that the weights determine go to the losses."""
    values = {name: float(value) for name, value in sorted(metrics.items())}
    seen.losses += [value for name, value in values.items() if "loss" in name]
    return {name: repr(value) for name, value in values.items() if "loss" not in name}  # a nan equals a nan


def _write(owner: str, hook: str, trainer: Trainer, args: tuple[Any, ...], seen: Seen) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counts = (trainer.current_epoch, trainer.global_step, progress.current.ready, progress.is_last_batch)
    batch = [indices(arg) for arg in args if isinstance(arg, (Batch, list)) or (isinstance(arg, dict) and "a" in arg)]
    numbers = [arg for arg in args if isinstance(arg, int)]
    seen.trace.append((owner, hook, trainer.state.stage.value, *counts, *numbers, *batch))
    if hook.endswith(("batch_end", "epoch_end")):
        for metrics in (trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics):
            seen.trace.append(_values(metrics, seen))
    if hook == "on_train_start":
        seen.trace.append((trainer.num_training_batches, trainer.num_val_batches, trainer.estimated_stepping_batches))


def _hook(owner: str, hook: str) -> Any:
    def write(self: Any, *args: Any) -> None:
        trainer, module = args[:2] if owner == "callback" else (self.trainer, self)
        _write(owner, hook, trainer, args, module.seen)

    return write


Recorder = type("Recorder", (Callback,), {hook: _hook("callback", hook) for hook in _hooks(Callback)})


class Recorded(Model):
    """Writes every hook, and logs in every manner what its batches determine, and its loss."""

    def __init__(self, fused: bool) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=fused)
        self.fused = fused
        self.seen = Seen()
        self.means = nn.ModuleDict({f"of_{stage.value}": MeanMetric() for stage in RunningStage})

    def loss(self, batch: Any) -> Tensor:
        losses = []
        for part in parts(batch):
            zeros = {f"f{i}": torch.zeros(len(part.labels), 8) for i in range(3)}
            losses.append(self(part, None if part.inputs["sparse"][0] is not None else {"ebc": zeros}))
        return torch.stack(losses).sum()

    def _log(self, prefix: str, batch: Any, loss: Tensor) -> None:
        value = sum(part.inputs["sparse"][1] for part in parts(batch)) + 0.25 * self.global_rank
        mean = self.means[f"of_{self.trainer.state.stage.value}"]
        mean(value)
        self.log(prefix + "both", value, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True, batch_size=4)
        self.log(prefix + "local", value, on_step=True, on_epoch=True, batch_size=4)
        self.log(prefix + "max", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=4)
        if not isinstance(self, TakesIterator):  # Lightning sees no batch that it could infer the size from
            self.log(prefix + "inferred_batch_size", value, on_step=False, on_epoch=True, sync_dist=True)
        self.log(prefix + "metric", mean, on_step=True, on_epoch=True, batch_size=4)
        self.log_dict({prefix + "loss": loss.detach()}, on_step=True, on_epoch=True, sync_dist=True, batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.losses.append(loss.item())
        self.seen.trace.append(("training_step", batch_idx, indices(batch), torch.is_inference_mode_enabled()))
        self._log("", batch, loss)
        return loss

    def _evaluate(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.seen.losses.append(loss.item())
        mode = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training, loss.requires_grad)
        self.seen.trace.append((self.trainer.state.stage.value, batch_idx, dataloader_idx, indices(batch), *mode))
        if not self.trainer.predicting:
            self._log(f"{self.trainer.state.stage.value}_", batch, loss)
        return loss

    validation_step = test_step = predict_step = _evaluate

    def configure_optimizers(self) -> Any:
        if self.fused:
            return super().configure_optimizers()
        # Under DDP the dense optimizer does what the fused one does.
        tables = {"params": list(self.ebc.parameters()), "lr": 2.0, "momentum": 0.0}
        rest = {"params": [*self.bottom.parameters(), *self.top.parameters()]}
        return torch.optim.SGD([tables, rest], lr=0.2, momentum=0.5)


for _name in _hooks(LightningModule):
    setattr(Recorded, _name, _hook("module", _name))


class TakesIterator(Recorded):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class EndsEpochEarly(Recorded):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        _write("module", "on_train_batch_start", self.trainer, (batch, batch_idx), self.seen)
        return -1 if batch_idx == 4 else None


class AsksForSteps(Recorded):
    """A schedule over the whole run, as OneCycleLR needs it."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        self.seen.trace.append(("estimated", total, self.trainer.num_training_batches))
        # A scheduler of the dense optimizer does not reach fused tables: let it leave them alone under DDP too.
        factors = [lambda step: 1 - step / total] if self.fused else [lambda _: 1.0, lambda step: 1 - step / total]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Notebook(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[Any, Mapping[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.pages.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.pages.append((status, {}))


class Stopwatch(Timer):
    """Time that passes by the step."""

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_start(trainer, *args, **kwargs)
        self.trainer = trainer

    def time_elapsed(self, stage: str = "train") -> float:
        return self.trainer.global_step if hasattr(self, "trainer") else 0.0


@dataclass(frozen=True)
class Setting:
    """A way to run a Trainer."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    train: str = "train"
    evaluate: str = "evaluate"
    model: type[Recorded] = Recorded
    callbacks: tuple[Callback, ...] = ()
    calls: tuple[str, ...] = ("fit",)  # also "fit more" epochs, "fit anew" by another trainer, "from" a checkpoint
    losses_of_ddp: bool = True


def make_strategy(pipeline: str | None) -> Any:
    """Return the strategy under test, or DDPStrategy for None."""
    if pipeline is None:
        return DDPStrategy(find_unused_parameters=True)
    return OverlapEmbeddingStrategy(pipeline=pipeline, sharding="table_wise")


@contextmanager
def early_embeddings() -> Iterator[list[str]]:
    """Note the step whenever embeddings of an early lookup are used."""
    used: list[str] = []

    def receive(self: Any, *args: Any, own: Any = ModuleFlight._receive) -> Any:
        used.append(self.shared.options.method)
        return own(self, *args)

    with mock.patch.object(ModuleFlight, "_receive", receive):
        yield used


def run(pipeline: str | None, setting: Setting, folder: str | None = None) -> Seen:
    """Make the calls of a setting under a mode (None: DDPStrategy), one after the other."""
    model, data = setting.model(fused=pipeline is not None), Data(setting.train, setting.evaluate)
    seen, trainers = model.seen, []

    def new_trainer() -> Trainer:
        saves = any(isinstance(callback, ModelCheckpoint) for callback in setting.callbacks)
        kwargs: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": saves, **setting.trainer}
        if not kwargs.get("barebones"):
            kwargs = {"logger": Notebook(), "log_every_n_steps": 1, **kwargs}
        callbacks = [Recorder(), *setting.callbacks]
        trainer = make_trainer(make_strategy(pipeline), callbacks=callbacks, default_root_dir=folder, **kwargs)
        for timer in trainer.callbacks:
            if type(timer) is Timer:  # made by max_time
                timer.__class__ = Stopwatch
        trainers.append(trainer)
        return trainer

    trainer = new_trainer()
    for call in setting.calls:
        entry, *words = call.split()
        seen.trace.append(call)
        trainer = new_trainer() if "anew" in words else trainer
        trainer.fit_loop.max_epochs += "more" in words
        path = next(Path(folder).rglob(words[-1])) if "from" in words else None
        with redirect_stdout(io.StringIO()), early_embeddings() as used:
            returned = getattr(trainer, entry)(model, datamodule=data, ckpt_path=path) or []
        seen.num_early += len(used)
        seen.trace.append(("returned", len(returned)))
        for one in returned:
            if isinstance(one, dict):
                seen.trace.append(_values(one, seen))
            else:
                apply_to_collection(one, Tensor, lambda loss: seen.losses.append(loss.item()))
    for logger in [logger for trainer in trainers for logger in trainer.loggers]:
        if isinstance(logger, Notebook):  # fast_dev_run has a dummy in its place
            seen.logged += [(step, _values(metrics, seen)) for step, metrics in logger.pages]
    trainer.strategy.barrier()  # the first rank removes old checkpoints
    seen.logged.append(sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.ckpt")) if folder else [])
    return seen


SETTINGS: dict[str, Setting] = {
    "limit_val_batches": Setting({"limit_val_batches": 2}),
    "limit_train_batches_0": Setting({"limit_train_batches": 0}),
    "limit_test_batches": Setting({"limit_test_batches": 2}, calls=("test",)),
    "limit_predict_batches": Setting({"limit_predict_batches": 2}, calls=("predict",)),
    "overfit_batches": Setting({"overfit_batches": 0.34}),
    "fast_dev_run": Setting({"fast_dev_run": True}, calls=("fit", "test", "predict")),
    "max_time": Setting({"max_time": {"seconds": 5}}),
    "min_epochs": Setting({"min_epochs": 3, "max_epochs": 4}, callbacks=(EarlyStopping("validate_both", patience=1),)),
    "max_steps_between_epochs": Setting({"max_steps": 11, "max_epochs": 3}),
    "max_steps_0": Setting({"max_steps": 0}),
    "check_val_every_n_epoch": Setting({"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "val_check_interval_float": Setting({"val_check_interval": 0.45}),
    "num_sanity_val_steps": Setting({"num_sanity_val_steps": 2}),
    "reload_dataloaders_every_n_epochs": Setting({"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}),
    "early_stopping": Setting({"max_epochs": 4}, callbacks=(EarlyStopping("validate_both", patience=1),)),
    "timer": Setting(callbacks=(Stopwatch({"seconds": 5}),)),
    "every_n_train_steps": Setting(callbacks=(ModelCheckpoint(None, "{step}", every_n_train_steps=4, save_top_k=-1),)),
    "log_every_n_steps": Setting({"log_every_n_steps": 4}),
    "ends_epoch_early": Setting(model=EndsEpochEarly),
    "asks_for_steps": Setting({"accumulate_grad_batches": 2}, model=AsksForSteps, losses_of_ddp=False),
    "use_distributed_sampler": Setting(
        {"use_distributed_sampler": True}, "samples", "evaluate_samples", calls=("fit", "validate", "predict")
    ),
    "several_val_loaders": Setting({"val_check_interval": 4}, evaluate="evaluate_several", calls=("fit", "test")),
    "combined_val_loader": Setting(evaluate="evaluate_combined", calls=("fit", "test")),
    "nested_loaders": Setting(train="nested"),
    "unsized_min_size": Setting(train="unsized_min_size"),
    "one_max_size": Setting(train="one_max_size"),
    "both_max_size_cycle": Setting({"val_check_interval": 0.5}, train="both_max_size_cycle"),
    "inference_mode": Setting({"inference_mode": True}, calls=("validate", "fit", "test", "fit more")),
    "no_inference_mode": Setting({"inference_mode": False}, calls=("validate", "fit", "test", "fit more")),
    "detect_anomaly": Setting({"detect_anomaly": True}),
    "fit_more": Setting(calls=("fit", "fit more", "fit more")),
    "other_trainer": Setting({"max_epochs": 1}, calls=("fit", "fit anew", "predict anew")),
    "there_and_back": Setting(
        {"max_epochs": 1}, calls=("validate", "fit", "validate", "test", "predict", "fit more", "predict", "fit more")
    ),
    "barebones": Setting({"barebones": True}),
}

ON_ONE_RANK_TOO = list(SETTINGS)[::2]
SMOKE = ("several_val_loaders", "there_and_back")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * (n in SMOKE)) for n in SETTINGS])
def test_same_as_ddp(get_ranks: Callable[..., Ranks], name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    for num_ranks in (1, 2) if name in ON_ONE_RANK_TOO else (2,):
        ranks, modes = get_ranks(num_ranks), (None, "base", "fused_sparse_dist")
        expected, base, early = (ranks.run(run, mode, setting, f"{tmp_path}/{num_ranks}_{mode}") for mode in modes)
        for mine, plain, theirs in zip(early, base, expected, strict=True):
            assert plain.trace == mine.trace == theirs.trace
            assert plain.logged == mine.logged == theirs.logged
            assert plain.losses == mine.losses
            assert len(mine.losses) == len(theirs.losses)
            if setting.losses_of_ddp:
                assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)
