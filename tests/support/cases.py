"""Models and data of the law tests, without the package under test: one stale row shows by a large learning rate."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchrec
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

NUM_ROWS = 120
NUM_DENSE = 6
BATCH_SIZE = 16
NUM_STEPS = 10


@dataclass(frozen=True)
class TableSpec:
    name: str
    features: tuple[str, ...]
    sharding: str = "table_wise"
    collection: str = "ebc"
    dim: int = 8
    lr: float | None = None  # of its fused optimizer, where it is not the case's


@dataclass(frozen=True)
class Case:
    name: str
    tables: tuple[TableSpec, ...]
    sequence: bool = False  # `EmbeddingCollection`s
    weighted: bool = False
    empty_feature: str | None = None  # has no ids in every third batch
    optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] = (torch.optim.SGD, {"lr": 2.0})
    comms: tuple[str, str] | None = None  # precision that embeddings and gradients are sent in, by TorchRec's codecs
    dense: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.5})
    unused: bool = False  # the model has dense weights that no loss depends on

    @property
    def all_features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(feature for table in self.tables for feature in table.features))

    @property
    def collections(self) -> dict[str, list[TableSpec]]:
        found: dict[str, list[TableSpec]] = {}
        for table in self.tables:
            found.setdefault(table.collection, []).append(table)
        return found


@dataclass
class Batch:
    dense: Tensor
    inputs: dict[str, Any]
    labels: Tensor


def make_batch(case: Case, index: int, rank: int, batch_size: int = BATCH_SIZE) -> Batch:
    generator = torch.Generator().manual_seed(7919 * rank + index)
    lengths = torch.randint(0, 4, (len(case.all_features), batch_size), generator=generator)
    if case.empty_feature is not None and index % 3 == 1:
        lengths[case.all_features.index(case.empty_feature)] = 0
    num_ids = int(lengths.sum())
    kjt = KeyedJaggedTensor(
        keys=list(case.all_features),
        values=torch.randint(0, NUM_ROWS, (num_ids,), generator=generator),
        lengths=lengths.flatten(),
        weights=torch.rand(num_ids, generator=generator) if case.weighted else None,
    )
    labels = torch.randint(0, 2, (batch_size,), generator=generator).float()
    return Batch(torch.randn(batch_size, NUM_DENSE, generator=generator), {"sparse": (kjt, index)}, labels)


class Batches(LightningDataModule):
    make: Callable[..., Any] = staticmethod(make_batch)  # a batch from the case, an index and the rank

    def __init__(self, case: Case, num_batches: int = NUM_STEPS) -> None:
        super().__init__()
        self.case, self.num_batches = case, num_batches

    def train_dataloader(self) -> DataLoader:
        return self.loader_of(range(self.num_batches))

    def loader_of(self, indices: range) -> DataLoader:
        return DataLoader([self.make(self.case, index, self.trainer.global_rank) for index in indices], batch_size=None)


class Model(LightningModule):
    def __init__(self, case: Case, *, fused_optimizer: bool = True, device: str = "cpu") -> None:
        super().__init__()
        self.case = case
        self.losses: list[Tensor] = []
        generator = torch.Generator().manual_seed(17)
        for name, tables in sorted(case.collections.items()):
            kind = {"sequence": case.sequence, "weighted": case.weighted, "device": device}
            self.add_module(name, make_collection(tables, NUM_ROWS, **kind))
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 8), nn.ReLU())
        width = 8 + sum(table.dim * len(table.features) for table in case.tables)
        self.top = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))
        if case.unused:
            self.unused = nn.Linear(3, 3)
        with torch.no_grad():
            for _, parameter in sorted(self.named_parameters(), key=lambda item: item[0].split(".")[-2:]):
                if not parameter.is_meta:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        if fused_optimizer:
            cls, kwargs = case.optimizer
            for name, tables in case.collections.items():
                weights = {key.split(".")[-2]: p for key, p in getattr(self, name).named_parameters()}
                for table in tables:
                    if table.sharding != "data_parallel":
                        own = {} if table.lr is None else {"lr": table.lr}
                        _apply_optimizer_in_backward(cls, [weights[table.name]], {**kwargs, **own})

    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(batch.inputs["sparse"][0])

    def dense(self, batch: Batch, embeddings: Mapping[str, Any]) -> Tensor:
        merged = [self.bottom(batch.dense)]
        for table in self.case.tables:
            for feature in table.features:
                merged.append(self._pool(embeddings[table.collection], table, feature))
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def _pool(self, embeddings: Any, table: TableSpec, feature: str) -> Tensor:
        tables_of_feature = [other for other in self.case.collections[table.collection] if feature in other.features]
        key = feature if len(tables_of_feature) == 1 else f"{feature}@{table.name}"
        if not self.case.sequence:
            return torch.clone(embeddings[key])
        return summed(embeddings[key])

    def forward(self, batch: Batch, embeddings: Mapping[str, Any] | None = None) -> Tensor:
        if embeddings is None:
            embeddings = {name: self.embeddings(name, batch) for name in sorted(self.case.collections)}
        return self.dense(batch, embeddings)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated = self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self)


def remade(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), kjt.values().clone(), lengths=kjt.lengths().clone())


class MakesInput(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return getattr(self, collection)(remade(batch.inputs["sparse"][0]))


class ReadsItsLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class ByHand:
    """Goes before the class of a model that steps its optimizers itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


