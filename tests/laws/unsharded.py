"""Sharded modules against the unsharded ones, under plans that are not in the order of the configs. Ranks run this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
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
    get_module_to_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import MODES
from lightning_overlap.testing.local_group import process_group
from lightning_overlap.testing.unsharded import parts, waited
from lightning_overlap.testing.unsharded_law import computes_what_the_unsharded_computes
from lightning_overlap.testing.verdict import Verdict
from lightning_overlap.testing.watched_fit import Setting

from ..sparse import kinds
from ..sparse.kinds import NUM_ROWS, plain_ids

# -- modules ----------------------------------------------------------------------------------------------------------

SHARED = (("t0", ("f0", "f1")), ("t1", ("f1", "f2")), ("t2", ("f2",)), ("t3", ("f0",)))
"""Tables and what they read: an answer of `f1` is named by its table, `f1@t0`."""


def shared_bags(**kwargs: Any) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=NUM_ROWS,
            embedding_dim=4 * (1 + at % 3),
            feature_names=list(features),
            pooling=PoolingType.MEAN if at % 2 and not kwargs else PoolingType.SUM,
        )
        for at, (name, features) in enumerate(SHARED)
    ]
    return EmbeddingBagCollection(tables=configs, **kwargs)


def weighted_bags() -> nn.Module:
    return shared_bags(is_weighted=True)


def shared_sequences() -> nn.Module:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=list(features))
        for name, features in SHARED
    ]
    return EmbeddingCollection(tables=configs)


def weighted_ids(generator: torch.Generator) -> KeyedJaggedTensor:
    ids = plain_ids(generator)
    weights = torch.rand(len(ids.values()), generator=generator)
    return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), weights=weights)


# -- plans ------------------------------------------------------------------------------------------------------------

Place = Callable[[int], Any]
"""Number of a table -> how it is sharded."""


def whole(table: int) -> Any:
    """On one rank each, the last table first."""
    return table_wise(rank=-table % dist.get_world_size(), compute_kernel="fused")


def columns(table: int) -> Any:
    """Table by table in two halves, the first one on the later rank, or whole."""
    size = dist.get_world_size()
    return column_wise(ranks=[(table + 1) % size, table % size]) if table % 2 else whole(table)


def rows(table: int) -> Any:
    return row_wise(compute_kernel="fused")


def copies(table: int) -> Any:
    return data_parallel()


def copies_and_whole(table: int) -> Any:
    """Every other table a copy; TorchRec answers sharding type by sharding type."""
    return whole(table) if table % 2 else copies(table)


def every_type(table: int) -> Any:
    return (rows, columns, whole, columns)[table % 4](table)


PLACES = {place.__name__: place for place in (whole, columns, rows, copies, copies_and_whole, every_type)}


def make_plan(module: nn.Module, place: Place) -> ShardingPlan:
    """Shard every collection of a module; `t3` is table 3."""
    sharders = get_module_to_default_sharders()
    plan: dict[str, Any] = {}
    for name, inner in module.named_modules():
        if type(inner) in sharders and not any(name.startswith(f"{outer}.") for outer in plan):
            tables = sharders[type(inner)].shardable_parameters(inner)
            plan[name] = construct_module_sharding_plan(
                inner,
                per_param_sharding={table: place(int(table.removeprefix("t"))) for table in tables},
                local_size=dist.get_world_size(),
                world_size=dist.get_world_size(),
                device_type="cpu",
            )
    return ShardingPlan(plan=plan)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of module, what it reads, and two plans for it."""

    build: Callable[[], nn.Module]
    places: tuple[str, str]
    ids: Callable[[torch.Generator], KeyedJaggedTensor] = field(default=plain_ids)
    fused_lr: float | None = 1.0
    """Of the optimizer applied in backward; None: the module has one of its own."""


