"""Random fits: what is drawn, the model and the data of it. Imports nothing of the package under test.

`draw(choose)` makes a `Fit` of choices, whoever chooses: Hypothesis, or a seeded generator. All that a fit does follows
from it, so that a failing one is replayed by its seed or by its text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

NUM_ROWS, NUM_DENSE, BATCH_SIZE = 40, 4, 6
FEATURES = ("f0", "f1", "f2", "f3")
EXACT = ("fused_sparse_dist", "sparse_dist", "fused_sparse_dist_after_optimizer", "prefetch", "base")
STALE = ("semi_sync", "semi_sync_deferred", "async_lookup")
ORDERED = ("values", "to_dict")
"""Uses that see the order of columns."""

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]
"""Takes one of several; the first is the simplest."""

# -- what is drawn ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of a collection."""

    name: str
    features: tuple[str, ...]
    dim: int
    sharding: str
    place: int
    """Its rank, or that of its first shard."""
    pooling: str = "sum"


@dataclass(frozen=True)
class Part:
    """A collection, what it reads, and what a training step does with it."""

    name: str
    sequence: bool
    kjt: str
    tables: tuple[Table, ...]
    use: str = "by_name"
    calls: str = "once"
    checkpoint: str = ""

    @property
    def keys(self) -> list[str]:
        """Names of its answers in the order of the configs."""
        owners = [feature for table in self.tables for feature in table.features]
        return [
            feature if owners.count(feature) == 1 else f"{feature}@{table.name}"
            for table in self.tables
            for feature in table.features
        ]

    @property
    def width(self) -> int:
        return sum(table.dim * len(table.features) for table in self.tables)

    def num_calls(self, batch: int) -> int:
        return {"once": 1, "twice": 2, "skipped": 0}[self.calls] if batch % 4 == 2 else 1


@dataclass(frozen=True)
class Fit:
    """A fit, all of it."""

    seed: int
    num_ranks: int
    parts: tuple[Part, ...]
    pipeline: str
    options: tuple[tuple[str, Any], ...] = ()
    stream: str = "data_dist"
    weighted: bool = False
    layout: str = "dict"
    sizes: str = "alike"
    empty: bool = False
    change: str = ""
    optimizer: str = "sgd"
    num_batches: int = 7
    epochs: int = 1
    max_steps: int = -1
    accumulate: int = 1
    clip: float | None = None
    manual: bool = False
    validate_every: int = 0
    skips_steps: bool = False
    skips_losses: bool = False
    late_rank: int | None = None

    @property
    def stale(self) -> bool:
        return self.pipeline in STALE

    @property
    def staleness(self) -> int:
        """Of its mode."""
        return int(dict(self.options).get("staleness", 2 if self.pipeline == "async_lookup" else self.stale))

    @property
    def delays_are_defined(self) -> bool:
        """Whether a loop can say which updates each lookup of a stale mode sees."""
        return (
            not self.manual
            and self.layout != "either"
            and not self.change
            and not {"start_batch", "end_batch"} & dict(self.options).keys()
            and all(part.calls == "once" and not part.checkpoint for part in self.parts)
            and all(table.sharding != "data_parallel" for part in self.parts for table in part.tables)
        )

    @property
    def kjts(self) -> dict[str, tuple[str, ...]]:
        """The KeyedJaggedTensors of a batch, each with its features."""
        read: dict[str, set[str]] = {}
        for part in self.parts:
            read.setdefault(part.kjt, set()).update(*(table.features for table in part.tables))
        return {name: tuple(sorted(features)) for name, features in sorted(read.items())}


