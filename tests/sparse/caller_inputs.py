"""Modules whose steps change, take or make their inputs, and batches whose layout differs. Functions that ranks run."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor

from ..support.cases import Batch, Case, Model, make_batch


def kjt_of(batch: Any) -> KeyedJaggedTensor:
    return batch.inputs["sparse"][0]


def fresh(case: Case, index: int, rank: int) -> Batch:
    """Return a batch whose tensors nobody else holds, so that a step may write them."""
    batch = make_batch(case, index, rank)
    kjt, number = batch.inputs["sparse"]
    weights = None if kjt.weights_or_none() is None else kjt.weights().clone()
    own = KeyedJaggedTensor(kjt.keys(), kjt.values().clone(), weights=weights, lengths=kjt.lengths().clone())
    return Batch(batch.dense.clone(), {"sparse": (own, number)}, batch.labels.clone())


class HashesInPlace(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kjt_of(batch).values().remainder_(50)
        return super().training_step(batch, batch_idx)


class WeighsInPlace(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        kjt_of(batch).weights().mul_(0.5)
        return super().training_step(batch, batch_idx)


def shift_lengths(batch: Batch) -> Batch:
    """Give each feature the lengths of the feature before it, in place: each rank is sent another number of ids."""
    lengths = kjt_of(batch).lengths().view(len(kjt_of(batch).keys()), -1)
    lengths.copy_(lengths.roll(1, 0))
    return batch


class ShiftsLengths(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(shift_lengths(batch), batch_idx)


class ShiftsLengthsInHook(Model):
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return shift_lengths(batch)


class TakesOut(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(batch.inputs.pop("sparse")[0])


class HashesSometimes(Model):
    """From batch 4 on, on all ranks alike; rank 0 is late then, by more than a rank looks for others."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 4:
            time.sleep(1.5 * (self.global_rank == 0))
        if batch_idx >= 4:
            kjt_of(batch).values().remainder_(50)
        return super().training_step(batch, batch_idx)


class OneOfTwoTasks(Model):
    """A batch has the ids of one of two tasks, or of both: which ones differs by rank, and so does the one in use."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        kjt = batch[batch["use"]]
        loss = self(Batch(batch["dense"], {"sparse": (kjt, batch_idx)}, batch["labels"]))
        self.losses.append(loss.detach().clone())
        return loss


def one_of_two_tasks(case: Case, index: int, rank: int) -> dict[str, Any]:
    batch = fresh(case, index, rank)
    use = "a" if index < 3 or (index + rank) % 2 else "b"
    return {use: kjt_of(batch), "dense": batch.dense, "labels": batch.labels, "use": use}


def two_tasks_at_once(case: Case, index: int, rank: int) -> dict[str, Any]:
    batch, other = fresh(case, index, rank), fresh(case, 100 + index, rank)
    use = "b" if index == 5 and rank == 0 else "a"
    rest = {"dense": batch.dense, "labels": batch.labels, "use": use}
    return {use: kjt_of(batch), "b" if use == "a" else "a": kjt_of(other), **rest}


def types_differ(case: Case, index: int, rank: int) -> Batch:
    """Return a batch whose ids are of int32 on rank 1."""
    batch = fresh(case, index, rank)
    kjt, number = batch.inputs["sparse"]
    values = kjt.values().int() if rank == 1 else kjt.values()
    own = KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths())
    return Batch(batch.dense, {"sparse": (own, number)}, batch.labels)


def weights_on_one_rank(case: Case, index: int, rank: int) -> Batch:
    """Return a batch whose ids have weights on rank 1, which nobody reads."""
    batch = fresh(case, index, rank)
    kjt, number = batch.inputs["sparse"]
    weights = torch.ones(len(kjt.values())) if rank == 1 else None
    own = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights=weights, lengths=kjt.lengths())
    return Batch(batch.dense, {"sparse": (own, number)}, batch.labels)


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
        second = module(KeyedJaggedTensor(kjt.keys(), kjt.values().int(), lengths=kjt.lengths())).to_dict()
        return {key: first[key] + second[key] for key in first}


class MakesOtherTypes(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt = kjt_of(batch)
        values = kjt.values().int() if dist.get_rank() == 1 else kjt.values()
        return getattr(self, collection)(KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths()))
