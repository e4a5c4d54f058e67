"""Schedules that follow one another in a run: an exact warm-up before a stale mode, and a switch back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .modes import FUSED_SPARSE_DIST
from .schedule import Schedule, check_number
from .stages import Stage


class Schedules(Protocol):
    """What a run walks: one schedule, or several that follow one another."""

    @property
    def depth(self) -> int:
        """Batches in flight at once, at most."""

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained; all ranks get the same one."""


@dataclass(frozen=True)
class SequentialSchedule:
    """Two or more schedules, each from the batch on that it begins with, counted over the whole training.

    The executor goes from one to the next between two iterations. Batches in flight stay: what was issued for them is
    not issued again, and what the next table would have issued by then is issued at once. So a lookup of batch N in a
    fused table, in a part that begins with batch n and has staleness k, sees the updates of all batches before
    max(n, N - k). A part that follows a staler one uses the lookups that were made under it.
    """

    parts: tuple[tuple[int, Schedule], ...]
    """`(first batch, schedule)` in order, the first one from batch 0 on."""

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained."""
        return next(schedule for start, schedule in reversed(self.parts) if batch >= start)

    @cached_property
    def depth(self) -> int:
        """Batches in flight at once, at most."""
        return max(schedule.depth for _, schedule in self.parts)


def with_exact_warmup(
    schedule: Schedule, start_batch: int = 0, end_batch: int | None = None
) -> Schedule | SequentialSchedule:
    """Return a stale schedule with `fused_sparse_dist`, which is exact, before and after it.

    Args:
        schedule: A mode with a staleness of 1 or more.
        start_batch: How many batches are trained in `fused_sparse_dist` first.
        end_batch: From this batch on it is `fused_sparse_dist` again; None: never.

    Raises:
        ValueError: A number is negative, or `end_batch` is not larger than `start_batch`, or the schedule is exact, or
            it looks up on another stream than `fused_sparse_dist`.
        TypeError: A number of batches is not an integer.
    """
    check_number("start_batch", start_batch)
    if end_batch is not None:
        check_number("end_batch", end_batch)
        if end_batch <= start_batch:
            raise ValueError(f"end_batch comes after start_batch={start_batch}, got {end_batch}.")
    elif not start_batch:
        return schedule
    if not schedule.staleness:
        raise ValueError(
            f"start_batch={start_batch}, end_batch={end_batch}: {schedule.name!r} is exact from the first batch to the "
            "last. They are for modes with a staleness (semi_sync, async_lookup)."
        )
    exact, stream = FUSED_SPARSE_DIST, schedule[Stage.EMBEDDING_LOOKUP].stream
    if stream is not exact[Stage.EMBEDDING_LOOKUP].stream:
        raise ValueError(
            f"one stream orders all lookups and updates of a run, got {exact.name!r} on "
            f"{exact[Stage.EMBEDDING_LOOKUP].stream}, {schedule.name!r} on {stream}."
        )
    before = [(0, exact)] if start_batch else []
    after = [] if end_batch is None else [(end_batch, exact)]
    return SequentialSchedule((*before, (start_batch, schedule), *after))
