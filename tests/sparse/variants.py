"""Modules and batches that make it hard to know which input feeds which module. Functions that ranks run."""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from ..support.cases import Batch, Batches, ByHand, Case, Model, make_batch, remade
from . import caller_inputs
from .caller_inputs import kjt_of, with_ids, with_input


class Variant(Batches):
    """Batches that a function of `caller_inputs` with the kind's name makes, if there is one."""

    def __init__(self, case: Any, kind: str, num_batches: int) -> None:
        super().__init__(case, num_batches)
        self.make = getattr(caller_inputs, kind, make_batch)

    def val_dataloader(self) -> DataLoader:
        return self.loader_of(range(500, 502))


class GivesTensorDict(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        parts = {
            key: torch.nested.nested_tensor_from_jagged(part.values(), part.offsets())
            for key, part in kjt_of(batch).to_dict().items()
        }
        return getattr(self, collection)(TensorDict(parts, batch_size=[len(batch.labels)]))


class OtherIdsFrom5(Model):
    """From batch 5 on, changes the ids inside training_step: early embeddings would be wrong."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt, index = batch.inputs["sparse"]
        return getattr(self, collection)(with_ids(kjt, (kjt.values() + 1) % 100) if index >= 5 else kjt)


class CalledTwice(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        module = getattr(self, collection)
        first, second = module(kjt_of(batch)), module(remade(kjt_of(batch)))
        return {feature: first[feature] + 0.5 * second[feature] for feature in self.case.all_features}


def no_embeddings(case: Case, collection: str, batch: Batch) -> Any:
    dim = case.collections[collection][0].dim
    return defaultdict(lambda: torch.zeros(len(batch.labels), dim))


class NotAlwaysCalled(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        if collection == "second" and batch.inputs["sparse"][1] % 3 == 2:
            return no_embeddings(self.case, collection, batch)
        return super().embeddings(collection, batch)


class Keyword(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(features=kjt_of(batch))


class MadeInHook(Model):
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return with_input(batch, remade(kjt_of(batch)))


class Manual(ByHand, Model):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.go_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def go_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice in every other step, as LBFGS does."""

    num = 0

    def step(self, closure: Any = None) -> Any:
        self.num += 1
        if self.num % 2:
            closure()
        return super().step(closure)


class TwoClosures(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Twice([*self.bottom.parameters(), *self.top.parameters()], 0.1)


class StepsOverNone(Model):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 2 else loss


class OneRankDiffers(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt, index = batch.inputs["sparse"]
        return getattr(self, collection)(remade(kjt) if (index, self.global_rank) == (3, 1) else kjt)


class TakesParts(Model):
    """Gives each collection its own input; leaves a collection out that has none: batch 4 of rank 1 lacks one."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        second = None if (batch.inputs["sparse"][1], self.global_rank) == (4, 1) else remade(kjt_of(batch))
        return replace(batch, inputs={"ebc": kjt_of(batch), "second": second})

    def embeddings(self, collection: str, batch: Batch) -> Any:
        if batch.inputs[collection] is None:
            return self.without_an_input(collection, batch)
        return getattr(self, collection)(batch.inputs[collection])

    def without_an_input(self, collection: str, batch: Batch) -> Any:
        return no_embeddings(self.case, collection, batch)


class MakesAnEmptyPart(TakesParts):
    def without_an_input(self, collection: str, batch: Batch) -> Any:
        keys, none = list(self.case.all_features), torch.zeros(0, dtype=torch.int64)
        lengths = torch.zeros(len(keys) * len(batch.labels), dtype=torch.int64)
        return getattr(self, collection)(KeyedJaggedTensor(keys, none, lengths=lengths))


def by_name(namespace: dict[str, Any]) -> dict[str, type[Model]]:
    """Return the modules of a namespace by their names in tests: `made_in_hook` of `MadeInHook`."""
    classes = [one for one in namespace.values() if isinstance(one, type) and issubclass(one, Model)]
    return {re.sub(r"(?<!^)(?=[A-Z0-9])", "_", cls.__name__).lower(): cls for cls in classes}
