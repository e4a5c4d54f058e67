"""Compare what arms took in their blocks: the same answer on every rank, from what all of them measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ..text import aligned
from .arms import Arm
from .trial import Block

STALLED = 0.05
"""Share of a block's time by which it waits longer for data than blocks mostly do: a stall, no part of a mode."""

FEWEST = 2
"""Blocks of an arm that count, at least."""


def times_of(arms: Sequence[Arm], ranks: Sequence[Sequence[Block]]) -> dict[Arm, list[float]]:
    """Return what a batch took in the blocks of each arm that count, milliseconds, each that of the slowest rank.

    Args:
        arms: What was tried.
        ranks: The blocks of every rank, as many on each and of the same arms.
    """
    usual = [median(block.data_ms for block in blocks) for blocks in ranks]
    found: dict[Arm, list[float]] = {arm: [] for arm in arms}
    for of_ranks in zip(*ranks, strict=True):
        stalled = any(block.data_ms - waits > STALLED * block.ms for block, waits in zip(of_ranks, usual, strict=True))
        if not stalled and not any(block.void for block in of_ranks):
            found[arms[of_ranks[0].arm]].append(max(block.ms for block in of_ranks))
    return found


def spread(times: Sequence[float]) -> float:
    """Return half the distance between the quartiles; of one time nothing is known, so 0."""
    ordered, quarter = sorted(times), len(times) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2


def is_enough(found: Mapping[Arm, Sequence[float]]) -> bool:
    """Whether every arm has blocks that count."""
    return all(len(times) >= FEWEST for times in found.values())


def choose(found: Mapping[Arm, Sequence[float]], tie: float) -> Arm | None:
    """Return the fastest arm, or among those as fast the one that holds least; None where nothing counts.

    Args:
        found: What a batch took in the blocks of each arm, of which the median counts.
        tie: Share of the fastest one's time up to which others are as fast.
    """
    measured = {arm: median(times) for arm, times in found.items() if len(times) >= FEWEST}
    if not measured:
        return None
    limit_ms = min(measured.values()) * (1 + tie)
    return min((arm for arm, ms in measured.items() if ms <= limit_ms), key=lambda arm: (arm.held, measured[arm]))


def table(found: Mapping[Arm, Sequence[float]], chosen: Arm | None) -> str:
    """Return what each arm took, for the log."""
    rows = [("mode", "stream", "ms per batch", "+-", "blocks", "batches in flight", "")]
    for arm, times in found.items():
        took = (f"{median(times):.2f}", f"{spread(times):.2f}") if times else ("-", "-")
        is_chosen = "chosen" if arm == chosen else ""
        rows.append((arm.mode, arm.stream, *took, str(len(times)), str(arm.schedule.depth), is_chosen))
    return aligned(rows, words=(0, 1, 6))
