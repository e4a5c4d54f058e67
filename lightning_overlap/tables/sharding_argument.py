"""The argument `sharding`: what users may give, and what they have named by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.types import ShardingPlan, ShardingType

from ..text import unknown_name_message
from .table import Table

ShardingName: TypeAlias = Literal[
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"
]
"""The values of TorchRec's `ShardingType`, for editors and type checkers."""

Sharding: TypeAlias = ShardingName | Mapping[str, ShardingName] | EmbeddingShardingPlanner | ShardingPlan | None
"""A type for all tables, a type by table name, a planner, a plan, or None for TorchRec's planner.

The planner decides about tables that are not named; of those with a fused optimizer only the replicated ones become
data-parallel.
"""


def check_sharding_types(sharding: Sharding) -> Sharding:
    """Return a sharding argument whose types exist somewhere; the tables and the device are not known yet.

    Raises:
        ValueError: A sharding type that does not exist; the message lists the nearest ones.
        TypeError: Not a `Sharding`.
    """
    kinds = [sharding] if isinstance(sharding, str) else sharding.values() if isinstance(sharding, Mapping) else []
    known = {kind.value: kind for kind in ShardingType}
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"sharding: {unknown_name_message('sharding type', str(kind), known)}")
    if not (
        sharding is None
        or isinstance(sharding, (str, Mapping, ShardingPlan))
        or callable(getattr(sharding, "plan", None))
    ):
        raise TypeError(
            "sharding is None, a sharding type, {'table': type}, a planner or a ShardingPlan, "
            f"got {type(sharding).__name__}: {sharding!r}."
        )
    return sharding


def named_types(sharding: Sharding, tables: list[Table]) -> dict[str, str] | None:
    """Return the sharding types that the user has named, by table; None where the plan or planner is the user's."""
    if isinstance(sharding, str):
        return dict.fromkeys((table.name for table in tables), sharding)
    if isinstance(sharding, Mapping):
        return {str(name): kind for name, kind in sharding.items()}
    return {} if sharding is None else None