def draw(choose: Choose, without: Collection[str] = (), seed: int = 0) -> Fit:
    """Draw a fit.

    Args:
        choose: Takes one of several.
        without: Choices that are not to be drawn.
        seed: Of its weights and data.
    """

    def pick(*choices: Any) -> Any:
        return choose([choice for choice in choices if choice not in without or not isinstance(choice, str)])

    num_ranks = choose([2, 1, 2])
    pipeline = pick(*EXACT[:4], *STALE, EXACT[4])
    weighted = choose([False, False, True])
    change = pick("", "", "", "ids", *(["weights"] if weighted else []), "made")
    parts = tuple(_draw_part(pick, choose, at, weighted) for at in range(choose([1, 1, 2, 3])))
    manual = choose([False] * 4 + [True])
    accumulate = 1 if manual else choose([1, 1, 2, 3])
    # Lightning refuses a step without a loss above one rank, gloo a reduce-scatter of batches that differ in size.
    skips = "" if manual or accumulate > 1 else pick("", "", "", "steps", *(["losses"] if num_ranks == 1 else []))
    scatters = num_ranks > 1 and any(
        table.sharding == "row_wise" for part in parts if not part.sequence for table in part.tables
    )
    return Fit(
        seed=seed,
        num_ranks=num_ranks,
        parts=parts,
        pipeline=pipeline,
        options=_draw_options(choose, pipeline),
        stream=choose(["data_dist", "dedicated", "current"]),
        weighted=weighted,
        layout=pick("dict", "dataclass", "tuple", "nested", "either"),
        sizes="alike" if scatters else choose(["alike", "by_rank"]),
        empty=choose([False, True]),
        change=change,
        optimizer=choose(["sgd", "adagrad", "rowwise"]),
        num_batches=choose([7, 8, 5]),
        epochs=choose([1, 1, 2]),
        max_steps=-1 if skips else choose([-1, -1, 5]),
        accumulate=accumulate,
        clip=None if manual else choose([None, None, 0.3]),
        manual=manual,
        validate_every=choose([0, 0, 3]),
        skips_steps=skips == "steps",
        skips_losses=skips == "losses",
        late_rank=choose([None, 0, 1]) if num_ranks > 1 else None,
    )


def _draw_part(pick: Choose, choose: Choose, at: int, weighted: bool) -> Part:
    kjt = choose(["x", "x", "y"])
    sequence = not (weighted and kjt == "x") and choose([False, False, True])
    dim = choose([4, 8])
    shardings = ["table_wise", "column_wise", "row_wise", *(["data_parallel"] if not sequence else [])]
    tables = tuple(
        Table(
            f"t{at}{number}",
            choose([("f0",), ("f1",), ("f0", "f1"), ("f2", "f3"), ("f3", "f0")]),
            dim if sequence else choose([4, 8]),
            choose(shardings),
            choose([0, 1]),
            "sum" if sequence or weighted else choose(["sum", "sum", "mean"]),
        )
        for number in range(choose([2, 1, 3]))
    )
    # TorchRec wraps copies in DistributedDataParallel with a static graph: plain loops fail where calls differ.
    static = any(table.sharding == "data_parallel" for table in tables)
    uses = ["by_name", *ORDERED] if static else ["by_name", *ORDERED, "part", "detached", "no_grad", "statistic"]
    rest = ["", "", ""] if static else ["", "", "", "checkpoint", "checkpoint_reentrant"]
    use, again = pick(*uses), pick(*rest)
    calls = "once" if static or again else pick("once", "once", "once", "twice", "skipped")
    return Part(f"c{at}", sequence, kjt, tables, use, calls, again)


def _draw_options(choose: Choose, pipeline: str) -> tuple[tuple[str, Any], ...]:
    if pipeline not in STALE:
        return ()
    options: list[tuple[str, Any]] = []
    if pipeline == "async_lookup":
        options.append(("staleness", choose([1, 2, 3])))
    if choose([False, False, True]):
        options += [("start_batch", 2), ("end_batch", 5)]
    if pipeline != "semi_sync_deferred" and choose([False, False, True]):
        options.append(("num_lookup_threads", 1))
    return tuple(options)


def of_seed(seed: int, without: Collection[str] = ()) -> Fit:
    """Return the fit that a seed draws."""
    return draw(Random(seed).choice, without, seed)


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """A dataclass batch."""

    dense: Tensor
    sparse: dict[str, KeyedJaggedTensor]
    labels: Tensor


