"""Fits that accumulate gradients. Functions that ranks run."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..checkpoint.resumes import StatefulSized
from ..sparse.update_rates import Scheduled
from ..support import cases
from ..support.cases import NUM_STEPS, TABLE_WISE, Batch, Batches, Case, Model, TableSpec, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

ALL_KINDS = Case(
    "all_kinds",
    (
        TableSpec("t0", ("f0",)),
        TableSpec("t1", ("f1", "f0")),
        TableSpec("wide", ("w",), "column_wise", dim=16),
        TableSpec("rows", ("f2",), "row_wise"),
        TableSpec("d0", ("f1",), "data_parallel"),
        TableSpec("u0", ("f1", "f2"), collection="second"),
    ),
)
"""Table-, column- and row-wise, data-parallel, and two collections."""


class _Stream(IterableDataset):
    def __init__(
        self, num: int, rank: int, nones: tuple[int, ...] = (), case: Case = TABLE_WISE, first: int = 0
    ) -> None:
        self.numbers, self.rank, self.nones, self.case = range(first, first + num), rank, nones, case

    def __iter__(self) -> Iterator[Batch | None]:
        for index in self.numbers:
            yield None if index in self.nones else make_batch(self.case, index, self.rank)


class Data(Batches):
    """So many batches on each rank, these of them None; with or without a length."""

    def __init__(
        self, case: Case, *lengths: int, stateful: bool = False, nones: tuple[int, ...] = (), sized: bool = True
    ) -> None:
        super().__init__(case)
        self.lengths, self.stateful, self.nones, self.sized = lengths, stateful, nones, sized

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        length = self.lengths[rank % len(self.lengths)]
        if self.stateful:
            return StatefulSized(self.case, length, rank)
        first = self.trainer.current_epoch * length  # no two batches alike where loaders are made anew
        stream = _Stream(length, rank, self.nones, self.case, first)
        return DataLoader(list(stream) if self.sized else stream, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(list(_Stream(2, self.trainer.global_rank, (), self.case, 100)), batch_size=None)


class Manual(cases.ByHand, Model):
    pass


EXPECTED = ("another rank", "not overlapped", "train_dataloader yielded None", "accumulates dense gradients only")
MODELS: dict[str, type[Model]] = {
    "plain": Model,
    "makes_input": cases.MakesInput,
    "scheduled": Scheduled,
    "manual": Manual,
}


def train(
    case: Case,
    k: int,
    *,
    pipeline: str = "fused_sparse_dist",
    model: str = "plain",
    lengths: tuple[int, ...] = (NUM_STEPS,),
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> Result:
    """Train, k batches for each optimizer step; every warning but those of uneven ranks is an error."""
    module = MODELS[model](case)
    strategy = make_strategy(module, pipeline, **(options or {}))
    trainer = make_trainer(strategy, accumulate_grad_batches=k, **kwargs)
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message=f".*{message}")
        trainer.fit(module, datamodule=Data(case, *lengths, **(data or {})), ckpt_path=ckpt_path)
    return collect(module, trainer.optimizers[0], module.losses or [torch.zeros(())])
