"""Ranks with unequal data, ranks that are told to stop. Functions that ranks run."""

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_overlap import combined_optimizer

from ..support.cases import TABLE_WISE, Batch, Batches, Model, dense_optimizer, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import collect
from ..support.windows import Window, train_windows


class _Stream(IterableDataset):
    def __init__(self, num: int, rank: int, nones: tuple[int, ...] = ()) -> None:
        self.num, self.rank, self.nones = num, rank, nones

    def __iter__(self) -> Iterator[Batch | None]:
        for index in range(self.num):
            yield None if index in self.nones else make_batch(TABLE_WISE, index, self.rank)


class Uneven(Batches):
    """So many batches on each rank, these of them None; with or without a length."""

    def __init__(self, lengths: tuple[int, ...], sized: bool, nones: tuple[tuple[int, ...], ...] = ((), ())) -> None:
        super().__init__(TABLE_WISE)
        self.lengths, self.sized, self.nones = lengths, sized, nones

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        stream = _Stream(self.lengths[rank], rank, self.nones[rank])
        return DataLoader(list(stream) if self.sized else stream, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(list(_Stream(2, self.trainer.global_rank)), batch_size=None)


class Counts(Model):
    def __init__(self) -> None:
        super().__init__(TABLE_WISE)
        self.seen: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None:
            return
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.seen.append((self.current_epoch, batch_idx, batch.inputs["sparse"][1], last))

    def on_validation_start(self) -> None:
        self.seen.append("validation")


def _fit(model: Counts, data: Batches, pipeline: str, **kwargs: Any) -> None:
    make_trainer(make_strategy(model, pipeline), **kwargs).fit(model, datamodule=data)


def train(
    pipeline: str,
    lengths: tuple[int, ...],
    sized: bool,
    nones: tuple[tuple[int, ...], ...] = ((), ()),
    **kwargs: Any,
) -> tuple[list[Any], list[str]]:
    """Two epochs; return what was trained and what was said."""
    model = Counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Uneven(lengths, sized, nones)
        _fit(model, data, pipeline, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
    said = [str(warning.message) for warning in caught if "another rank" in str(warning.message)]
    return model.seen, said


class Decays(Counts):
    """Its learning rates, also of its tables, halve with each step of the scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def accumulate(pipeline: str, sized: bool, frozen_window: bool) -> tuple[list[str], int]:
    """Skip batches 1 and 7 of nine; return what differs from the loop by hand with these windows, and their number."""
    steps = [Window(batches, 3) for batches in ((0, 2), (3, 4, 5), (6, 8))]
    model = Decays()
    strategy = make_strategy(model, pipeline, frozen_window=frozen_window)
    trainer = make_trainer(strategy, limit_val_batches=0, accumulate_grad_batches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Uneven((9, 9), sized, ((1, 7), (1, 7))))
    by_hand = train_windows(TABLE_WISE, steps, updates_in_backward=not frozen_window, factor=lambda step: 0.5**step)
    result = collect(model, trainer.optimizers[0], model.losses)
    return result.differences(by_hand), trainer.global_step


class Terminated(Counts):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 5 and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def terminate(pipeline: str, rank: int, sized: bool) -> int:
    model = Terminated(rank)
    try:
        _fit(model, Uneven((200, 200), sized), pipeline)
    except SIGTERMException:
        return len(model.seen)
    raise AssertionError("nobody was told")


class _BreaksOff:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Batch:
        if index == 5:
            raise StopIteration
        return make_batch(TABLE_WISE, index, self.rank)


class _BreakingOff(Batches):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(_BreaksOff(self.trainer.global_rank), batch_size=None)  # type: ignore[arg-type]


def break_off(pipeline: str) -> str:
    """Train with a loader that ends before its length, on every rank; return what is said."""
    try:
        _fit(Counts(), _BreakingOff(TABLE_WISE), pipeline)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"
