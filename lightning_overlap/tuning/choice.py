"""Compare what arms took in their blocks: the same answer on every rank, from what all of them measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..text import aligned, or_dash
from .arms import Arm
from .trial import Block

STALLED = 0.05
"""Share of a block's time by which it waits longer for data than blocks mostly do: a stall, no part of a mode."""

FEWEST = 2
"""Blocks of an arm that count, at least."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an arm took.

    Args:
        arm: Which.
        ms: A batch, the median of its blocks, each that of the slowest rank; None where none counts.
        spread_ms: Half the distance between the quartiles of its blocks.
        num_blocks: Those that count.
    """

    arm: Arm
    ms: float | None
    spread_ms: float | None
    num_blocks: int


def results(arms: Sequence[Arm], ranks: Sequence[Sequence[Block]]) -> list[Result]:
    """Return what each arm took, in the order of the arms.

    Args:
        arms: What was tried.
        ranks: The blocks of every rank, as many on each and of the same arms.
    """
    usual = [median(block.data_ms for block in blocks) for blocks in ranks]
    found: list[list[float]] = [[] for _ in arms]
    for of_ranks in zip(*ranks, strict=True):
        stalled = any(block.data_ms - waits > STALLED * block.ms for block, waits in zip(of_ranks, usual, strict=True))
        if not stalled and not any(block.void for block in of_ranks):
            found[of_ranks[0].arm].append(max(block.ms for block in of_ranks))
    return [
        Result(arm, median(ms) if ms else None, spread(ms) if ms else None, len(ms))
        for arm, ms in zip(arms, found, strict=True)
    ]


def spread(times: Sequence[float]) -> float:
    """Return half the distance between the quartiles; of one time nothing is known, so 0."""
    ordered, quarter = sorted(times), len(times) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2


def is_enough(found: Sequence[Result]) -> bool:
    """Whether every arm has blocks that count."""
    return all(result.num_blocks >= FEWEST for result in found)


def choose(found: Sequence[Result], tie: float) -> Arm | None:
    """Return the fastest arm, or among those as fast the one that holds least; None where nothing counts.

    Args:
        found: What each arm took.
        tie: Share of the fastest one's time up to which others are as fast.
    """
    measured = {one.arm: one.ms for one in found if one.ms is not None and one.num_blocks >= FEWEST}
    if not measured:
        return None
    limit_ms = min(measured.values()) * (1 + tie)
    return min((arm for arm, ms in measured.items() if ms <= limit_ms), key=lambda arm: (arm.held, measured[arm]))


def table(found: Sequence[Result], chosen: Arm | None) -> str:
    """Return what each arm took, for the log."""
    rows = [
        (
            *(one.arm.mode, one.arm.stream, or_dash(one.ms, "{:.2f}"), or_dash(one.spread_ms, "{:.2f}")),
            *(str(one.num_blocks), str(one.arm.schedule.depth), "chosen" if one.arm == chosen else ""),
        )
        for one in found
    ]
    head = ("mode", "stream", "ms per batch", "+-", "blocks", "batches in flight", "")
    return aligned([head, *rows], words=(0, 1, 6))
