"""Compare arms by their blocks of batches; all ranks choose alike, from the measurements of all ranks."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ..text import aligned, or_dash
from .arms import Arm

STALLED = 0.05  # a block does not count if its wait for data exceeds the median by this share of the block's time
FEWEST = 2  # blocks of an arm that must count


class Block(NamedTuple):
    """One rank's measurements of a block, per batch."""

    arm: Arm
    ms: float
    data_ms: float  # in which the host waited for the data loader
    void: str = ""  # why the block does not count; empty if it does


def times_of(ranks: Sequence[Sequence[Block]]) -> dict[Arm, list[float]]:
    """Return arm -> time of a batch on the slowest rank, in ms, in each block that counts, from each rank's blocks."""
    usual = [median(block.data_ms for block in blocks) for blocks in ranks]
    found: dict[Arm, list[float]] = {block.arm: [] for block in ranks[0]}
    for of_ranks in zip(*ranks, strict=True):
        stalled = any(block.data_ms - waits > STALLED * block.ms for block, waits in zip(of_ranks, usual, strict=True))
        if not stalled and not any(block.void for block in of_ranks):
            found[of_ranks[0].arm].append(max(block.ms for block in of_ranks))
    return found


def spread(times: Sequence[float]) -> float | None:
    """Return half the distance between the quartiles; None for a single time."""
    if len(times) < 2:
        return None
    ordered, quarter = sorted(times), len(times) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2


def choose(found: Mapping[Arm, Sequence[float]], tie: float) -> Arm | None:
    """Return the arm of `as_fast` that uses the least memory, the faster of two that use the same; None without one."""
    return min(as_fast(found, tie), key=lambda arm: (arm.held, median(found[arm])), default=None)


def as_fast(found: Mapping[Arm, Sequence[float]], tie: float) -> list[Arm]:
    """Return the arms with `FEWEST` blocks whose median is within `tie` of the fastest, in the order of `found`."""
    measured = {arm: median(times) for arm, times in found.items() if len(times) >= FEWEST}
    limit_ms = min(measured.values(), default=0.0) * (1 + tie)
    return [arm for arm, ms in measured.items() if ms <= limit_ms]


def table(found: Mapping[Arm, Sequence[float]], chosen: Arm | None) -> str:
    """Return a table of the arms' times, for the log."""
    rows = [("mode", "stream", "ms per batch", "+-", "blocks", "batches in flight", "")]
    for arm, times in found.items():
        took = or_dash(median(times) if times else None, "{:.2f}"), or_dash(spread(times), "{:.2f}")
        is_chosen = "chosen" if arm == chosen else ""
        rows.append((arm.mode, arm.stream, *took, str(len(times)), str(arm.schedule.depth), is_chosen))
    return aligned(rows, words=(0, 1, 6))
