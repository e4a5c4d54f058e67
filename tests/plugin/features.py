"""A module, a callback and a logger that write down all they are told, to compare strategies. Run by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric
from torchrec import KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batch, Model, make_batch
from ..support.fits import make_trainer

NUM_TRAIN, NUM_EVAL = 7, 3
OWNED_BY_TESTS = {"on_before_batch_transfer", "on_after_batch_transfer"}
"""Hooks that a lookahead calls earlier, by its nature; test_fit_loop.py counts them."""


def _hooks(cls: type) -> list[str]:
    hooks = {name for name in dir(cls) if name.startswith("on_")} - OWNED_BY_TESTS - {"on_gpu"}
    return sorted(name for name in hooks if "_model_" not in name)  # those put the module into a mode


class Sized(Dataset):
    """`num` batches from index `first` on; with `ids=False` they hold dense features alone."""

    def __init__(self, first: int, num: int, rank: int, ids: bool = True) -> None:
        self.first, self.num, self.rank, self.ids = first, num, rank, ids

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Batch:
        if index >= self.num:
            raise IndexError(index)
        batch = make_batch(TABLE_WISE, self.first + index, self.rank, batch_size=4)
        if not self.ids:
            batch.inputs["sparse"] = (None, self.first + index)
        return batch


class Unsized(IterableDataset):
    def __init__(self, *args: Any) -> None:
        self.sized = Sized(*args)

    def __iter__(self) -> Iterator[Batch]:
        return (self.sized[index] for index in range(self.sized.num))


def _batches(*args: Any, cls: type = Sized) -> DataLoader:
    return DataLoader(cls(*args), batch_size=None)


def _collate(samples: list[Batch]) -> Batch:
    """One batch of four samples each: ids of all samples of a feature, feature by feature."""
    keys = samples[0].inputs["sparse"][0].keys()
    columns = [[sample.inputs["sparse"][0][key] for sample in samples] for key in keys]
    kjt = KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([part.values() for column in columns for part in column]),
        lengths=torch.cat([part.lengths() for column in columns for part in column]),
    )
    indices = tuple(sample.inputs["sparse"][1] for sample in samples)
    dense, labels = torch.cat([s.dense for s in samples]), torch.cat([s.labels for s in samples])
    return Batch(dense, {"sparse": (kjt, indices)}, labels)


def _samples(first: int, num: int, shuffle: bool) -> DataLoader:
    """The same samples on every rank: Lightning deals them out."""
    return DataLoader(Sized(first, num, 0), batch_size=2, shuffle=shuffle, collate_fn=_collate)


def _combined(mode: str, both: bool) -> Callable[[int], CombinedLoader]:
    """Two or three loaders of other lengths; ids in the batches of the first alone, or of the first two."""

    def make(rank: int) -> CombinedLoader:
        loaders = {"a": _batches(0, 5, rank), "b": _batches(100, 7, rank, both)}
        return CombinedLoader([*loaders.values(), _batches(200, 2, rank, False)] if both else loaders, mode)

    return make


MODES = ("min_size", "max_size", "max_size_cycle", "sequential")
LOADERS: dict[str, Callable[[int], Any]] = {
    "train": lambda rank: _batches(0, NUM_TRAIN, rank),
    "evaluate": lambda rank: _batches(1000, NUM_EVAL, rank),
    "evaluate_several": lambda rank: [_batches(1000, 3, rank), _batches(2000, 2, rank), _batches(3000, 1, rank, False)],
    "evaluate_combined": lambda rank: CombinedLoader({"a": _batches(1000, 3, rank), "b": _batches(2000, 2, rank)}),
    "nothing": lambda rank: [],
    "nested": lambda rank: {"a": _batches(0, 5, rank), "b": [_batches(100, 4, rank, False), _batches(200, 3, rank)]},
    "samples": lambda rank: _samples(0, 22, shuffle=True),
    "evaluate_samples": lambda rank: _samples(1000, 7, shuffle=False),
    "unsized_min_size": lambda rank: CombinedLoader(
        {"a": _batches(0, 5, rank, cls=Unsized), "b": _batches(100, 7, rank, False, cls=Unsized)}, "min_size"
    ),
    **{f"one_{mode}": _combined(mode, both=False) for mode in MODES},
    **{f"both_{mode}": _combined(mode, both=True) for mode in MODES},
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
    if isinstance(batch, Batch) or batch is None:
        return [] if batch is None else [batch]
    return [part for value in (batch.values() if isinstance(batch, Mapping) else batch) for part in parts(value)]


def indices(batch: Any) -> Any:
    """Return which batch this is, in the structure that it has."""
    if batch is None:
        return None
    if isinstance(batch, Batch):
        return batch.inputs["sparse"][1]
    if isinstance(batch, Mapping):
        return {key: indices(value) for key, value in batch.items()}
    return [indices(value) for value in batch]


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


def _module_hook(hook: str) -> Any:
    def write(self: Recorded, *args: Any) -> None:
        _write("module", hook, self.trainer, args, self.seen)

    return write


def _callback_hook(hook: str) -> Any:
    def write(self: Recorder, trainer: Trainer, module: Recorded, *args: Any) -> None:
        _write("callback", hook, trainer, args, module.seen)

    return write


Recorder = type("Recorder", (Callback,), {hook: _callback_hook(hook) for hook in _hooks(Callback)})


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
        indices = [part.inputs["sparse"][1] for part in parts(batch)]
        total = float(sum(sum(index) if isinstance(index, tuple) else index for index in indices))
        value = total + 0.25 * self.global_rank
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


for _hook in _hooks(LightningModule):
    setattr(Recorded, _hook, _module_hook(_hook))


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


class Notebook(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int | None, dict[str, float]]] = []
        self.finished: list[str] = []

    name, version = "notebook", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.pages.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.finished.append(status)


class Stopwatch(Timer):
    """Time that passes by the step."""

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_start(trainer, *args, **kwargs)
        self.trainer = trainer

    def time_elapsed(self, stage: str = "train") -> float:
        return self.trainer.global_step if hasattr(self, "trainer") else 0.0


MODELS: dict[str, type[Recorded]] = {
    "recorded": Recorded,
    "takes_iterator": TakesIterator,
    "ends_epoch_early": EndsEpochEarly,
    "asks_for_steps": AsksForSteps,
}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "early_stopping": lambda: EarlyStopping("validate_both", patience=1),
    "early_stopping_on_train": lambda: EarlyStopping("both_epoch", patience=1, check_on_train_epoch_end=True),
    "timer": lambda: Stopwatch({"seconds": 5}),
    "every_n_train_steps": lambda: ModelCheckpoint(
        filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=True
    ),
}


@dataclass(frozen=True)
class Setting:
    """A way to run a Trainer: everything by name, so that it reaches the ranks."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    train: str = "train"
    evaluate: str = "evaluate"
    model: str = "recorded"
    callbacks: tuple[str, ...] = ()
    calls: tuple[str, ...] = ("fit",)
    losses_of_ddp: bool = True


