"""Sharded modules against the unsharded ones, under plans that are not in the order of the configs. Ranks run this."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.sharding_plan import grid_shard, table_row_wise, table_wise

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.testing.unsharded import compare_with_unsharded, parts, waited
from lightning_overlap.testing.watched_fit import Setting, process_group

from ..support import modules
from ..support.cases import make_collection
from ..support.fits import make_trainer
from ..support.modules import NUM_ROWS, copies, draw_weights, halves, own_parameters, plain_ids, plan_by_place, rows
from .random_fits import Table

SHARED = tuple(
    Table(f"t{at}", features, 4 * (1 + at % 3), "", 0, "mean" if at % 2 else "sum")
    for at, features in enumerate((("f0", "f1"), ("f1", "f2"), ("f2",), ("f0",)))
)
"""Tables and what they read: an answer of `f1` is named by its table, `f1@t0`."""


shared_bags = partial(make_collection, SHARED, NUM_ROWS)
weighted_bags = partial(make_collection, [replace(table, pooling="sum") for table in SHARED], NUM_ROWS, weighted=True)
shared_sequences = partial(make_collection, [replace(table, dim=8) for table in SHARED], NUM_ROWS, sequence=True)


def weighted_ids(generator: torch.Generator) -> KeyedJaggedTensor:
    ids = plain_ids(generator)
    weights = torch.rand(len(ids.values()), generator=generator)
    return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), weights=weights)


def whole(table: int) -> Any:
    """On one rank each, the last table first."""
    return table_wise(rank=-table % dist.get_world_size(), compute_kernel="fused")


def columns(table: int) -> Any:
    """Table by table in two halves, the first one on the later rank, or whole."""
    return halves(table + 1, table) if table % 2 else whole(table)


def rows_of_a_host(table: int) -> Any:
    return table_row_wise(host_index=0)


def grid(table: int) -> Any:
    return grid_shard(host_indexes=[0])


PLACES: dict[str, modules.Placement] = {
    "whole": whole,
    "columns": columns,
    "rows": rows,
    "copies": copies,
    "copies_and_whole": lambda table: (copies, whole)[table % 2](table),
    "rows_and_others": lambda table: (whole, rows, copies, rows)[table % 4](table),
    "rows_of_a_host": lambda table: (rows, rows_of_a_host, whole, grid)[table % 4](table),
    "rows_and_whole": lambda table: (whole, rows)[table % 2](table),
    "every_type": lambda table: (rows, columns, whole, columns)[table % 4](table),
}


@dataclass(frozen=True)
class Kind:
    build: Callable[[], nn.Module]
    places: tuple[str, str]
    ids: Callable[[torch.Generator], KeyedJaggedTensor] = field(default=plain_ids)
    fused_lr: float | None = 1.0  # of the optimizer applied in backward; None: the module has one of its own


KINDS = {
    "bags": Kind(shared_bags, ("copies_and_whole", "columns")),
    "bags_of_every_type": Kind(shared_bags, ("every_type", "copies")),
    "means_by_rows": Kind(shared_bags, ("rows_and_others", "rows")),
    "means_by_rows_of_a_host": Kind(shared_bags, ("rows_of_a_host", "rows_of_a_host")),
    "variable_batch_means_by_rows": Kind(modules.means, ("rows_and_whole", "rows"), modules.variable_batch_alike),
    "weighted_means": Kind(modules.weighted_means, ("rows", "whole"), weighted_ids, fused_lr=None),
    "weighted_bags": Kind(weighted_bags, ("whole", "rows"), weighted_ids),
    "bags_that_ignore_weights": Kind(shared_bags, ("columns", "copies_and_whole"), weighted_ids),
    "sequences": Kind(shared_sequences, ("whole", "columns")),
    "sequences_that_ignore_weights": Kind(shared_sequences, ("whole", "rows"), weighted_ids),
    "sequences_of_every_type": Kind(shared_sequences, ("every_type", "rows")),
    "variable_batch": Kind(modules.bags, ("whole", "columns"), modules.variable_batch),
    "feature_processors": Kind(modules.position_weighted, ("whole", "copies_and_whole")),
    "feature_processors_one_module": Kind(modules.position_weighted_collection, ("whole", "rows")),
    "fused_bags": Kind(modules.fused_bags, ("whole", "rows"), fused_lr=None),
    "tower": Kind(modules.tower, ("whole", "copies")),
    "towers": Kind(modules.towers, ("whole", "whole")),
}
TORCHREC_ANSWERS_OTHERWISE = {
    "variable_batch_sequences": Kind(modules.sequences, ("whole", "rows"), modules.variable_batch),
}
"""TorchRec 1.8 gives each sample its rows, unsharded each different one; on a CPU the tables stay as they are."""
LEFT_OUT = {
    "managed_bags": Kind(modules.managed_bags, ("rows", "rows"), modules.wide_ids),
    "managed_sequences": Kind(modules.managed_sequences, ("rows", "rows"), modules.wide_ids),
    "feature_processors_with_buffers": Kind(modules.counting, ("whole", "whole")),
}


class OneModule(LightningModule):
    """All that a module answers, each part weighed, in one loss."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.tables = kind.build()
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(()), requires_grad=False)
        draw_weights(self.tables, 17, 0.4)
        for module in self.tables.modules():
            if kind.fused_lr is not None and isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": kind.fused_lr})

    def embeddings(self, batch: dict[str, Any]) -> Any:
        return waited(self.tables(batch["ids"]))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        floats = [
            part for _, part in parts(self.embeddings(batch)) if isinstance(part, Tensor) and part.is_floating_point()
        ]
        weighed = [(part * torch.linspace(-1, 1, part.shape[-1])).mean() for part in floats if part.numel()]
        return self.scale * torch.stack(weighed).sum()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(own_parameters(self), 0.5)


