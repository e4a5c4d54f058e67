"""What replicating small tables would save: bytes of embeddings and gradients against those of an all-reduce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..profiling import BusyTime
from ..schedules import Stage
from .costs import AFTER_SENDING, EMBEDDINGS, GRADIENTS, Costs, shrunk

NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bags:
    """A table whose pooled embeddings travel: columns on all ranks, and features that each send a row for a sample."""

    name: str
    num_rows: int
    num_columns: int
    num_features: int


def with_replicas(
    tables: Iterable[Bags], costs: Costs, traffic: Mapping[Stage, BusyTime], num_ranks: int
) -> tuple[list[str], Costs] | None:
    """Return the tables that send more bytes than an all-reduce of their gradients, and what a step then costs.

    Args:
        tables: All those whose embeddings travel.
        costs: Of a step's parts, as they are.
        traffic: What a rank sends in a step, by stage, in full precision.
        num_ranks: Ranks.

    Returns:
        None where there is no such table, or where the bytes were not counted stage by stage.
    """
    tables = list(tables)
    sent = sum(traffic[stage].sent for stage in (Stage.EMBEDDING_LOOKUP, Stage.BACKWARD) if stage in traffic)
    link_ms = costs.wire[EMBEDDINGS] + costs.wire[GRADIENTS]
    width = sum(table.num_columns * table.num_features for table in tables)
    if Stage.EMBEDDING_LOOKUP not in traffic or not (sent and link_ms and width):
        return None
    share: dict[str, float] = defaultdict(float)  # column-wise shards have the name of their table
    reduced: dict[str, float] = defaultdict(float)
    for table in tables:
        share[table.name] += table.num_columns * table.num_features / width
        reduced[table.name] += 2 * (num_ranks - 1) / num_ranks * table.num_rows * table.num_columns * NUMBER_BYTES
    chosen = [name for name in share if reduced[name] < share[name] * sent]
    if not chosen:
        return None
    kept = 1 - sum(share[name] for name in chosen)
    all_reduce_ms = sum(reduced[name] for name in chosen) * link_ms / sent
    work = {**costs.work, AFTER_SENDING: costs.work[AFTER_SENDING] + all_reduce_ms}
    return chosen, replace(shrunk(costs, kept), work=work)
