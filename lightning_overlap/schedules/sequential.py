"""Schedules that follow one another in a run: an exact warm-up before a stale mode, and a switch back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .modes import FUSED_SPARSE_DIST
from .schedule import Schedule, check_number
from .stages import Stage


class Schedules(Protocol):
    """The schedules of a run: one, or several that follow one another."""

    @property
    def depth(self) -> int:
        """The largest number of batches in flight at once."""

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained, the same on all ranks."""


@dataclass(frozen=True)
class SequentialSchedule:
    """Two or more schedules, each starting at a batch number that counts over the whole training.

    The executor switches between two iterations and keeps the batches in flight. It does not repeat their issued
    stages, and at once issues the stages that the next table would have issued by then. So in a part that starts at
    batch n and has staleness k, a lookup of batch N in a fused table sees the updates of all batches before
    max(n, N - k). A part that follows a staler part uses the lookups made under that part.
    """

    parts: tuple[tuple[int, Schedule], ...]
    """`(first batch, schedule)` in order, starting with batch 0."""

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained."""
        return next(schedule for start, schedule in reversed(self.parts) if batch >= start)

    @cached_property
    def depth(self) -> int:
        """The largest number of batches in flight at once."""
        return max(schedule.depth for _, schedule in self.parts)


def with_exact_warmup(
    schedule: Schedule, start_batch: int = 0, end_batch: int | None = None
) -> Schedule | SequentialSchedule:
    """Return a stale schedule with `fused_sparse_dist`, which is exact, before and after it.

    Args:
        schedule: A mode with a staleness of 1 or more.
        start_batch: Number of batches to train in `fused_sparse_dist` first.
        end_batch: The batch that returns to `fused_sparse_dist`; None if no batch does.

    Raises:
        ValueError: A number is negative, `end_batch` is not larger than `start_batch`, the schedule is exact, or
            it looks up on another stream than `fused_sparse_dist`.
        TypeError: A number of batches is not an integer.
    """
    check_number("start_batch", start_batch)
    if end_batch is not None:
        check_number("end_batch", end_batch)
        if end_batch <= start_batch:
            raise ValueError(f"end_batch must be larger than start_batch={start_batch}, got {end_batch}.")
    elif not start_batch:
        return schedule
    if not schedule.staleness:
        raise ValueError(
            f"start_batch={start_batch}, end_batch={end_batch}: {schedule.name!r} is always exact. Use them with a "
            "stale mode (semi_sync, async_lookup)."
        )
    exact, stream = FUSED_SPARSE_DIST, schedule[Stage.EMBEDDING_LOOKUP].stream
    if stream is not exact[Stage.EMBEDDING_LOOKUP].stream:
        raise ValueError(
            f"all lookups of a run must use one stream, got {exact.name!r} on "
            f"{exact[Stage.EMBEDDING_LOOKUP].stream}, {schedule.name!r} on {stream}."
        )
    before = [(0, exact)] if start_batch else []
    after = [] if end_batch is None else [(end_batch, exact)]
    return SequentialSchedule((*before, (start_batch, schedule), *after))
