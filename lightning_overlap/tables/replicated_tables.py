"""Which tables are replicated: those that cost fewer bytes between ranks whole than cut up.

The embeddings of a feature and their gradients are as many rows as a rank's batch, whatever the table has. The gradient
of a whole table is as many rows as the table. So a table with fewer rows than a rank's batch is replicated.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from ..text import some, unknown_name_message
from .replicas import Rule
from .table import Table

ReplicateTables: TypeAlias = int | Sequence[str] | None
"""Tables with fewer rows than this (False or 0: none), tables by name, or None: with fewer rows than a rank's batch."""

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_KINDS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""Optimizers that leave a row without a gradient as it is, and whose update is the same made densely."""

_RATE_NAMES = ("lr", "learning_rate")
_KERNEL_EPS: float = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters["eps"].default


def check_replicate_tables(replicate: ReplicateTables) -> None:
    """Check the argument as far as it can be without a model.

    Raises:
        TypeError: Neither a number of rows, nor names, nor None or False.
        ValueError: A negative number of rows.
    """
    is_names = isinstance(replicate, Sequence) and not isinstance(replicate, str)
    if is_names and all(isinstance(name, str) for name in replicate):  # type: ignore[union-attr]
        return
    if replicate is True or not (replicate is None or isinstance(replicate, int)):
        raise TypeError(
            "replicate_tables is None (tables with fewer rows than a rank's batch), False, a number of rows, or names "
            f"of tables, got {replicate!r}."
        )
    if isinstance(replicate, int) and replicate < 0:
        raise ValueError(f"replicate_tables is a number of rows, got {replicate}. False replicates no table.")


def names_given(replicate: ReplicateTables) -> frozenset[str]:
    """Return the tables that the user has named."""
    return frozenset() if replicate is None or isinstance(replicate, int) else frozenset(replicate)


def tables_to_replicate(
    replicate: ReplicateTables,
    tables: list[Table],
    model: nn.Module,
    sharding: Mapping[str, str],
    *,
    batch_size: int | None,
    fused: tuple[type, Mapping[str, Any]] | None,
    world_size: int,
) -> frozenset[str]:
    """Return the names of the tables that a planner is to replicate.

    On one rank there is nobody to replicate for. A module with data-parallel tables of the dense optimizer keeps its
    other tables sharded: TorchRec looks all data-parallel tables of a module up together. A planner knows tables by
    their names alone: of several modules' tables with one name all are replicated, or none.

    Args:
        replicate: The user's argument.
        tables: All tables of the unsharded model.
        model: The unsharded model.
        sharding: The sharding types that the user has named, by table; these tables are left alone.
        batch_size: Samples in a rank's batch; None where nobody knows.
        fused: What tables without a fused optimizer are going to get.
        world_size: Number of ranks.

    Raises:
        ValueError: A table that the user has named does not exist, is named with another sharding type, or cannot be
            replicated.
    """
    given = names_given(replicate)
    known: dict[str, list[Table]] = {}
    for table in tables:
        known.setdefault(table.name, []).append(table)
    for name in sorted(given):
        if name not in known:
            raise ValueError(f"replicate_tables: {unknown_name_message('table', name, known)}")
        if sharding.get(name, _DATA_PARALLEL) != _DATA_PARALLEL:
            raise ValueError(f"replicate_tables has {name!r}, which sharding makes {sharding[name]!r}: leave one out.")
        for table in known[name]:
            reason = _why_not(table, model, fused)
            if reason is not None:
                raise ValueError(f"replicate_tables: {table.path} has to stay sharded: {reason}.")
    if world_size == 1:
        return frozenset()
    if given:
        return given
    most = int(replicate) if isinstance(replicate, int) else batch_size or 0
    mixed = {
        table.module
        for table in tables
        if sharding.get(table.name) == _DATA_PARALLEL or not (fused or table.has_fused_optimizer)
    }
    return frozenset(
        name
        for name, of_name in known.items()
        if name not in sharding
        and all(
            table.parameter.shape[0] < most and table.module not in mixed and _why_not(table, model, fused) is None
            for table in of_name
        )
    )


def replicas_in(
    plan: ShardingPlan,
    tables: list[Table],
    given: Collection[str],
    sharding: Mapping[str, str] | None,
    *,
    fused_optimizer: bool,
    world_size: int,
) -> list[Table]:
    """Return the tables of a plan that are trained as replicas, the same on all ranks.

    Args:
        plan: Of the whole model.
        tables: All tables of the unsharded model.
        given: Tables that the user wants replicated.
        sharding: The sharding types that the user has named, by table; None where the plan is the user's own.
        fused_optimizer: Whether tables without a fused optimizer are going to get one.
        world_size: Number of ranks; on one, tables that are given may be sharded as any.

    Raises:
        ValueError: The plan does not make a given table data-parallel, or makes others of its module so, which the
            dense optimizer trains.
    """
    plans = {table.path: table.planned(plan) for table in tables}
    kinds = {path: None if planned is None else planned.sharding_type for path, planned in plans.items()}
    for table in tables:
        if table.name in given and kinds[table.path] != _DATA_PARALLEL and world_size > 1:
            raise ValueError(
                f"table {table.path} is in replicate_tables, and the plan makes it {kinds[table.path]}: make it "
                "data_parallel there."
            )
    whole = [table for table in tables if kinds[table.path] == _DATA_PARALLEL]
    by_rule = {
        table.path
        for table in whole
        if sharding is not None and table.name not in sharding and (fused_optimizer or table.has_fused_optimizer)
    }
    replicas = [table for table in whole if table.name in given or table.path in by_rule]
    modules = {table.module for table in replicas}
    mixed = [table.path for table in whole if table.module in modules and table not in replicas]
    if mixed:
        raise ValueError(
            f"{some(mixed)}: data-parallel, for the dense optimizer to train, in one module with tables of "
            f"replicate_tables ({some(table.path for table in replicas)}). TorchRec looks all data-parallel tables of "
            "a module up together: replicate all of them, or none."
        )
    return replicas


def _why_not(table: Table, model: nn.Module, fused: tuple[type, Mapping[str, Any]] | None) -> str | None:
    """Return why a table cannot be replicated, or None."""
    kind = type(model.get_submodule(table.module))
    if kind is EmbeddingCollection:
        return "it belongs to an EmbeddingCollection, of whose data-parallel tables TorchRec makes bags on a CPU"
    if kind is not EmbeddingBagCollection:
        return f"it belongs to a {kind.__name__}"
    if table.parameter.dtype != torch.float32:
        return f"its weights are {table.parameter.dtype}, which the fused kernel rounds in a way of its own"
    if not table.parameter.requires_grad:
        return "it is not trained"
    optimizer = next(iter(table.fused_optimizers), fused)
    if optimizer is None:
        return "it has no fused optimizer, which fused_optimizer=(torch.optim.SGD, {'lr': 0.1}) would give it"
    return why_not_dense(*optimizer)


def why_not_dense(optimizer_class: type, kwargs: Mapping[str, Any]) -> str | None:
    """Return why an optimizer's update cannot be made densely, with rows that have no gradient among the others."""
    try:
        kind = optimizer_type_to_emb_opt_type(optimizer_class)
    except ValueError:
        kind = None
    if kind not in _KINDS:
        return f"{optimizer_class.__name__} writes rows without a gradient too; SGD, Adagrad and RowWiseAdagrad do not"
    known = {*_RATE_NAMES, "eps", "optimizer"}
    other = sorted(name for name, value in kwargs.items() if name not in known and value)
    if other:
        return f"replicas are not made for {optimizer_class.__name__} with {', '.join(other)}"
    if kind is not EmbOptimType.EXACT_SGD and not kwargs.get("eps", _KERNEL_EPS) > 0:
        return f"{optimizer_class.__name__} with eps=0 divides 0 by 0 in rows without a gradient"
    return None


def rule_of(table: Table) -> Rule:
    """Return the update of a table that has its optimizer; read before TorchRec shards the table."""
    [(optimizer_class, kwargs)] = table.fused_optimizers
    kind = optimizer_type_to_emb_opt_type(optimizer_class)
    assert kind is not None
    return Rule(kind, table.fused_rate, float(kwargs.get("eps", _KERNEL_EPS)))
