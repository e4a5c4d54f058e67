"""What the monitor prices at the end of a run, from what every rank has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..plugin import OverlapEmbeddingStrategy
from ..profiling import Breakdown, Price
from ..schedules import Schedule
from ..tables import kernel_shards
from ..text import some
from ..tuning import Bags, Costs, can_be_priced, over_ranks, prices, shrunk, with_replicas

FP16 = 0.5
"""Share of their bytes that embeddings and gradients keep in FP16."""


@dataclass(frozen=True, slots=True)
class OfRank:
    """What one rank has measured; no mean and no costs where that is nothing."""

    mean: Breakdown | None
    sync_lines: list[str]
    """About its host syncs."""
    costs: Costs | None
    """The mean costs of a step's parts."""
    steps_ms: list[float]
    bags: list[Bags]
    """Its shards of tables whose pooled embeddings travel."""


def travelling_bags(model: nn.Module) -> list[Bags]:
    """Return this rank's shards of the tables whose pooled embeddings travel; empty where something else does, too."""
    try:
        kernels = [kernel for kernel in kernel_shards(model) if not kernel.is_replicated]
    except ValueError:  # tables whose rows cannot be told
        return []
    found = []
    for kernel in kernels:
        for place, shard in enumerate(kernel.shards):
            *_, container, name, _ = shard.name.split(".")
            whole = shard.first_row == 0 and shard.weight.shape[0] == shard.shape[0]
            if container != "embedding_bags" or not whole:
                return []
            columns, features = int(shard.weight.shape[1]), kernel.table_of_feature.count(place)
            found.append(Bags(name, shard.shape[0], columns, features))
    return found


def price(strategy: OverlapEmbeddingStrategy, schedule: Schedule, ranks: Sequence[OfRank]) -> list[Price]:
    """Return what a step would take with something changed, that of the mode itself first.

    Nothing on one rank, where nothing travels, and in modes that cannot be priced.
    """
    means = [one.mean for one in ranks if one.mean is not None]
    of_ranks = [one.costs for one in ranks if one.costs is not None]
    if len(ranks) < 2 or len(means) < len(ranks) or not can_be_priced(schedule):
        return []
    slowest = min(range(len(ranks)), key=lambda rank: means[rank].blocked_ms)
    costs, changed = over_ranks(of_ranks, slowest), {}
    if strategy.quantized_comms is None:
        changed["the same, quantized_comms='fp16'"] = shrunk(costs, FP16)
        bags = [table for one in ranks for table in one.bags] if all(one.bags for one in ranks) else []
        replicated = with_replicas(bags, costs, means[slowest].traffic, len(ranks))
        if replicated is not None:
            names = dict.fromkeys(replicated[0])
            changed[f"the same, {len(names)} tables replicated ({some(names, 3)})"] = replicated[1]
    return prices(schedule, costs, ranks[slowest].steps_ms, changed)