def make_batch(fit: Fit, index: int, rank: int) -> Any:
    """Return batch `index` of a rank, made anew each time; its layout is the fit's."""
    generator = torch.Generator().manual_seed(fit.seed * 100_003 + rank * 7919 + index)
    size = BATCH_SIZE - ((index + rank) % 3 if fit.sizes == "by_rank" else 0)
    kjts = {name: _make_kjt(fit, name, index, size, generator) for name in fit.kjts}
    dense = torch.randn(size, NUM_DENSE, generator=generator)
    labels = torch.randint(0, 2, (size,), generator=generator).float()
    if fit.layout == "dataclass":
        return Batch(dense, kjts, labels)
    if fit.layout == "tuple":
        return (dense, kjts, labels)
    if fit.layout == "nested":
        return {"in": [dense, {"sparse": (kjts, index)}], "labels": labels}
    if fit.layout == "either" and index >= 3 and (index + rank) % 2:
        return {"dense": dense, **{f"other_{name}": kjt for name, kjt in kjts.items()}, "labels": labels}
    return {"dense": dense, **kjts, "labels": labels}


def opened(fit: Fit, batch: Any) -> Batch:
    """Return what is in a batch, whatever its layout."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, (tuple, list)):
        return Batch(*batch)
    if "in" in batch:
        dense, inner = batch["in"]
        return Batch(dense, inner["sparse"][0], batch["labels"])
    kjts = {name: batch[name] if name in batch else batch[f"other_{name}"] for name in fit.kjts}
    return Batch(batch["dense"], kjts, batch["labels"])


def _make_kjt(fit: Fit, name: str, index: int, size: int, generator: torch.Generator) -> KeyedJaggedTensor:
    keys = fit.kjts[name]
    lengths = torch.randint(0, 4, (len(keys), size), generator=generator)
    if fit.empty and index % 3 == 1:
        lengths[0] = 0
    if fit.empty and index % 4 == 3:
        lengths[:] = 0
    num = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, NUM_ROWS, (num,), generator=generator),
        lengths=lengths.flatten(),
        weights=torch.rand(num, generator=generator) if fit.weighted and name == "x" else None,
    )


class _Rank(Dataset[Any]):
    def __init__(self, fit: Fit, first: int, num: int) -> None:
        self.fit, self.first, self.num = fit, first, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, at: int) -> Any:
        if at >= self.num:
            raise IndexError(at)
        return make_batch(self.fit, self.first + at, dist.get_rank())


class Data(LightningDataModule):
    """This rank's batches; 1000 and 1001 are for validation."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Rank(self.fit, 0, self.fit.num_batches), batch_size=None)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Rank(self.fit, 1000, 2), batch_size=None)


# -- the model --------------------------------------------------------------------------------------------------------

LookUp = Callable[[Part, KeyedJaggedTensor, int], Any]
"""Collection, its input and the batch -> what it answers."""


