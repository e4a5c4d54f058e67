"""Price other modes at the end of a run, from what the monitors of all ranks have measured."""

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
    """What one rank has measured; `mean` and `costs` are None if it has measured no step."""

    mean: Breakdown | None
    """The mean breakdown of the measured steps."""
    sync_lines: list[str]
    """Lines for the closing table about its host syncs."""
    costs: Costs | None
    """The mean costs of a step's parts."""
    steps_ms: list[float]
    """Duration of each measured step."""
    bags: list[Bags]
    """Its shards of tables whose pooled embeddings are sent between ranks (`travelling_bags`)."""


def travelling_bags(model: nn.Module) -> list[Bags]:
    """Return this rank's shards of tables whose pooled embeddings are sent between ranks.

    The list is empty if row-wise shards or sequences (EmbeddingCollection) are sent too: these cannot be priced.
    """
    try:
        kernels = [kernel for kernel in kernel_shards(model) if not kernel.is_replicated]
    except ValueError:  # tables whose rows have no fixed numbers
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
    """Return the price of a step in the mode itself, then in other modes and with other options.

    Args:
        strategy: The strategy of the run.
        schedule: The mode that was measured.
        ranks: What each rank has measured, by rank.

    Returns:
        The prices; none on one rank, if a rank has measured nothing, and for modes that cannot be priced.
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
