"""Try arms within a training, in blocks of batches: which arm trains next, and what its blocks took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .arms import Arm
from .auto import Auto


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank measured in a block.

    Args:
        arm: Number of the arm.
        ms: A batch, milliseconds; before the clock is read, its begin and end.
        data_ms: A batch's share of what the data loader was waited for.
        void: Why it does not count; empty where it does.
    """

    arm: int
    ms: Any
    data_ms: float
    void: str = ""


class Trial:
    """Rounds of blocks, one for each arm; round r begins with arm r, so that no arm always follows the same one.

    A block has whole optimizer steps, of `per_step` batches each.
    """

    def __init__(self, arms: Sequence[Arm], auto: Auto, per_step: int = 1) -> None:
        self.arms = tuple(arms)
        self._settle = auto.settle
        self._num_timed = -(-auto.block // per_step) * per_step
        self.blocks: list[Block] = []
        self._num = 0  # batches of this block so far
        self._void = ""
        self._begun: tuple[Any, float] | None = None

    @property
    def _place(self) -> int:
        """Number of the arm of the block under way."""
        number, place = divmod(len(self.blocks), len(self.arms))
        return (number + place) % len(self.arms)

    @property
    def arm(self) -> Arm:
        """The arm of the block under way."""
        return self.arms[self._place]

    @property
    def num_rounds(self) -> int:
        """Rounds that are over."""
        return len(self.blocks) // len(self.arms)

    def void(self, why: str) -> None:
        """Let the block under way not count."""
        self._void = self._void or why

    def step(self, mark: Any, data_ms: float) -> bool:
        """Count a batch that has been trained by now; return whether its block is over.

        Args:
            mark: The time.
            data_ms: What the data loader was waited for, in all.
        """
        self._num += 1
        if self._num == self._settle:
            self._begun = mark, data_ms
        if self._num < self._settle + self._num_timed:
            return False
        assert self._begun is not None
        begin, waited_ms = self._begun
        waited_ms = (data_ms - waited_ms) / self._num_timed
        self.blocks.append(Block(self._place, (begin, mark), waited_ms, self._void))
        self._num, self._void = 0, ""
        return True

    def read(self, clock: Any) -> None:
        """Read the clock's marks of the blocks that are over."""
        for place, block in enumerate(self.blocks):
            if isinstance(block.ms, tuple):
                begin, end = map(clock.ms, block.ms)
                self.blocks[place] = replace(block, ms=(end - begin) / self._num_timed)
