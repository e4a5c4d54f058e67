"""A module that writes down what Lightning tells it, to compare strategies hook by hook. Run by ranks."""

import warnings
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_overlap import OverlapEmbeddingStrategy

from .cases import TABLE_WISE, Batch, Batches, Model, make_batch
from .fits import make_trainer

NUM_TRAIN, NUM_VAL = 9, 3


class _Unsized(IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


NONES = {"none_batches": (0, 4), "last_are_none": (4, 7, 8), "unsized_with_none": (0, 3, 4, 8)}
WORKERS: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}


class Data(LightningDataModule):
    def __init__(self, loader: str) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        batches = self._batches(0, NUM_TRAIN)
        for index in NONES.get(self.loader, ()):
            batches[index] = None
        dataset: Any = _Unsized(batches) if self.loader.startswith("unsized") else batches
        return DataLoader(dataset, batch_size=None, **WORKERS if self.loader == "workers" else {})

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._batches(1000, NUM_VAL), batch_size=None)

    def _batches(self, first: int, num: int) -> list[Any]:
        rank = self.trainer.global_rank
        return [make_batch(TABLE_WISE, index, rank, batch_size=4) for index in range(first, first + num)]


class Traced(Model):
    def __init__(self, fused_optimizer: bool, stop: str | None = None) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=fused_optimizer)
        self.trace: list[tuple[Any, ...]] = []
        self.transfers: list[int] = []
        self.stop = stop

    def _write(self, event: str, batch: Any = None, *details: Any) -> None:
        index = batch.inputs["sparse"][1] if batch is not None else None
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.trace.append((event, self.trainer.current_epoch, index, self.global_step, last, *details))

    def on_train_epoch_start(self) -> None:
        self._write("epoch_start")

    def on_train_epoch_end(self) -> None:
        self._write("epoch_end")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self._write("batch_start", batch, batch_idx)
        return -1 if self.stop == "minus_one" and batch_idx == 4 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._write("batch_end", batch, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self._write("training_step", batch, batch_idx)
        if self.stop == "should_stop" and batch_idx == 4:
            self.trainer.should_stop = True
        loss = super().training_step(batch, batch_idx)
        return None if self.stop == "no_loss" and batch_idx % 4 == 2 else loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self._write("optimizer_step")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._write("validation_step", batch, batch_idx)
        self(batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append(-1 if batch is None else batch.inputs["sparse"][1])
        return batch


def trace(pipeline: str | None, loader: str, stop: str | None, kwargs: dict[str, Any]) -> tuple[list[Any], list[int]]:
    model = _fit(pipeline, loader, stop, **{"num_sanity_val_steps": 1, **kwargs})
    return model.trace, [index for index in model.transfers if index < 1000]


def _fit(pipeline: str | None, loader: str, stop: str | None, **kwargs: Any) -> Traced:
    model = Traced(fused_optimizer=pipeline is not None, stop=stop)
    strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise") if pipeline else DDPStrategy()
    trainer = make_trainer(strategy, **{"max_epochs": 2, **kwargs})
    trainer.fit(model, datamodule=Data(loader))
    return model


def warnings_of_skipped_step(pipeline: str, none_at: int, before: bool) -> list[str]:
    """Return what a fit warns of a module whose step returns None for a batch, before or after its lookups."""

    class Skips(Model):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
            loss = None if before and batch_idx == none_at else super().training_step(batch, batch_idx)
            return None if batch_idx == none_at else loss

    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(OverlapEmbeddingStrategy(pipeline=pipeline, sharding="table_wise"))
        trainer.fit(Skips(TABLE_WISE), datamodule=Batches(TABLE_WISE, 5))
    return [str(w.message) for w in caught if "is not overlapped" in str(w.message)]


def fit_with_own_loop() -> list[bool]:
    """Fit with a loop of the user's, and say of each batch and of the end whether it is as the user left it."""

    class OwnLoop(_FitLoop):
        num_epochs = 0

        def advance(self) -> None:
            self.num_epochs += 1
            super().advance()

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            has_state = own.epoch_loop.batch_idx == batch_idx and own.epoch_progress is trainer.fit_loop.epoch_progress
            kept.append(has_state and type(own) is OwnLoop and type(own_epoch_loop) is _TrainingEpochLoop)

    kept: list[bool] = []
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"), callbacks=[Looks()])
    own, own_epoch_loop = OwnLoop(trainer, max_epochs=1), trainer.fit_loop.epoch_loop
    own.epoch_loop, trainer.fit_loop = own_epoch_loop, own
    trainer.fit(Model(TABLE_WISE), datamodule=Data("sized"))
    at_end = trainer.fit_loop is own and own.epoch_loop is own_epoch_loop and own.num_epochs == 1
    return [*kept, at_end]
