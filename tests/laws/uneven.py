"""Ranks with unequal data, ranks that are told to stop. Functions that ranks run."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_overlap import combined_optimizer
from lightning_overlap.distributed import Consensus, skipped_batches

from ..support.cases import TABLE_WISE, Batch, Batches, Model, dense_optimizer, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
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
    """Writes down what was trained, and when it was validated."""

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


def train(pipeline: str, lengths: tuple[int, ...], sized: bool, **kwargs: Any) -> tuple[list[Any], list[str]]:
    """Two epochs; return what was trained and what was said."""
    model = Counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(model, Uneven(lengths, sized), pipeline, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
    said = [str(warning.message) for warning in caught if "another rank" in str(warning.message)]
    return model.seen, said


def train_past_nones(
    pipeline: str, lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], **kwargs: Any
) -> tuple[Any, int]:
    """One epoch without lengths, or more; return the batches that were trained, and how often the ranks were asked."""
    model = Counts()
    with (
        mock.patch.object(Consensus, "ask", autospec=True, side_effect=Consensus.ask) as ask,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        _fit(model, Uneven(lengths, False, nones), pipeline, limit_val_batches=0, **kwargs)
    return [batch for _, _, batch, _ in model.seen], ask.call_count


def train_and_validate_past_nones(
    pipeline: str, lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], sized: bool, **kwargs: Any
) -> list[Any]:
    """Two epochs; return the batches that were trained, and where it was validated."""
    model = Counts()
    with mock.patch.object(skipped_batches, "WAIT_S", 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fit(model, Uneven(lengths, sized, nones), pipeline, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
    return [one if one == "validation" else one[2] for one in model.seen]


class Decays(Counts):
    """Its learning rates, those of the tables too, fall after a step of the scheduler, or after each so many."""

    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency = frequency

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


def decay_past_nones(
    pipeline: str,
    lengths: tuple[int, ...],
    nones: tuple[tuple[int, ...], ...],
    k: int,
    frequency: int,
    *,
    sized: bool = False,
    **kwargs: Any,
) -> Result:
    """Train with rates that a scheduler moves."""
    model = Decays(frequency)
    trainer = make_trainer(make_strategy(model, pipeline), limit_val_batches=0, accumulate_grad_batches=k, **kwargs)
    with mock.patch.object(skipped_batches, "WAIT_S", 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Uneven(lengths, sized, nones))
    return collect(model, trainer.optimizers[0], model.losses)


def decay_by_hand(steps: list[tuple[int, tuple[list[int], ...]]], k: int) -> Result:
    """The same in a loop by hand; `steps` has how often the scheduler has stepped before each, and each rank's batches.

    With k batches for a step.
    """
    mine = [Window(tuple(window[dist.get_rank()]), k) for _, window in steps]
    return train_windows(TABLE_WISE, mine, updates_in_backward=True, factor=lambda step: 0.5 ** steps[step][0])


def accumulate_past_nones(
    pipeline: str,
    lengths: tuple[int, ...],
    nones: tuple[tuple[int, ...], ...],
    windows: list[tuple[list[int], ...]],
    k: int,
    *,
    sized: bool = False,
    frozen_window: bool = False,
    **kwargs: Any,
) -> tuple[list[str], int]:
    """Train with k batches for an optimizer step; return what differs from the loop by hand, and the steps.

    `windows` has each rank's batches of each step.
    """
    model = Counts()
    strategy = make_strategy(model, pipeline, frozen_window=frozen_window)
    trainer = make_trainer(strategy, limit_val_batches=0, accumulate_grad_batches=k, **kwargs)
    with mock.patch.object(skipped_batches, "WAIT_S", 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Uneven(lengths, sized, nones))
    mine = [Window(tuple(window[trainer.global_rank]), k) for window in windows]
    by_hand = train_windows(TABLE_WISE, mine, updates_in_backward=not frozen_window)
    result = collect(model, trainer.optimizers[0], model.losses)
    return result.differences(by_hand), trainer.global_step


class Terminated(Counts):
    """One rank gets SIGTERM in the middle of a step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 5 and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def terminate(pipeline: str, rank: int, sized: bool) -> int:
    """Send one rank SIGTERM in step 5 of many; return how many this rank trained."""
    model = Terminated(rank)
    try:
        _fit(model, Uneven((200, 200), sized), pipeline)
    except SIGTERMException:
        return len(model.seen)
    raise AssertionError("nobody was told")


class _BreaksOff:
    """A dataset that ends before its length."""

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


def break_off() -> str:
    """Train with a loader that ends before its length, on every rank; return what is said."""
    try:
        _fit(Counts(), _BreakingOff(TABLE_WISE), "fused_sparse_dist")
    except RuntimeError as error:
        return str(error)
    return "nothing was said"