def dense_optimizer(module: Any) -> torch.optim.Optimizer:
    """Everything that is not updated in backward; by default with momentum, so that there is state to compare."""
    cls, kwargs = getattr(getattr(module, "case", None), "dense", Case.dense)
    return cls([p for _, p in in_backward_optimizer_filter(module.named_parameters())], **kwargs)


def make_plan(case: Case, module: Model, world_size: int, device_type: str = "cpu") -> ShardingPlan:
    whole = [table.name for table in case.tables if table.sharding == "table_wise"]
    kinds: dict[str, Callable[[str], Any]] = {
        "data_parallel": lambda name: sharding_plan.data_parallel(),
        "column_wise": lambda name: sharding_plan.column_wise(ranks=[rank % world_size for rank in range(2)]),
        "row_wise": lambda name: sharding_plan.row_wise(compute_kernel="fused"),
        "table_wise": lambda name: sharding_plan.table_wise(
            rank=whole.index(name) % world_size, compute_kernel="fused"
        ),
    }
    local_size = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    sizes: Any = {"local_size": local_size, "world_size": world_size, "device_type": device_type}
    plans = {}
    for name, tables in case.collections.items():
        shardings = {table.name: kinds[table.sharding](table.name) for table in tables}
        plans[name] = sharding_plan.construct_module_sharding_plan(getattr(module, name), shardings, **sizes)
    return ShardingPlan(plan=plans)


def make_collection(
    tables: Sequence[Any], num_rows: int, *, sequence: bool = False, weighted: bool = False, device: str = "cpu"
) -> nn.Module:
    """Return the collection of tables that have a name, features, a dim, and perhaps a pooling, "sum" or "mean"."""
    kind = torchrec.EmbeddingConfig if sequence else torchrec.EmbeddingBagConfig
    configs = [
        kind(name=table.name, num_embeddings=num_rows, embedding_dim=table.dim, feature_names=list(table.features))
        for table in tables
    ]
    if sequence:
        return torchrec.EmbeddingCollection(tables=configs, device=torch.device(device))
    for table, config in zip(tables, configs, strict=True):
        config.pooling = torchrec.PoolingType[getattr(table, "pooling", "sum").upper()]
    return torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))


def summed(jagged: JaggedTensor) -> Tensor:
    lengths, values = jagged.lengths(), jagged.values()
    places = torch.arange(len(lengths), device=lengths.device)
    owner = torch.repeat_interleave(places, lengths, output_size=len(values))  # without it the host would wait
    return torch.zeros(len(lengths), values.shape[1], device=values.device).index_add(0, owner, values)


def _tables(num: int, **kwargs: Any) -> tuple[TableSpec, ...]:
    return tuple(TableSpec(f"t{index}", (f"f{index}",), **kwargs) for index in range(num))


TABLE_WISE = Case("table_wise", _tables(3))
COLUMN_WISE = Case("column_wise", (*_tables(1), TableSpec("wide", ("w",), "column_wise", dim=16)))
_WHOLE, _COPIED = TableSpec("t1", ("f2", "f3")), TableSpec("d1", ("f4",), "data_parallel")
MIXED = Case("data_parallel_and_table_wise", (*_tables(1), TableSpec("d0", ("f1",), "data_parallel"), _WHOLE, _COPIED))
# The second one reads the same KJT, with a feature in common.
_SECOND = TableSpec("u0", ("f1", "f2"), collection="second"), TableSpec("u1", ("f2",), collection="second")
TWO_COLLECTIONS = Case("two_collections", (*_tables(2), *_SECOND))
SEQUENCE = Case("embedding_collection", _tables(3), sequence=True)
WEIGHTED = Case("weighted", _tables(3), weighted=True)
EMPTY_FEATURE = Case("empty_feature", _tables(3), empty_feature="f1")
ADAGRAD = Case("adagrad", _tables(2), optimizer=(torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-8}))
ROWWISE_ADAGRAD = Case("rowwise_adagrad", _tables(2), optimizer=(RowWiseAdagrad, {"lr": 1.0, "eps": 1e-8}))

UNUSED = dataclasses.replace(MIXED, name="unused", unused=True)
SHARED_FEATURE = Case("shared_feature", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f1", "f0"))))

CASES = (
    *(TABLE_WISE, SHARED_FEATURE, COLUMN_WISE, MIXED, TWO_COLLECTIONS),
    *(SEQUENCE, WEIGHTED, EMPTY_FEATURE, ADAGRAD, ROWWISE_ADAGRAD),
)
