"""Modules and batches that make it hard to know which input feeds which module. Functions that ranks run."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import CacheParams

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables.supported_modules import why_never_early

from ..support.cases import (
    MIXED,
    ROWWISE_ADAGRAD,
    SEQUENCE,
    TABLE_WISE,
    TWO_COLLECTIONS,
    Batch,
    Batches,
    ByHand,
    Model,
    make_batch,
)
from ..support.fits import make_strategy, make_trainer
from .caller_inputs import kjt_of

NUM_STEPS = 12


class Tupled(NamedTuple):
    dense: Tensor
    sparse: Any
    labels: Tensor


class Plain:
    """A batch class of a user's own."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def to(self, device: torch.device) -> Plain:
        return self


STRUCTURES: dict[str, Any] = {
    "dataclass": lambda b: b,
    "namedtuple": lambda b: Tupled(b.dense, kjt_of(b), b.labels),
    "tuple": lambda b: (b.dense, kjt_of(b), b.labels),
    "list": lambda b: [b.dense, [kjt_of(b)], b.labels],
    "dict": lambda b: {"dense": b.dense, "sparse": kjt_of(b), "labels": b.labels},
    "nested": lambda b: {"x": (b.dense, Tupled(b.dense, {"ids": [kjt_of(b)]}, b.labels)), "y": [b.labels]},
    "own_class": Plain,
}


def _flatten(part: Any) -> list[Any]:
    if isinstance(part, Plain):
        part = part.batch
    if isinstance(part, Batch):
        return [part.dense, kjt_of(part), part.labels]
    if isinstance(part, (Tensor, KeyedJaggedTensor)):
        return [part]
    values = part.values() if isinstance(part, dict) else part
    return [leaf for value in values for leaf in _flatten(value)]


@dataclass
class Report:
    losses: Tensor
    early: int
    """Lookups whose early embeddings were used."""
    messages: list[str]


class Variant(Batches):
    def __init__(self, case: Any, structure: str, num_batches: int) -> None:
        super().__init__(case, num_batches)
        self.structure = structure

    def train_dataloader(self) -> DataLoader:
        wrap = STRUCTURES[self.structure]
        rank = self.trainer.global_rank
        return DataLoader([wrap(make_batch(self.case, i, rank)) for i in range(self.num_batches)], batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.case, 500 + i, self.trainer.global_rank) for i in range(2)], batch_size=None)


