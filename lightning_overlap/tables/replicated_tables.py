"""Choose the tables that are replicated: those that send fewer bytes between ranks whole than sharded.

The embeddings of a feature and their gradients are as many rows as a rank's batch, whatever the table has. The gradient
of a whole table is as many rows as the table. So a table with fewer rows than a rank's batch is replicated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from ..text import some, unknown_name_message
from .table import KERNEL_EPS, Table

ReplicateTables: TypeAlias = int | Sequence[str] | None
"""Tables with fewer rows than this (False or 0: none), tables by name, or None: with fewer rows than a rank's batch."""

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value
_KINDS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""Optimizers that do not change a row without a gradient, so that a dense update is the same as a sparse one."""


def check_replicate_tables(replicate: ReplicateTables) -> None:
    """Check the strategy's argument as far as it goes without tables.

    Raises:
        TypeError: It is no `ReplicateTables`.
        ValueError: It is a negative number of rows.
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


def tables_to_replicate(
    replicate: ReplicateTables,
    tables: list[Table],
    sharding: Mapping[str, str] | None,
    *,
    batch_size: int | None,
    fused: tuple[type, Mapping[str, Any]] | None,
    world_size: int,
) -> frozenset[str]:
    """Return the names of the tables to replicate: those that the user has named, else those with few rows.

    Tables are chosen by their rows only on several ranks, and not if the plan or planner is the user's. A module with
    data-parallel tables of the dense optimizer keeps its other tables sharded, since TorchRec looks all data-parallel
    tables of a module up together. A planner knows tables by their names alone, so of several modules' tables with one
    name all are replicated, or none.

    Args:
        replicate: The strategy's argument.
        tables: All tables of the model.
        sharding: The sharding types that the user has named, by table; these tables are not chosen by their rows. None
            if the plan or planner is the user's.
        batch_size: Samples of a batch on one rank; None if it is not known.
        fused: Class and arguments of the fused optimizer that tables without one get; None: they get none.
        world_size: How many ranks there are.

    Raises:
        ValueError: A table that the user has named does not exist, is named with another sharding type, or cannot be
            replicated.
    """
    given = frozenset() if replicate is None or isinstance(replicate, int) else frozenset(replicate)
    kinds = sharding or {}
    known: dict[str, list[Table]] = {}
    for table in tables:
        known.setdefault(table.name, []).append(table)
    for name in sorted(given):
        if name not in known:
            raise ValueError(f"replicate_tables: {unknown_name_message('table', name, known)}")
        if kinds.get(name, _DATA_PARALLEL) != _DATA_PARALLEL:
            raise ValueError(f"replicate_tables has {name!r}, which sharding makes {kinds[name]!r}: leave one out.")
        for table in known[name]:
            reason = _why_not(table, fused)
            if reason is not None:
                raise ValueError(f"replicate_tables: {table.path} has to stay sharded: {reason}.")
    if given or world_size == 1 or sharding is None:
        return given
    most = int(replicate) if isinstance(replicate, int) else batch_size or 0
    mixed = {
        table.module
        for table in tables
        if kinds.get(table.name) == _DATA_PARALLEL or not (fused or table.fused_optimizer)
    }
    return frozenset(
        name
        for name, of_name in known.items()
        if name not in kinds
        and all(
            table.parameter.shape[0] < most and table.module not in mixed and _why_not(table, fused) is None
            for table in of_name
        )
    )


def replicas_in(plan: ShardingPlan, tables: list[Table], names: Collection[str], world_size: int) -> list[Table]:
    """Return the tables of a plan that are trained as replicas: those in `names`, the same on all ranks.

    On one rank the plan may shard tables in `names` in any way.

    Raises:
        ValueError: The plan does not make such a table data-parallel, or makes others of its module so, which the
            dense optimizer trains.
    """
    whole = []
    for table in tables:
        planned = table.planned(plan)
        kind = None if planned is None else planned.sharding_type
        if kind == _DATA_PARALLEL:
            whole.append(table)
        elif table.name in names and world_size > 1:
            raise ValueError(
                f"table {table.path} is in replicate_tables, and the plan makes it {kind}: make it data_parallel there."
            )
    replicas = [table for table in whole if table.name in names]
    modules = {table.module for table in replicas}
    mixed = [table.path for table in whole if table.module in modules and table not in replicas]
    if mixed:
        raise ValueError(
            f"{some(mixed)}: data-parallel, for the dense optimizer to train, in one module with tables of "
            f"replicate_tables ({some(table.path for table in replicas)}). TorchRec looks all data-parallel tables of "
            "a module up together: replicate all of them, or none."
        )
    return replicas


def _why_not(table: Table, fused: tuple[type, Mapping[str, Any]] | None) -> str | None:
    """Return why a table cannot be replicated, or None."""
    kind = table.sharder.module_type
    if kind is EmbeddingCollection:
        return "it belongs to an EmbeddingCollection, of whose data-parallel tables TorchRec makes bags on a CPU"
    if kind is not EmbeddingBagCollection:
        return f"it belongs to a {kind.__name__}"
    if table.parameter.dtype != torch.float32:
        return f"its weights are {table.parameter.dtype}, which the fused kernel rounds in a way of its own"
    if not table.parameter.requires_grad:
        return "it is not trained"
    optimizer = table.fused_optimizer or fused
    if optimizer is None:
        return "it has no fused optimizer, which fused_optimizer=(torch.optim.SGD, {'lr': 0.1}) would give it"
    optimizer_class, kwargs = optimizer
    try:
        update = optimizer_type_to_emb_opt_type(optimizer_class)
    except ValueError:
        update = None
    if update not in _KINDS:
        return f"{optimizer_class.__name__} writes rows without a gradient too; SGD, Adagrad and RowWiseAdagrad do not"
    known = ("lr", "learning_rate", "eps", "optimizer")
    other = sorted(name for name, value in kwargs.items() if name not in known and value)
    if other:
        return f"replicas are not made for {optimizer_class.__name__} with {', '.join(other)}"
    if update is not EmbOptimType.EXACT_SGD and not kwargs.get("eps", KERNEL_EPS) > 0:
        return f"{optimizer_class.__name__} with eps=0 divides 0 by 0 in rows without a gradient"
    return None