KINDS = {
    "bags": Kind(shared_bags, ("copies_and_whole", "columns")),
    "bags_of_every_type": Kind(shared_bags, ("every_type", "copies")),
    "weighted_bags": Kind(weighted_bags, ("whole", "rows"), weighted_ids),
    "sequences": Kind(shared_sequences, ("whole", "columns")),
    "sequences_of_every_type": Kind(shared_sequences, ("every_type", "rows")),
    "variable_batch": Kind(kinds.bags, ("whole", "columns"), kinds.variable_batch),
    "feature_processors": Kind(kinds.position_weighted, ("whole", "copies_and_whole")),
    "feature_processors_one_module": Kind(kinds.position_weighted_collection, ("whole", "rows")),
    "fused_bags": Kind(kinds.fused_bags, ("whole", "rows"), fused_lr=None),
    "tower": Kind(kinds.tower, ("whole", "copies")),
    "towers": Kind(kinds.towers, ("whole", "whole")),
}
TORCHREC_ANSWERS_OTHERWISE = {
    "variable_batch_sequences": Kind(kinds.sequences, ("whole", "rows"), kinds.variable_batch),
}
"""TorchRec 1.8 gives each sample its rows, unsharded each different one; on a CPU the tables stay as they are."""
LEFT_OUT = {
    "managed_bags": Kind(kinds.managed_bags, ("rows", "rows"), kinds.wide_ids),
    "managed_sequences": Kind(kinds.managed_sequences, ("rows", "rows"), kinds.wide_ids),
    "feature_processors_with_buffers": Kind(kinds.counting, ("whole", "whole")),
}


class OneModule(LightningModule):
    """All that a module answers, each part weighed, in one loss."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.tables = kind.build()
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(()), requires_grad=False)
        generator = torch.Generator().manual_seed(17)
        with torch.no_grad():
            for _, parameter in sorted(self.tables.named_parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        for module in self.tables.modules():
            if kind.fused_lr is not None and isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": kind.fused_lr})

    def rows(self, batch: dict[str, Any]) -> Any:
        return waited(self.tables(batch["ids"]))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        floats = [part for _, part in parts(self.rows(batch)) if isinstance(part, Tensor) and part.is_floating_point()]
        weighed = [(part * torch.linspace(-1, 1, part.shape[-1])).mean() for part in floats if part.numel()]
        return self.scale * torch.stack(weighed).sum()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [p for _, p in in_backward_optimizer_filter(self.named_parameters()) if p.requires_grad]
        return torch.optim.SGD(own, 0.5)


def make_batches(kind: Kind, num: int) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    return [{"ids": kind.ids(torch.Generator().manual_seed(7919 * rank + index))} for index in range(num)]


def check(name: str, place: str, pipeline: str, module: type[OneModule] = OneModule, **options: Any) -> Verdict:
    """Return what comes of law 10 for a kind of module under a plan."""
    kind = {**KINDS, **LEFT_OUT, **TORCHREC_ANSWERS_OTHERWISE}[name]
    with process_group("cpu"):
        plan = make_plan(OneModule(kind), PLACES[place])
        batches = make_batches(kind, 6)
        setting = Setting(lambda: module(kind), batches, None, "cpu", 0, options, {"sharding": plan})
        return computes_what_the_unsharded_computes(setting, pipeline, MODES[pipeline].staleness)


def check_all(names: list[tuple[str, str, str]]) -> list[str]:
    """Check kinds under plans and modes; return which of them break the law, and how."""
    found = [(" ".join(case), check(*case).problem) for case in names]
    return [f"{case}: {problem}" for case, problem in found if problem]


# -- broken on purpose ------------------------------------------------------------------------------------------------


class CallsWithoutGradient(OneModule):
    """A frozen teacher's rows: nothing trains the tables."""

    def rows(self, batch: dict[str, Any]) -> Any:
        with torch.no_grad():
            return super().rows(batch)


class LooksFirst(OneModule):
    """Looks at the rows without a gradient, for a statistic, then trains with them."""

    def rows(self, batch: dict[str, Any]) -> Any:
        rows = self.tables(batch["ids"])
        with torch.no_grad():
            self.norm = rows.values().norm()
        return waited(rows)


class ChangesIds(OneModule):
    """Hashes ids in place."""

    def rows(self, batch: dict[str, Any]) -> Any:
        batch["ids"].values().remainder_(NUM_ROWS // 2)
        return super().rows(batch)


class ReadsAsADict(OneModule):
    """Takes the answer for what an unsharded EmbeddingCollection gives."""

    def rows(self, batch: dict[str, Any]) -> Any:
        rows = self.tables(batch["ids"])
        assert "f0@t0" in rows
        assert len(rows) == 6
        return {key: waited(rows[key]) for key in rows}
