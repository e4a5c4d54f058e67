"""Compare arms during training, in blocks of batches: choose the next arm and find the fastest.

All ranks choose alike, from the measurements of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ..profiling import Timestamps
from ..text import aligned, or_dash
from .arms import Arm
from .auto import Auto

STALLED = 0.05
"""A block does not count if its wait for data exceeds the median wait by more than this share of the block's time."""

FEWEST = 2
"""Blocks of an arm that must count."""


class Block(NamedTuple):
    """One rank's measurements of a block."""

    arm: Arm
    ms: float
    """Mean time of a batch."""
    data_ms: float
    """Mean time per batch in which the host waited for the data loader."""
    void: str = ""
    """Why the block does not count; empty if it does."""


class Trial:
    """Rounds of blocks, a block for each arm; round r begins with arm r, so that an arm follows different arms.

    Args:
        arms: The arms to try.
        auto: The numbers of batches and rounds.
        clock: Takes time stamps, on CUDA with events that are read after the trial.
        per_step: Batches per optimizer step; a block has whole steps.
    """

    def __init__(self, arms: Sequence[Arm], auto: Auto, clock: Timestamps, per_step: int) -> None:
        self.arms, self.clock = tuple(arms), clock
        self._settle, self._rounds = auto.settle, auto.rounds
        self._num_timed = -(-auto.block // per_step) * per_step
        self._over: list[tuple[Arm, Any, Any, float, str]] = []  # `Block`s with their begin and end, not read yet
        self._num = 0  # batches of this block so far
        self._void = ""  # why this block does not count
        self._begun: tuple[Any, float] | None = None  # mark and `data_ms` at the first batch that is timed

    @property
    def block(self) -> int:
        """Batches of a block, including untimed batches."""
        return self._settle + self._num_timed

    @property
    def num_batches(self) -> int:
        """Batches of all rounds, without the rounds added to replace blocks that do not count."""
        return self._rounds * len(self.arms) * self.block

    @property
    def num_void(self) -> int:
        """Finished blocks that do not count, without stalls of a data loader, which `times_of` finds."""
        return sum(bool(void) for *_, void in self._over)

    @property
    def num_over(self) -> tuple[int, int]:
        """Finished rounds, and finished blocks of the current round."""
        return divmod(len(self._over), len(self.arms))

    @property
    def arm(self) -> Arm:
        """The arm of the current block."""
        return self.arms[sum(self.num_over) % len(self.arms)]

    def void(self, why: str) -> None:
        """Exclude the current block from the comparison; `why` is the reason."""
        self._void = self._void or why

    def step(self, data_ms: float) -> bool:
        """Count a trained batch; return whether its block is over.

        Args:
            data_ms: Total time in the fit so far in which the host waited for the data loader.
        """
        mark: Any = self.clock.mark()
        self._num += 1
        if self._num == self._settle:
            self._begun = mark, data_ms
        if self._num < self.block:
            return False
        assert self._begun is not None
        begin, waited_ms = self._begun
        self._over.append((self.arm, begin, mark, (data_ms - waited_ms) / self._num_timed, self._void))
        self._num, self._void = 0, ""
        return True

    def blocks(self) -> list[Block]:
        """Wait for the device and return the finished blocks."""
        self.clock.wait()
        ms = self.clock.ms
        return [
            Block(arm, (ms(end) - ms(begin)) / self._num_timed, data_ms, void)
            for arm, begin, end, data_ms, void in self._over
        ]


def times_of(ranks: Sequence[Sequence[Block]]) -> dict[Arm, list[float]]:
    """Return arm -> time of a batch on the slowest rank, in ms, in each block that counts.

    Args:
        ranks: The blocks of every rank, for the same arms in the same order.
    """
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
    """Return the arm with the fastest median; None if no arm has `FEWEST` blocks.

    Args:
        found: Arm -> time of a batch in each block, in ms.
        tie: Arms within this share of the fastest arm's time tie; ties go to the arm that uses the least memory.
    """
    return min(as_fast(found, tie), key=lambda arm: (arm.held, median(found[arm])), default=None)


def as_fast(found: Mapping[Arm, Sequence[float]], tie: float) -> list[Arm]:
    """Return the arms with `FEWEST` blocks whose median is within `tie` of the fastest median.

    They keep the order of `found`, so that all ranks choose alike where arms are equal.
    """
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
