"""Choose the tables to replicate: tables that send fewer bytes if they are replicated.

A sharded table sends embeddings and gradients with as many rows as a rank's batch; a replicated table sends a gradient
with as many rows as the table. So tables with fewer rows than a rank's batch are replicated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.types import ShardingPlan
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from ..text import some, unknown_name_message
from .supported_modules import DATA_PARALLEL
from .table import KERNEL_EPS, Table

ReplicateTables: TypeAlias = int | Sequence[str] | None
"""A number n for tables with fewer than n rows (False or 0: none), table names, or None: n is a rank's batch size."""

_KINDS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""Optimizers that do not change rows without a gradient, so that a dense update equals a sparse update."""


def check_replicate_tables(replicate: ReplicateTables) -> None:
    """Check the strategy's argument as far as possible without the tables; raise a TypeError or ValueError."""
    is_names = isinstance(replicate, Sequence) and not isinstance(replicate, str)
    if is_names and all(isinstance(name, str) for name in replicate):  # type: ignore[union-attr]
        return
    if replicate is True or not (replicate is None or isinstance(replicate, int)):
        raise TypeError(
            "replicate_tables must be None (tables with fewer rows than a rank's batch), False, a number of rows, or "
            f"names of tables, got {replicate!r}."
        )
    if isinstance(replicate, int) and replicate < 0:
        raise ValueError(f"replicate_tables must be a number of rows >= 0, got {replicate}. False replicates no table.")


def tables_to_replicate(
    replicate: ReplicateTables,
    tables: list[Table],
    sharding: Mapping[str, str] | None,
    *,
    batch_size: int | None,
    fused: tuple[type, Mapping[str, Any]] | None,
    world_size: int,
) -> frozenset[str]:
    """Return the names of the tables to replicate: the tables that the user names, or else tables with few rows.

    Tables are chosen by their rows only on several ranks, and not with a user's plan or planner. If a module has
    data-parallel tables of the dense optimizer, its other tables are not replicated, since TorchRec looks up all
    data-parallel tables of a module together. A planner identifies tables only by name, so tables with the same name in
    several modules are all replicated, or none is.

    Args:
        replicate: The strategy's argument.
        tables: All tables of the model.
        sharding: Table -> the user's sharding type; these tables are not chosen by their rows. None with a user's plan
            or planner.
        batch_size: Samples per batch and rank; None if unknown.
        fused: Class and arguments of the default fused optimizer, or None.
        world_size: Number of ranks.

    Raises:
        ValueError: A table that the user names does not exist, has another sharding type, or cannot be replicated.
    """
    given = frozenset() if replicate is None or isinstance(replicate, int) else frozenset(replicate)
    kinds = sharding or {}
    known: dict[str, list[Table]] = {}
    for table in tables:
        known.setdefault(table.name, []).append(table)
    for name in sorted(given):
        if name not in known:
            raise ValueError(f"replicate_tables: {unknown_name_message('table', name, known)}")
        if kinds.get(name, DATA_PARALLEL) != DATA_PARALLEL:
            raise ValueError(f"replicate_tables has {name!r}, but sharding makes it {kinds[name]!r}: remove one.")
        for table in known[name]:
            reason = _why_not(table, fused)
            if reason is not None:
                raise ValueError(f"replicate_tables: {table.path} cannot be replicated: {reason}.")
    if given or world_size == 1 or sharding is None:
        return given
    most = int(replicate) if isinstance(replicate, int) else batch_size or 0
    mixed = {table.module for table in tables if kinds.get(table.name) == DATA_PARALLEL}

    def is_small(table: Table) -> bool:
        return table.parameter.shape[0] < most and table.module not in mixed and _why_not(table, fused) is None

    return frozenset(name for name, alike in known.items() if name not in kinds and all(map(is_small, alike)))


def replicas_in(plan: ShardingPlan, tables: list[Table], names: Collection[str], world_size: int) -> list[Table]:
    """Return the tables of a plan that are trained as replicas: the data-parallel tables in `names`.

    Raises:
        ValueError: On several ranks the plan does not make such a table data-parallel, or it makes other tables of the
            module data-parallel, for the dense optimizer.
    """
    whole = []
    for table in tables:
        kind = getattr(table.planned(plan), "sharding_type", None)
        if kind == DATA_PARALLEL:
            whole.append(table)
        elif table.name in names and world_size > 1:
            raise ValueError(
                f"table {table.path} is in replicate_tables, but the plan makes it {kind}: make it data_parallel."
            )
    replicas = [table for table in whole if table.name in names]
    modules = {table.module for table in replicas}
    if mixed := [table.path for table in whole if table.module in modules and table not in replicas]:
        raise ValueError(
            f"the dense optimizer would train the data-parallel tables {some(mixed)}, but replicate_tables has other "
            f"tables of the same module ({some(table.path for table in replicas)}). TorchRec looks up all "
            "data-parallel tables of a module together: replicate all of them, or none."
        )
    return replicas


def _why_not(table: Table, fused: tuple[type, Mapping[str, Any]] | None) -> str | None:
    kind = table.sharder.module_type
    if kind is EmbeddingCollection:
        return "it belongs to an EmbeddingCollection, whose data-parallel tables TorchRec pools on a CPU"
    if kind is not EmbeddingBagCollection:
        return f"it belongs to a {kind.__name__}"
    if table.parameter.dtype != torch.float32:
        return f"its weights are {table.parameter.dtype}, which only the fused kernel rounds correctly"
    if not table.parameter.requires_grad:
        return "it is not trained"
    optimizer = table.fused_optimizer or fused
    if optimizer is None:
        return "it has no fused optimizer; set for example fused_optimizer=(torch.optim.SGD, {'lr': 0.1})"
    optimizer_class, kwargs = optimizer
    try:
        update = optimizer_type_to_emb_opt_type(optimizer_class)
    except ValueError:
        update = None
    if update not in _KINDS:
        return f"{optimizer_class.__name__} changes rows without a gradient; SGD, Adagrad and RowWiseAdagrad do not"
    known = ("lr", "learning_rate", "eps", "optimizer")
    other = sorted(name for name, value in kwargs.items() if name not in known and value)
    if other:
        return f"replicas do not support {optimizer_class.__name__} with {', '.join(other)}"
    if update is not EmbOptimType.EXACT_SGD and not kwargs.get("eps", KERNEL_EPS) > 0:
        return f"{optimizer_class.__name__} with eps=0 divides 0 by 0 in rows without a gradient"
    return None
