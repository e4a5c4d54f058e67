"""Loaders that fill the memory of a batch anew for a later one, and fits with them. Functions that ranks run."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime.batch_memory import BatchMemory
from lightning_overlap.tuning import Auto

from ..support.cases import BATCH_SIZE, WEIGHTED, Batch, Batches, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from ..support.reference import train as train_plain

CASE = WEIGHTED
NUM = 16
AUTO = Auto(warm_up=1, settle=1, block=1, rounds=1)


class Kind(NamedTuple):
    what: str  # `ring`: buffers in turn; `chunk`: one buffer for several batches; `same`: one object for all batches
    num: int = 1  # of batches that it holds at once
    by_numpy: bool = False  # whether NumPy has allocated it
    wrapped: bool = False  # whether a DataLoader stands between

    def __str__(self) -> str:
        return f"{self.what}{self.num}{'_numpy' * self.by_numpy}{'_wrapped' * self.wrapped}"


KINDS = (
    *(Kind("ring", num) for num in (1, 2, 3, 4)),
    Kind("ring", 2, by_numpy=True, wrapped=True),
    Kind("chunk", 6),
    Kind("chunk", 6, by_numpy=True),
    Kind("same"),
)


class _Memory:
    """Room for so many batches, one behind the other."""

    def __init__(self, num: int, by_numpy: bool) -> None:
        samples, ids = num * BATCH_SIZE, num * BATCH_SIZE * len(CASE.all_features) * 3
        self._lengths = _room((samples * len(CASE.all_features),), np.int64, by_numpy)
        self._ids, self._weights = _room((ids,), np.int64, by_numpy), _room((ids,), np.float32, by_numpy)
        self._dense, self._labels = _room((samples, 6), np.float32, by_numpy), _room((samples,), np.float32, by_numpy)
        self._num = num

    def fill(self, place: int, batch: Batch) -> Batch:
        """Put a batch in a place, and return what shows it."""
        kjt, index = batch.inputs["sparse"]

        def put(room: Any, value: Tensor) -> Tensor:
            start = place * (len(room) // self._num)
            room[start : start + len(value)] = value.numpy() if isinstance(room, np.ndarray) else value
            shown = room[start : start + len(value)]
            return torch.from_numpy(shown) if isinstance(shown, np.ndarray) else shown

        ids, weights = put(self._ids, kjt.values()), put(self._weights, kjt.weights())
        shown = KeyedJaggedTensor(kjt.keys(), ids, weights, put(self._lengths, kjt.lengths()))
        return Batch(put(self._dense, batch.dense), {"sparse": (shown, index)}, put(self._labels, batch.labels))


def _room(shape: tuple[int, ...], dtype: Any, by_numpy: bool) -> Any:
    array = np.zeros(shape, dtype)
    return array if by_numpy else torch.tensor(array)


class _Loader:
    def __init__(self, kind: Kind, num: int, first: int, rank: int) -> None:
        self.kind, self.num, self.first, self.rank = kind, num, first, rank
        ring = kind.what == "ring"
        self._memories = [_Memory(1 if ring else kind.num, kind.by_numpy) for _ in range(kind.num if ring else 1)]

    def __iter__(self) -> Iterator[Batch]:
        kind, same = self.kind, Batch(torch.empty(0), {}, torch.empty(0))
        batches = [make_batch(CASE, self.first + index, self.rank) for index in range(self.num)]
        if kind.what == "chunk":
            for start in range(0, self.num, kind.num):  # all of the chunk, before any of it is given
                chunk = enumerate(batches[start : start + kind.num])
                yield from [self._memories[0].fill(place, batch) for place, batch in chunk]
            return
        for index, batch in enumerate(batches):
            filled = self._memories[index % kind.num].fill(0, batch)
            if kind.what == "same":
                same.dense, same.labels = filled.dense, filled.labels
                same.inputs["sparse"] = filled.inputs["sparse"]
                filled = same
            yield filled


class _Sized(_Loader):
    def __len__(self) -> int:
        return self.num


class _Wrapped(IterableDataset):
    def __init__(self, loader: _Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)


class Refilled(Batches):
    def __init__(self, kind: Kind, sized: bool, num: int) -> None:
        super().__init__(CASE)
        self.kind, self.sized, self.num = kind, sized, num

    def _loader(self, first: int, num: int) -> Any:
        loader = (_Sized if self.sized else _Loader)(self.kind, num, first, self.trainer.global_rank)
        return DataLoader(_Wrapped(loader), batch_size=None) if self.kind.wrapped else loader

    def train_dataloader(self) -> Any:
        return self._loader(0, self.num)

    def val_dataloader(self) -> Any:
        return [self._loader(100, 7), self._loader(200, 3)]


class Copied(Refilled):
    """Batches are copied as they are staged, as to a device."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return copy.deepcopy(batch)


class Validates(Model):
    def __init__(self) -> None:
        super().__init__(CASE)
        self.found: list[Tensor] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> None:
        self.found.append(self(batch))


def _fit(data: Refilled, pipeline: str, options: Any = None, **kwargs: Any) -> tuple[Validates, Trainer]:
    model = Validates()
    strategy = make_strategy(model, AUTO if pipeline == "auto" else pipeline, **(options or {}))
    trainer = make_trainer(strategy, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*accumulates dense gradients only")
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer.fit(model, datamodule=data)
    return model, trainer


def train(
    kind: Kind,
    pipeline: str,
    sized: bool,
    options: dict[str, Any] | None = None,
    data: type[Refilled] = Refilled,
    **kwargs: Any,
) -> Result:
    model, trainer = _fit(data(kind, sized, NUM), pipeline, options, **{"limit_val_batches": 0, **kwargs})
    return collect(model, trainer.optimizers[0], model.losses)


def is_wrong_without_copies(kind: Kind, sized: bool) -> bool:
    """Train on batches as the loader gives them: return whether it fails, or what comes out is not what should."""
    try:
        with mock.patch.object(BatchMemory, "own", lambda self, batch: batch):
            result = train(kind, "fused_sparse_dist", sized)
    except (ValueError, RuntimeError):  # of TorchRec, of autograd
        return True
    return bool(result.differences(train_plain(CASE, num_steps=NUM)))


def validate(kind: Kind, pipeline: str, sized: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Train with validations; return what these found, and what the model in their place finds batch by batch."""
    model, trainer = _fit(Refilled(kind, sized, 4), pipeline, num_sanity_val_steps=0)
    rank, found = trainer.global_rank, model.found
    batches = [make_batch(CASE, index, rank) for index in (*range(100, 107), *range(200, 203))]
    with torch.no_grad():
        return found, [model(batch) for batch in batches]