class Net(LightningModule):
    """What the collections answer, beside a bottom layer, below a top layer."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit
        self.automatic_optimization = not fit.manual
        self.losses: list[Tensor] = []
        self.look_up: LookUp = lambda part, kjt, batch: getattr(self, part.name)(kjt)
        for part in fit.parts:
            self.add_module(part.name, _collection(part, fit.weighted and part.kjt == "x"))
        self.bottom = nn.Linear(NUM_DENSE, 6)
        self.top = nn.Linear(6 + sum(part.width for part in fit.parts), 1)
        generator = torch.Generator().manual_seed(fit.seed)
        with torch.no_grad():
            for _, weight in sorted(self.named_parameters()):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
        for part in fit.parts:
            weights = {name.split(".")[-2]: weight for name, weight in getattr(self, part.name).named_parameters()}
            for table in part.tables:
                if table.sharding != "data_parallel":
                    cls, kwargs = OPTIMIZERS[fit.optimizer]
                    _apply_optimizer_in_backward(cls, [weights[table.name]], dict(kwargs))

    def forward(self, batch: Any, index: int) -> Tensor:
        inside = opened(self.fit, batch)
        size = len(inside.labels)
        merged = [torch.relu(self.bottom(inside.dense))]
        for part in self.fit.parts:
            merged.append(self._answer(part, self._input(part, inside), index, size))
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, inside.labels)

    def _input(self, part: Part, inside: Batch) -> KeyedJaggedTensor:
        kjt = inside.sparse[part.kjt]
        if self.fit.change != "made" or not self.training:
            return kjt
        weights = kjt.weights_or_none()
        return KeyedJaggedTensor(list(kjt.keys()), kjt.values(), weights, lengths=kjt.lengths())

    def _answer(self, part: Part, kjt: KeyedJaggedTensor, index: int, size: int) -> Tensor:
        def rows() -> Tensor:
            with torch.no_grad() if part.use == "no_grad" else nullcontext():
                answer = self.look_up(part, kjt, index)
            return _merged(part, answer, size)

        num = part.num_calls(index) if self.training else 1
        if not num:
            return torch.zeros(size, part.width)
        if part.checkpoint and self.training:
            if part.checkpoint == "checkpoint":
                return checkpoint(rows, use_reentrant=False)
            anchor = torch.zeros((), requires_grad=True)
            return checkpoint(lambda anchor: rows() + anchor, anchor, use_reentrant=True)
        answer = rows()
        return answer if num == 1 else answer + 0.5 * rows()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        fit = self.fit
        if fit.late_rank == dist.get_rank() and batch_idx % 3 == 1:
            time.sleep(0.01)
        for kjt in opened(fit, batch).sparse.values() if batch_idx % 3 == 2 else ():
            if fit.change == "ids":
                kjt.values().remainder_(NUM_ROWS // 2)
            if fit.change == "weights" and kjt.weights_or_none() is not None:
                kjt.weights().mul_(0.5)
        loss: Tensor = self(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        if fit.manual and self._fabric is None and self._trainer is not None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None if fit.skips_losses and batch_idx % 4 == 3 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self(batch, 1000 + batch_idx).detach().clone())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.skips(batch_idx):
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def skips(self, batch_idx: int) -> bool:
        """Whether a batch has no step of the dense optimizer."""
        return self.fit.skips_steps and batch_idx % 3 == 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [weight for _, weight in in_backward_optimizer_filter(self.named_parameters())]
        return torch.optim.SGD(own, 0.2, momentum=0.5)


OPTIMIZERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-8}),
    "rowwise": (RowWiseAdagrad, {"lr": 1.0, "eps": 1e-8}),
}


def _merged(part: Part, rows: Any, size: int) -> Tensor:
    """Return (B, E) of an answer, as the use has it."""
    if part.use == "statistic":
        with torch.no_grad():
            _of_key(part, rows, part.keys[0], size).norm()
    if part.use == "values" and not part.sequence:
        return rows.values() * 1.0
    if part.use == "to_dict" or part.use == "values":
        found = list((rows if part.sequence else rows.to_dict()).keys())
        return torch.cat([_of_key(part, rows, key, size) for key in found], dim=1)
    columns = [_of_key(part, rows, key, size) for key in part.keys]
    if part.use == "part":
        columns[1:] = [torch.zeros_like(column) for column in columns[1:]]
    merged = torch.cat(columns, dim=1)
    return merged.detach() if part.use == "detached" else merged


def _of_key(part: Part, rows: Any, key: str, size: int) -> Tensor:
    if not part.sequence:
        return rows[key]
    lengths, values = rows[key].lengths(), rows[key].values()
    owner = torch.repeat_interleave(torch.arange(size), lengths)
    return torch.zeros(size, values.shape[1]).index_add(0, owner, values)


def _collection(part: Part, weighted: bool) -> nn.Module:
    if part.sequence:
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=NUM_ROWS,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                )
                for table in part.tables
            ]
        )
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=NUM_ROWS,
                embedding_dim=table.dim,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
            )
            for table in part.tables
        ],
        is_weighted=weighted,
    )


def make_plan(fit: Fit, module: nn.Module) -> ShardingPlan:
    size = dist.get_world_size()

    def place(table: Table) -> Any:
        if table.sharding == "data_parallel":
            return data_parallel()
        if table.sharding == "row_wise":
            return row_wise(compute_kernel="fused")
        if table.sharding == "column_wise":
            return column_wise(ranks=[table.place % size, (table.place + 1) % size])
        return table_wise(rank=table.place % size, compute_kernel="fused")

    return ShardingPlan(
        {
            part.name: construct_module_sharding_plan(
                getattr(module, part.name),
                per_param_sharding={table.name: place(table) for table in part.tables},
                local_size=size,
                world_size=size,
                device_type="cpu",
            )
            for part in fit.parts
        }
    )