def check_replicas(pipeline: str) -> str:
    """Return what breaks law 10 where all tables but one are replicated."""
    kind = KINDS["bags"]
    with process_group("cpu"):
        options = {"sharding": {"t0": "table_wise"}, "replicate_tables": 1000}
        setting = Setting(lambda: OneModule(kind), make_batches(kind, 6), strategy_options=options)
        return compare_with_unsharded(setting, pipeline, MODES[pipeline].staleness)[0]


def make_batches(kind: Kind, num: int) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    return [{"ids": kind.ids(torch.Generator().manual_seed(7919 * rank + index))} for index in range(num)]


def check(name: str, place: str, pipeline: str, module: type[OneModule] = OneModule, **options: Any) -> tuple[str, str]:
    """Return what breaks law 10 for a kind of module under a plan, or '', and what was compared."""
    kind = {**KINDS, **LEFT_OUT, **TORCHREC_ANSWERS_OTHERWISE}[name]
    with process_group("cpu"):
        plan = plan_by_place(OneModule(kind), lambda _: PLACES[place])
        own = {"trainer_options": options, "strategy_options": {"sharding": plan}}
        setting = Setting(lambda: module(kind), make_batches(kind, 6), **own)
        return compare_with_unsharded(setting, pipeline, MODES[pipeline].staleness)


def check_all(names: list[tuple[str, str, str]]) -> list[str]:
    found = [(" ".join(case), check(*case)[0]) for case in names]
    return [f"{case}: {problem}" for case, problem in found if problem]


class Drops(OneModule):
    """Half of what it looks up is dropped; keeps its losses."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.losses: list[Tensor] = []

    def embeddings(self, batch: dict[str, Any]) -> Any:
        rows = super().embeddings(batch)
        return KeyedTensor(rows.keys(), rows.length_per_key(), nn.functional.dropout(rows.values(), 0.5))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(own_parameters(self), 1.0)  # under DDPStrategy for tables too, at their fused rate


def losses_with_dropout(place: str, pipeline: str | None) -> Tensor:
    """Return the losses under a plan in a mode, or (None) of the unsharded module under DDPStrategy."""
    kind = KINDS["bags"] if pipeline else replace(KINDS["bags"], fused_lr=None)
    seed_everything(3, verbose=False)
    module = Drops(kind)
    plan = plan_by_place(module, lambda _: PLACES[place])
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan) if pipeline else DDPStrategy()
    loader = DataLoader(make_batches(kind, 6), batch_size=None)
    make_trainer(strategy).fit(module, loader)
    return torch.stack(module.losses)


# -- broken on purpose ------------------------------------------------------------------------------------------------


class ReadsAsADict(OneModule):
    """Takes the answer for what an unsharded EmbeddingCollection gives."""

    def embeddings(self, batch: dict[str, Any]) -> Any:
        found = self.tables(batch["ids"])
        assert "f0@t0" in found
        assert len(found) == 6
        return {key: waited(found[key]) for key in found}


class Rounds(OneModule):
    """Has a weight whose gradient is zero, but for rounding, which is zero where the tables are sharded; under Adam."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.shift = nn.Parameter(torch.ones(()))

    @property
    def gradient(self) -> float:
        return torch.finfo(self.shift.dtype).eps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        gradient = self.gradient if isinstance(self.trainer.strategy, SingleDeviceStrategy) else 0.0
        return self(batch) + self.shift * gradient

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(own_parameters(self), 0.5)


class TrainsUnsharded(Rounds):
    """Its gradient is small, but none of rounding."""

    gradient = 1e-6  # type: ignore[assignment]
