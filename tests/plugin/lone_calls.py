"""Fits in which one rank alone calls what waits for all ranks. Functions that ranks run."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batch, Batches, Model
from ..support.fits import QUIET

CALLS: Mapping[str, Callable[[LightningModule], Any]] = {
    "log": lambda module: module.log("lone", torch.tensor(1.0), sync_dist=True, batch_size=1),
    "gather": lambda module: module.all_gather(torch.tensor(1.0)),
    "barrier": lambda module: module.trainer.strategy.barrier(),
}
PLACES = ("training_step", "on_train_batch_end", "validation_step", "on_validation_epoch_end")


class Lone(Model):
    def __init__(self, call: str, place: str, rank: int) -> None:
        super().__init__(TABLE_WISE)
        self.call, self.place, self.rank = call, place, rank

    def _at(self, place: str, index: int = 2) -> None:
        if (place, index, self.global_rank) == (self.place, 2, self.rank):
            CALLS[self.call](self)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self._at("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_end", batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._at("validation_step", batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._at("on_validation_epoch_end")


class WithValidation(Batches):
    def val_dataloader(self) -> DataLoader:
        return self.loader_of(range(4))


def fit(port: int, call: str, place: str, rank: int) -> str:
    """Fit in a default group of its own; return the text of the error, with its notes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    module = Lone(call, place, rank)
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", timeout=3)
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, num_sanity_val_steps=0, **QUIET)
    try:
        trainer.fit(module, datamodule=WithValidation(TABLE_WISE, 5))
    except Exception as err:
        return "\n".join([str(err), *getattr(err, "__notes__", [])])
    return ""
