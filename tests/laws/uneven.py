"""Ranks with unequal data, ranks that are told to stop. Functions that ranks run."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.distributed import Answer, Consensus, StepFlags, skipped_batches

from ..support.cases import NUM_ROWS, TABLE_WISE, Batch, Batches, Model, make_batch, make_plan
from ..support.fits import make_trainer
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


def train(pipeline: str, lengths: tuple[int, ...], sized: bool, **kwargs: Any) -> tuple[list[Any], list[str]]:
    """Two epochs; return what was trained and what was said."""
    model = Counts()
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    trainer = make_trainer(strategy, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=Uneven(lengths, sized))
    said = [str(warning.message) for warning in caught if "another rank" in str(warning.message)]
    return model.seen, said


def train_past_nones(
    pipeline: str, lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], **kwargs: Any
) -> tuple[Any, int]:
    """One epoch without lengths, or more; return the batches that were trained, and how often the ranks were asked."""
    model, num_asked = Counts(), 0
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    ask = Consensus.ask

    def counted(self: Consensus, flags: StepFlags) -> Answer:
        nonlocal num_asked
        num_asked += 1
        return ask(self, flags)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Consensus, "ask", counted)
        make_trainer(strategy, limit_val_batches=0, **kwargs).fit(model, datamodule=Uneven(lengths, False, nones))
    return [batch for _, _, batch, _ in (one for one in model.seen if one != "validation")], num_asked


def train_and_validate_past_nones(
    pipeline: str, lengths: tuple[int, ...], nones: tuple[tuple[int, ...], ...], sized: bool, **kwargs: Any
) -> list[Any]:
    """Two epochs; return the batches that were trained, and where it was validated."""
    model = Counts()
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(skipped_batches, "WAIT_S", 1)
        trainer = make_trainer(strategy, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
        trainer.fit(model, datamodule=Uneven(lengths, sized, nones))
    return [one if one == "validation" else one[2] for one in model.seen]


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
    model, rank = Counts(), dist.get_rank()
    plan = make_plan(TABLE_WISE, model, dist.get_world_size())
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan, frozen_window=frozen_window)
    trainer = make_trainer(strategy, limit_val_batches=0, accumulate_grad_batches=k, **kwargs)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(skipped_batches, "WAIT_S", 1)
        trainer.fit(model, datamodule=Uneven(lengths, sized, nones))
    mine = [Window(tuple(window[rank]), k) for window in windows]
    by_hand = train_windows(TABLE_WISE, mine, updates_in_backward=not frozen_window)
    result = collect(model, trainer.optimizers[0], model.losses)
    return result.differences(by_hand), trainer.global_step


class _Ring:
    """Fills the same buffers anew, one after the other, as readers with pinned memory do; no length."""

    def __init__(self, rank: int, num_buffers: int) -> None:
        self.rank, self.num_buffers = rank, num_buffers

    def __iter__(self) -> Iterator[Batch]:
        features, buffers = list(TABLE_WISE.all_features), []
        for index in range(12):
            batch = make_batch(TABLE_WISE, index, self.rank)
            ids = torch.arange(2 * len(features) * len(batch.labels)) * (index + 1) % NUM_ROWS
            if index < self.num_buffers:
                buffers.append((ids, batch.dense, batch.labels))
            ids, dense, labels = (
                buffer.copy_(new)
                for buffer, new in zip(buffers[index % self.num_buffers], (ids, batch.dense, batch.labels), strict=True)
            )
            lengths = torch.full((len(features) * len(labels),), 2)
            yield Batch(dense, {"sparse": (KeyedJaggedTensor(features, ids, lengths=lengths), index)}, labels)


class _SizedRing(_Ring):
    def __len__(self) -> int:
        return 12


class _Ringed(Batches):
    """Batches are copied as they are staged, as to a device."""

    def __init__(self, num_buffers: int, sized: bool) -> None:
        super().__init__(TABLE_WISE)
        self.num_buffers, self.sized = num_buffers, sized

    def train_dataloader(self) -> Any:
        return (_SizedRing if self.sized else _Ring)(self.trainer.global_rank, self.num_buffers)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return copy.deepcopy(batch)


def train_from_ring(pipeline: str, num_buffers: int, sized: bool) -> torch.Tensor:
    """Return the losses of a fit whose loader has so many buffers."""
    model = Counts()
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    make_trainer(strategy, limit_val_batches=0).fit(model, datamodule=_Ringed(num_buffers, sized))
    return torch.stack(model.losses)


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
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    try:
        make_trainer(strategy).fit(model, datamodule=Uneven((200, 200), sized))
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
    model = Counts()
    strategy = OverlapEmbeddingStrategy(sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    try:
        make_trainer(strategy).fit(model, datamodule=_BreakingOff(TABLE_WISE))
    except RuntimeError as error:
        return str(error)
    return "nothing was said"
