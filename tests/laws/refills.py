"""Loaders that fill the memory of a batch anew for a later one, and fits with them. Functions that ranks run."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_overlap.tuning import Auto

from ..support.cases import BATCH_SIZE, NUM_DENSE, WEIGHTED, Batch, Batches, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

CASE = WEIGHTED
NUM = 16
AUTO = Auto(warm_up=1, settle=1, block=1, rounds=1)


class Kind(NamedTuple):
    what: str  # `ring`: buffers in turn; `chunk`: one buffer for several batches; `same`: one object for all batches
    num: int = 1  # of batches that it holds at once
    by_numpy: bool = False  # whether NumPy has allocated it

    def __str__(self) -> str:
        return f"{self.what}{self.num}{'_numpy' * self.by_numpy}"


RINGS = tuple(Kind("ring", num) for num in (1, 2, 3, 4))
KINDS = (*RINGS, Kind("chunk", 6), Kind("chunk", 6, by_numpy=True), Kind("same"))


class _Memory:
    """Room for so many batches, one behind the other."""

    def __init__(self, num: int, by_numpy: bool) -> None:
        samples = BATCH_SIZE * len(CASE.all_features)
        ints, floats = (np.int64, np.int64), (np.float32, np.float32, np.float32)
        sizes = (samples, 3 * samples, 3 * samples, BATCH_SIZE * NUM_DENSE, BATCH_SIZE)
        rooms = [np.zeros(num * size, kind) for size, kind in zip(sizes, ints + floats, strict=True)]
        self._rooms = [room if by_numpy else torch.tensor(room) for room in rooms]
        self._num = num

    def fill(self, place: int, batch: Batch) -> Batch:
        """Put a batch in a place, and return what shows it."""
        kjt, index = batch.inputs["sparse"]
        shown = []
        values = (kjt.lengths(), kjt.values(), kjt.weights(), batch.dense.flatten(), batch.labels)
        for room, value in zip(self._rooms, values, strict=True):
            start = place * (len(room) // self._num)
            part = torch.as_tensor(room[start : start + len(value)])  # shares the memory
            shown.append(part.copy_(value))
        lengths, ids, weights, dense, labels = shown
        inputs = {"sparse": (KeyedJaggedTensor(kjt.keys(), ids, weights, lengths), index)}
        return Batch(dense.view(-1, NUM_DENSE), inputs, labels)


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
                vars(same).update(vars(filled))
            yield same if kind.what == "same" else filled


class _Sized(_Loader):
    def __len__(self) -> int:
        return self.num


class Refilled(Batches):
    def __init__(self, kind: Kind, sized: bool, num: int) -> None:
        super().__init__(CASE)
        self.kind, self.sized, self.num = kind, sized, num

    def _loader(self, first: int, num: int) -> Any:
        return (_Sized if self.sized else _Loader)(self.kind, num, first, self.trainer.global_rank)

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


def _fit(data: Refilled, pipeline: str, options: dict[str, Any], **kwargs: Any) -> tuple[Validates, Trainer]:
    model = Validates()
    strategy = make_strategy(model, AUTO if pipeline == "auto" else pipeline, **options)
    trainer = make_trainer(strategy, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*accumulates dense gradients only")
        trainer.fit(model, datamodule=data)
    return model, trainer


def train(kind: Kind, pipeline: str, sized: bool, data: type[Refilled] = Refilled, **kwargs: Any) -> Result:
    model, trainer = _fit(data(kind, sized, NUM), pipeline, {}, limit_val_batches=0, **kwargs)
    return collect(model, trainer.optimizers[0], model.losses)


def validate(kind: Kind, pipeline: str, sized: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Train with validations; return what these found, and what the model in their place finds batch by batch."""
    model, trainer = _fit(Refilled(kind, sized, 4), pipeline, {}, num_sanity_val_steps=0)
    rank, found = trainer.global_rank, model.found
    batches = [make_batch(CASE, index, rank) for index in (*range(100, 107), *range(200, 203))]
    with torch.no_grad():
        return found, [model(batch) for batch in batches]
