"""Fits that give ids back early. Functions that ranks run."""

import warnings
import weakref
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_overlap import Schedule

from ..support.cases import NUM_STEPS, Batch, Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect


class Fresh(Batches):
    """Batches that nothing but the training holds."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Made(self.case, self.num_batches, self.trainer.global_rank), batch_size=None)


class _Made(IterableDataset):
    def __init__(self, case: Case, num: int, rank: int) -> None:
        self.case, self.num, self.rank = case, num, rank

    def __iter__(self) -> Any:
        return (make_batch(self.case, index, self.rank) for index in range(self.num))


class Watching(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.alive: list[int] = []
        self._ids: list[weakref.ref[Tensor]] = []

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self._ids.append(weakref.ref(batch.inputs["sparse"][0].values()))
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.alive.append(sum(ids() is not None for ids in self._ids))
        return super().training_step(batch, batch_idx)


class ReadsIds(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * batch.inputs["sparse"][0].values().sum()


class ReadsLengths(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kjt = batch.inputs["sparse"][0]
        assert kjt.lengths().numel() == len(kjt.keys()) * kjt.stride()
        return super().training_step(batch, batch_idx)


class AsItIs(Batches):
    """A batch of a type that nobody moves, with the loader's own objects inside."""

    def train_dataloader(self) -> DataLoader:
        batches = [make_batch(self.case, index, self.trainer.global_rank) for index in range(self.num_batches)]
        return DataLoader([_Holder(batch) for batch in batches], batch_size=None)


class _Holder:
    def __init__(self, batch: Batch) -> None:
        self.dense, self.inputs, self.labels = batch.dense, batch.inputs, batch.labels


def _trainer(model: Model, pipeline: str | Schedule, release_features: bool, **kwargs: Any) -> Any:
    strategy = make_strategy(model, pipeline, release_features=release_features)
    return make_trainer(strategy, **kwargs)


def fit(case: Case, pipeline: str | Schedule) -> Result:
    module = ReadsLengths(case)
    trainer = _trainer(module, pipeline, True)
    trainer.fit(module, datamodule=Fresh(case, NUM_STEPS))
    return collect(module, trainer.optimizers[0], module.losses)


def alive(case: Case, pipeline: str | Schedule, release_features: bool) -> list[int]:
    module = Watching(case)
    _trainer(module, pipeline, release_features).fit(module, datamodule=Fresh(case, NUM_STEPS))
    return module.alive


def refused(case: Case) -> str:
    module = ReadsIds(case)
    try:
        _trainer(module, "fused_sparse_dist", True).fit(module, datamodule=Fresh(case, 6))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def warned(case: Case, model: type[Model], data: type[Batches], num_epochs: int = 1) -> tuple[list[str], int]:
    """Train what nothing can be released of; return what was said, and how many steps there were."""
    module = model(case)
    trainer = _trainer(module, "fused_sparse_dist", True, max_epochs=num_epochs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data(case, 6))
    said = [str(warning.message) for warning in caught if "release_features" in str(warning.message)]
    return said, len(module.losses)