class AnyStructure(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        leaves = _flatten(batch)
        kjt = next(leaf for leaf in leaves if isinstance(leaf, KeyedJaggedTensor))
        return super().training_step(Batch(leaves[0], {"sparse": (kjt, batch_idx)}, leaves[-1]), batch_idx)


def _copy(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=kjt.keys(), values=kjt.values() * 1, lengths=kjt.lengths())


class MadeInStep(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(_copy(kjt_of(batch)))


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
        if index >= 5:
            kjt = KeyedJaggedTensor(keys=kjt.keys(), values=(kjt.values() + 1) % 100, lengths=kjt.lengths())
        return getattr(self, collection)(kjt)


class CalledTwice(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        module = getattr(self, collection)
        first, second = module(kjt_of(batch)), module(_copy(kjt_of(batch)))
        return {feature: first[feature] + 0.5 * second[feature] for feature in self.case.all_features}


class CalledTwiceLater(CalledTwice):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        if batch.inputs["sparse"][1] == 4:
            return super().embeddings(collection, batch)
        return Model.embeddings(self, collection, batch)


class NotAlwaysCalled(Model):
    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        embeddings = {
            name: self.embeddings(name, batch) for name in self.case.collections if not self._left_out(name, batch)
        }
        for name in self.case.collections.keys() - embeddings.keys():
            dim = self.case.collections[name][0].dim
            embeddings[name] = defaultdict(lambda dim=dim: torch.zeros(len(batch.labels), dim))
        return self.dense(batch, embeddings)

    def _left_out(self, name: str, batch: Batch) -> bool:
        return name == "second" and batch.inputs["sparse"][1] % 3 == 2


class Keyword(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(features=kjt_of(batch))


class MadeInHook(Model):
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        kjt, index = batch.inputs["sparse"]
        return Batch(batch.dense, {"sparse": (_copy(kjt), index)}, batch.labels)


class Manual(ByHand, Model):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class Twice(torch.optim.SGD):
    """Evaluates its closure twice per step, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
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
        if index == 3 and self.global_rank == 1:
            kjt = _copy(kjt)
        return getattr(self, collection)(kjt)


class Raises(Model):
    failed = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 5 and not self.failed:
            self.failed = True
            raise RuntimeError("the user's own error")
        return super().training_step(batch, batch_idx)


def by_name(namespace: dict[str, Any]) -> dict[str, type[Model]]:
    """Return the modules of a namespace by their names in tests: `made_in_step` of `MadeInStep`."""
    classes = [one for one in namespace.values() if isinstance(one, type) and issubclass(one, Model)]
    return {re.sub(r"(?<!^)(?=[A-Z0-9])", "_", cls.__name__).lower(): cls for cls in classes}


CASES = {"not_always_called": TWO_COLLECTIONS, "keyword": SEQUENCE, "plain": MIXED, "manual": MIXED}
_CLASSES = {**by_name(globals()), "plain": Model}
MODELS = {name: (cls, CASES.get(name, TABLE_WISE)) for name, cls in _CLASSES.items()}


def run(model: str, pipeline: str, structure: str = "dataclass", **trainer_kwargs: Any) -> Report:
    """Train a variant; report its losses, how many lookups came early, and what was said."""
    cls, case = MODELS[model]
    early = 0

    def observe(kind: str, stage: Any, batch: int) -> None:
        nonlocal early
        early += kind == "wait" and str(stage) == "embedding_lookup"

    module = cls(case)
    strategy = make_strategy(module, pipeline, observer=observe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, **{"limit_val_batches": 0, **trainer_kwargs})
        trainer.fit(module, datamodule=Variant(case, structure, NUM_STEPS))
    messages = [str(warning.message) for warning in caught if "not overlapped" in str(warning.message)]
    return Report(torch.stack(module.losses), early, messages)


def fail_then_fit(pipeline: str) -> Tensor:
    """Fail in the middle of an epoch, then fit the same module by another strategy; return the losses."""
    module = Raises(TABLE_WISE)
    strategy = make_strategy(module, pipeline)
    with pytest.raises(RuntimeError) as raised:
        make_trainer(strategy).fit(module, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    assert str(raised.value) == "the user's own error"
    module.losses.clear()
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=strategy.sharding)
    make_trainer(strategy).fit(module, datamodule=Batches(TABLE_WISE, NUM_STEPS))
    return torch.stack(module.losses)


def lookup_counts(pipeline: str, **trainer_kwargs: Any) -> list[list[int]]:
    """Return the iteration count that the fused optimizers saw in each training lookup."""
    module = Model(ROWWISE_ADAGRAD)  # FBGEMM counts for this one on a CPU
    trained: list[list[int]] = []
    kernel = SplitTableBatchedEmbeddingBagsCodegen
    forward = kernel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        embeddings = forward(self, *args, **kwargs)
        seen = [int(self.iter_cpu), int(self.iter)]
        if embeddings.requires_grad:
            embeddings.register_hook(lambda grad: trained.append(seen))
        return embeddings

    strategy = make_strategy(module, pipeline)
    with mock.patch.object(kernel, "forward", counting):
        trainer = make_trainer(strategy, **{"num_sanity_val_steps": 1, **trainer_kwargs})
        trainer.fit(module, datamodule=Variant(ROWWISE_ADAGRAD, "dataclass", NUM_STEPS))
    return trained


class Parted(Batches):
    """Batches with an input for each collection; rank 1's batch 4 has none for the second one."""

    def train_dataloader(self) -> DataLoader:
        def parted(index: int) -> Batch:
            batch = make_batch(self.case, index, self.trainer.global_rank)
            lacks = (index, self.trainer.global_rank) == (4, 1)
            return Batch(
                batch.dense, {"ebc": kjt_of(batch), "second": None if lacks else _copy(kjt_of(batch))}, batch.labels
            )

        return DataLoader([parted(index) for index in range(self.num_batches)], batch_size=None)


class TakesParts(Model):
    """Gives each collection its own input; where there is none, leaves it out or makes one without ids."""

    makes_input: bool

    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        embeddings = {}
        for name, tables in self.case.collections.items():
            kjt = batch.inputs[name]
            if kjt is None and self.makes_input:
                keys, size = list(self.case.all_features), len(batch.labels)
                lengths = torch.zeros(len(keys) * size, dtype=torch.int64)
                kjt = KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=lengths)
            if kjt is None:
                embeddings[name] = defaultdict(lambda dim=tables[0].dim: torch.zeros(len(batch.labels), dim))
            else:
                embeddings[name] = getattr(self, name)(kjt)
        return self.dense(batch, embeddings)


def one_rank_lacks_an_input(pipeline: str, makes_input: bool) -> Tensor:
    module = TakesParts(TWO_COLLECTIONS)
    module.makes_input = makes_input
    strategy = make_strategy(module, pipeline)
    make_trainer(strategy).fit(module, datamodule=Parted(TWO_COLLECTIONS, NUM_STEPS))
    return torch.stack(module.losses)


def reasons_of_cached_tables() -> list[str | None]:
    """Why tables in a UVM cache do not start early. FBGEMM has it on CUDA only, so the plan says it afterwards."""
    model = Model(TABLE_WISE)
    strategy = make_strategy(model)
    make_trainer(strategy).fit(model, datamodule=Batches(TABLE_WISE, 1))
    table = model.ebc.module_sharding_plan["t0"]
    table.compute_kernel = "fused_uvm_caching"
    reasons = [why_never_early(model.ebc), why_never_early(model.ebc, prefetches=True)]
    table.cache_params = CacheParams(prefetch_pipeline=True)
    return [*reasons, why_never_early(model.ebc, prefetches=True)]
