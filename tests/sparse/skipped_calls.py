"""Modules that one rank or all leave out or call once more in some steps. Functions that ranks run, and a program."""

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_overlap import OverlapEmbeddingStrategy

from ..support import cases
from ..support.cases import TWO_COLLECTIONS, Batch, Batches, ByHand, Case, Model, TableSpec, make_plan
from ..support.fits import QUIET
from . import caller_fits
from .variants import no_embeddings

NUM_STEPS = 9
ONE = Case("one_collection", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f1",))))
_COPIED = TableSpec("u0", ("f1", "f2"), "data_parallel", collection="second")
COPIED = Case("copied_beside", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f1",)), _COPIED))
SEQUENCES = Case("sequences", TWO_COLLECTIONS.tables, sequence=True)
CASES = {case.name: case for case in (ONE, TWO_COLLECTIONS, COPIED, SEQUENCES)}


@dataclass(frozen=True)
class Skip:
    """Which calls some ranks leave out."""

    collection: str = "ebc"
    batches: tuple[int, ...] = (4,)
    ranks: tuple[int, ...] = (1,)
    twice: bool = False  # the module is called once more, instead of once less
    after: str = "training_step"  # also `validation_step`
    no_grad: bool = False  # in every step

    def concerns(self, step: str, collection: str, batch: int) -> bool:
        of_rank = step == self.after and dist.get_rank() in self.ranks
        return of_rank and collection == self.collection and batch in self.batches


class Skips(Model):
    """Skips a collection in training or in validation."""

    def __init__(self, case: Case, skip: Skip) -> None:
        super().__init__(case)
        self.skip, self.step = skip, "training_step"

    def embeddings(self, collection: str, batch: Batch) -> Any:
        if self.skip.concerns(self.step, collection, batch.inputs["sparse"][1]):
            print(f"skips at {time.time()}", flush=True)
            if self.skip.twice:
                super().embeddings(collection, batch)
                return super().embeddings(collection, _again(batch))
            if self.case.sequence:
                dim = self.case.collections[collection][0].dim
                return _Sequences(dim, len(batch.labels))
            return no_embeddings(self.case, collection, batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.skip.no_grad):
            return super().embeddings(collection, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.step = "validation_step"
        super().validation_step(batch, batch_idx)
        self.step = "training_step"


class _Sequences:
    def __init__(self, dim: int, batch_size: int) -> None:
        self._none = cases.JaggedTensor(torch.zeros(0, dim), lengths=torch.zeros(batch_size, dtype=torch.int64))

    def __getitem__(self, key: str) -> Any:
        return self._none


def _again(batch: Batch) -> Batch:
    kjt, index = batch.inputs["sparse"]
    return Batch(batch.dense, {"sparse": (cases.remade(kjt), index)}, batch.labels)


class SkipsByHand(ByHand, Skips):
    """A backward for each collection: the second collection is called after the backward of the first one."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = []
        for collection in self.case.collections:
            found = self.embeddings(collection, batch)
            tables = self.case.collections[collection]
            pooled = sum(self._pool(found, table, feature).sum(1) for table in tables for feature in table.features)
            logits = self.bottom(batch.dense).sum(1) + self.top[2].bias + pooled
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            loss = loss + 0 * sum(p.sum() for p in self.top.parameters())
            self.manual_backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        self.losses.append(torch.stack(losses).sum())


class _Data(Batches):
    def val_dataloader(self) -> Any:
        return self.loader_of(range(4))


def train(case: str, skip: Skip, pipeline: str, *, by_hand: bool = False, validates: bool = False) -> Any:
    """Train on this rank; return the losses, the number of early lookups and so on (`caller_fits.fit`)."""
    module = (SkipsByHand if by_hand else Skips)(CASES[case], skip)
    plan = make_plan(module.case, module, dist.get_world_size())
    batches = 4 if validates else 0
    return caller_fits.fit(module, plan, _Data(module.case, NUM_STEPS), pipeline, limit_val_batches=batches)


def losses(*args: Any, **kwargs: Any) -> Tensor:
    losses: Tensor = train(*args, **kwargs).result.losses
    return losses


def main(folder: str, case: str, pipeline: str, **skip: Any) -> None:
    """Train this rank of a run whose ranks may wait for each other longer than the test does."""
    torch.set_num_threads(1)
    skip = {name: tuple(value) if isinstance(value, list) else value for name, value in skip.items()}
    module = Skips(CASES[case], Skip(**skip))
    strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise", timeout=timedelta(seconds=300))
    quiet = {**QUIET, "default_root_dir": folder}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, datamodule=Batches(module.case, NUM_STEPS))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