def make_strategy(pipeline: str | None, seen: Seen | None = None) -> Any:
    """Return the strategy under test, or DDPStrategy for None."""
    if pipeline is None:
        return DDPStrategy(find_unused_parameters=True)

    def observe(kind: str, stage: Any, index: int) -> None:
        if seen is not None and kind == "wait" and str(stage) == "embedding_lookup":
            seen.num_early += 1

    return OverlapEmbeddingStrategy(pipeline=pipeline, sharding="table_wise", observer=observe)


def shared_folder(folder: str) -> Path:
    """Return a folder of this run's own, the same one on all ranks."""
    names = [f"{len(list(Path(folder).iterdir()))}"]
    dist.broadcast_object_list(names)
    path = Path(folder) / names[0]
    path.mkdir(exist_ok=True)
    return path


def run(pipeline: str | None, setting: Setting, folder: str) -> Seen:
    """Make the calls of a setting under a mode (None: DDPStrategy), one after the other."""
    model, data = MODELS[setting.model](fused=pipeline is not None), Data(setting.train, setting.evaluate)
    seen, path = model.seen, shared_folder(folder)

    def new_trainer() -> Trainer:
        kwargs: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": bool(setting.callbacks), **setting.trainer}
        if not kwargs.get("barebones"):
            kwargs = {"logger": Notebook(), "log_every_n_steps": 1, **kwargs}
        callbacks = [Recorder(), *(CALLBACKS[name]() for name in setting.callbacks)]
        trainer = make_trainer(make_strategy(pipeline, seen), callbacks=callbacks, default_root_dir=path, **kwargs)
        for timer in trainer.callbacks:
            if type(timer) is Timer:  # made by max_time
                timer.__class__ = Stopwatch
        return trainer

    trainer = new_trainer()
    trainers = [trainer]
    for call in setting.calls:
        seen.trace.append(call)
        if call == "other trainer":
            trainer = new_trainer()
            trainers.append(trainer)
        elif call == "fit more":
            trainer.fit_loop.max_epochs += 1
            trainer.fit(model, datamodule=data)
        else:
            quiet = {"verbose": False} if call in ("validate", "test") else {}
            returned = getattr(trainer, call)(model, datamodule=data, **quiet)
            if returned:
                seen.trace.append(("returned", len(returned)))
                if quiet:
                    seen.trace += [_values(metrics, seen) for metrics in returned]
                else:
                    seen.losses += [float(value) for value in _leaves(returned)]
    for logger in [logger for trainer in trainers for logger in trainer.loggers]:
        if isinstance(logger, Notebook):  # fast_dev_run has a dummy in its place
            seen.logged += [(step, _values(metrics, seen)) for step, metrics in logger.pages]
            seen.logged += logger.finished
    trainer.strategy.barrier()  # the first rank removes old checkpoints
    seen.logged.append(sorted(str(file.relative_to(path)) for file in path.rglob("*.ckpt")))
    return seen


def _leaves(nested: Any) -> Iterator[Any]:
    if isinstance(nested, list):
        for value in nested:
            yield from _leaves(value)
    else:
        yield nested
