"""Ranks with unequal data, ranks that are told to stop. Functions that ranks run."""

import signal
import warnings
from contextlib import suppress
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from ..sparse.update_rates import TWO_RATES, factor
from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.windows import Window, train_windows
from . import accumulated
from .accumulated import Data, _Stream
from .faults import Fault, Faulty

Nones = tuple[tuple[int, ...], ...]  # of each rank: the batches that are None


class Uneven(Data):
    """Batches that are None on one rank and not on another."""

    def __init__(self, lengths: tuple[int, ...], sized: bool, nones: Nones = ((), ())) -> None:
        super().__init__(TABLE_WISE, *lengths, sized=sized)
        self.of_ranks = nones

    def train_dataloader(self) -> Any:
        self.nones = self.of_ranks[self.trainer.global_rank]
        return super().train_dataloader()


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


def _fit(model: Model, data: Batches, pipeline: str, **kwargs: Any) -> None:
    make_trainer(make_strategy(model, pipeline), **kwargs).fit(model, datamodule=data)


def train(
    pipeline: str, lengths: tuple[int, ...], sized: bool, nones: Nones = ((), ()), **kwargs: Any
) -> tuple[list[Any], list[str]]:
    """Two epochs; return what was trained and what was said."""
    model = Counts()
    with warnings.catch_warnings(record=True, action="always") as caught:
        _fit(model, Uneven(lengths, sized, nones), pipeline, **{"max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})
    said = [str(warning.message) for warning in caught if "another rank" in str(warning.message)]
    return model.seen, said


class _EmptyInAnEpoch(Data):
    """From epoch `since` on rank 1 has no batches; with `allowed`, Lightning's flag says that it may."""

    def __init__(self, since: int, allowed: bool, sized: bool) -> None:
        super().__init__(TABLE_WISE, 5, sized=sized)
        self.since, self.allow_zero_length_dataloader_with_multiple_devices = since, allowed

    def train_dataloader(self) -> Any:
        self.lengths = 5, 5 if self.trainer.current_epoch < self.since else 0
        return super().train_dataloader()


def train_without_batches(pipeline: str, since: int, allowed: bool, sized: bool = False) -> tuple[int, str, list[str]]:
    """Return how many batches were trained in two epochs, the error, and what was said about ranks without batches."""
    model, failed = Counts(), ""
    kwargs = {"max_epochs": 2, "num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1}
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            _fit(model, _EmptyInAnEpoch(since, allowed, sized), pipeline, **kwargs)
        except RuntimeError as error:
            failed = str(error)
    said = [str(one.message) for one in caught if "no batch in epoch" in str(one.message)]
    return len([one for one in model.seen if one != "validation"]), failed, said


def accumulate(pipeline: str, sized: bool) -> list[str]:
    """Skip batches 1 and 7 of nine; return what differs from the loop by hand with these windows."""
    steps = [Window(batches, 3) for batches in ((0, 2), (3, 4, 5), (6, 8))]
    kwargs = {"data": {"nones": (1, 7), "sized": sized}}
    result = accumulated.train(TWO_RATES, 3, pipeline=pipeline, model="scheduled", lengths=(9,), **kwargs)
    return result.differences(train_windows(TWO_RATES, steps, factor=factor))


def terminate(pipeline: str, rank: int, sized: bool) -> int:
    """Send a signal to a rank; return after how many batches this one ends."""
    model = Faulty(TABLE_WISE, Fault("training_step", 5, (rank,), signal.SIGTERM))
    with suppress(SIGTERMException):
        _fit(model, Uneven((200, 200), sized), pipeline)
        raise AssertionError("nobody was told")
    return len(model.losses)


class _BreaksOff(list[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: Any) -> Any:
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


class _BreakingOff(Batches):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(_BreaksOff(_Stream(5, self.trainer.global_rank)), batch_size=None)


def break_off(pipeline: str) -> str:
    """Train with a loader that ends before its length, on every rank; return what is said."""
    try:
        _fit(Counts(), _BreakingOff(TABLE_WISE), pipeline)
    except RuntimeError as error:
        return str(error)
    return "nothing was said"
