"""Modules whose steps change, take or make their inputs, and batches whose layout differs. Functions that ranks run.

A function `made(case, index, rank)` makes the batches of the module, or of the kind of batches, with its name.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from ..support.cases import BATCH_SIZE, Batch, Case, Model, make_batch


def kjt_of(batch: Any) -> KeyedJaggedTensor:
    return batch.inputs["sparse"][0]


def with_ids(kjt: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), ids, lengths=kjt.lengths())


def with_input(batch: Batch, kjt: KeyedJaggedTensor) -> Batch:
    return replace(batch, inputs={"sparse": (kjt, batch.inputs["sparse"][1])})


class OwnClass:
    """A batch class of a user's own, with the input somewhere inside."""

    def __init__(self, batch: Batch) -> None:
        self.parts = {"x": (batch.dense, [kjt_of(batch)]), "labels": batch.labels}

    def to(self, *args: Any) -> Any:
        return self


class TakesOwnClass(Model):
    def training_step(self, batch: OwnClass, batch_idx: int) -> Tensor:
        dense, [kjt] = batch.parts["x"]
        return super().training_step(Batch(dense, {"sparse": (kjt, batch_idx)}, batch.parts["labels"]), batch_idx)


def takes_own_class(case: Case, index: int, rank: int) -> OwnClass:
    return OwnClass(make_batch(case, index, rank))


class HashesInPlace(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kjt_of(batch).values().remainder_(50)
        return super().training_step(batch, batch_idx)


def hashes_raw_ids(case: Case, index: int, rank: int) -> Batch:
    """Return a batch with ids of no row, which the step makes numbers of rows."""
    batch = make_batch(case, index, rank)
    kjt_of(batch).values().add_(120_000)
    return batch


class WeighsInPlace(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kjt_of(batch).weights().mul_(0.5)
        return super().training_step(batch, batch_idx)


class ShiftsLengths(Model):
    """Gives each feature the lengths of the feature before it: each rank is sent another number of ids."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        lengths = kjt_of(batch).lengths().view(len(kjt_of(batch).keys()), -1)
        lengths.copy_(lengths.roll(1, 0))
        return super().training_step(batch, batch_idx)


class HashesSometimes(Model):
    """From batch 4 on, on all ranks alike; rank 0 is late then, by more than a rank looks for others."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 4:
            time.sleep(1.5 * (self.global_rank == 0))
        if batch_idx >= 4:
            kjt_of(batch).values().remainder_(50)
        return super().training_step(batch, batch_idx)


class ReadsIds(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * kjt_of(batch).values().sum()


class OneOfTwoTasks(Model):
    """A batch has the ids of one of two tasks, or of both: which ones differs by rank, and so does the one in use."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        sparse = (batch[batch["use"]], batch_idx)
        return super().training_step(Batch(batch["dense"], {"sparse": sparse}, batch["labels"]), batch_idx)


def one_of_two_tasks(case: Case, index: int, rank: int) -> dict[str, Any]:
    batch = make_batch(case, index, rank)
    use = "a" if index < 3 or (index + rank) % 2 else "b"
    return {use: kjt_of(batch), "dense": batch.dense, "labels": batch.labels, "use": use}


def two_tasks_at_once(case: Case, index: int, rank: int) -> dict[str, Any]:
    batch, other = make_batch(case, index, rank), make_batch(case, 100 + index, rank)
    use = "b" if index == 5 and rank == 0 else "a"
    rest = {"dense": batch.dense, "labels": batch.labels, "use": use}
    return {use: kjt_of(batch), "b" if use == "a" else "a": kjt_of(other), **rest}


def types_differ(case: Case, index: int, rank: int) -> Batch:
    """Return a batch whose ids are of int32 on rank 1."""
    batch = make_batch(case, index, rank)
    kjt = kjt_of(batch)
    return with_input(batch, with_ids(kjt, kjt.values().int())) if rank == 1 else batch


def types_differ_later(case: Case, index: int, rank: int) -> Batch:
    return types_differ(case, index, rank if index >= 4 else 0)


types_differ_later_replicated = types_differ_later


def types_change(case: Case, index: int, rank: int) -> Batch:
    return types_differ(case, index, int(index >= 4))  # on all ranks


class TwoTypesInAStep(Model):
    """Rank 1 comes to the second call of the first step late, by more than a rank looks for others."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt, module = kjt_of(batch), getattr(self, collection)
        first = module(kjt).to_dict()
        if not self.losses and dist.get_rank() == 1:
            time.sleep(2.5)
        second = module(with_ids(kjt, kjt.values().int())).to_dict()
        return {key: first[key] + second[key] for key in first}


class MakesOtherTypes(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt = kjt_of(batch)
        values = kjt.values().int() if dist.get_rank() == 1 else kjt.values()
        return getattr(self, collection)(with_ids(kjt, values))


def _wrong(change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> Callable[[Case, int, int], Batch]:
    """Return a function that makes batches of which batch 3 of the last rank is changed."""

    def made(case: Case, index: int, rank: int) -> Batch:
        batch = make_batch(case, index, rank)
        is_wrong = index == 3 and rank == dist.get_world_size() - 1
        return with_input(batch, change(kjt_of(batch))) if is_wrong else batch

    return made


def with_id(number: int) -> Callable[[Case, int, int], Batch]:
    """Give the second feature this id."""

    def change(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        kjt.values()[kjt.lengths()[:BATCH_SIZE].sum()] = number
        return kjt

    return _wrong(change)


too_large = too_large_by_rows = with_id(1000)
negative, row_0 = with_id(-1), with_id(0)
floating = _wrong(lambda kjt: with_ids(kjt, kjt.values().float()))


def half_weights(case: Case, index: int, rank: int) -> Batch:
    batch = make_batch(case, index, rank)
    kjt = kjt_of(batch)
    halves = KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths(), weights=kjt.weights().half())
    return with_input(batch, halves)


no_weights = _wrong(lambda kjt: with_ids(kjt, kjt.values()))


def _parts(values: int, lengths: int, weights: int | None = None) -> Callable[[KeyedJaggedTensor], KeyedJaggedTensor]:
    """Leave out so many of the last values, lengths and weights."""

    def change(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        own = None if weights is None else kjt.weights()[: len(kjt.weights()) - weights]
        kept = kjt.values()[: len(kjt.values()) - values], kjt.lengths()[: len(kjt.lengths()) - lengths]
        return KeyedJaggedTensor(kjt.keys(), kept[0], lengths=kept[1], weights=own)

    return _wrong(change)


too_few_ids = too_few_ids_by_rows = _parts(2, 0)
too_few_lengths, one_length_less, too_few_weights = _parts(0, 3), _parts(0, 1), _parts(0, 0, 2)
