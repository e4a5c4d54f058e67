"""A mode with its options: one value, checked on construction. Modes and stream policies are found by name."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from ..text import unknown_name_message
from .modes import ASYNC_LOOKUP, FUSED_SPARSE_DIST, MODES, STREAMS, ModeName, async_lookup, defer_update
from .schedule import Schedule, check_number
from .stages import Stage, StreamName

_T = TypeVar("_T")


class Schedules(Protocol):
    """The schedules of a run: one or several."""

    @property
    def depth(self) -> int:
        """The largest number of batches in flight at once."""

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained, the same on all ranks."""


@dataclass(frozen=True)
class SequentialSchedule:
    """Two or more schedules, each starting at a batch number that counts over the whole training.

    In a part that starts at batch n with staleness k, a lookup of batch N in a fused table sees the updates of all
    batches before max(n, N - k). A part that follows a staler part uses the lookups made under it.
    """

    parts: tuple[tuple[int, Schedule], ...]  # `(first batch, schedule)` in order, starting with batch 0

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained."""
        return next(schedule for start, schedule in reversed(self.parts) if batch >= start)

    @property
    def depth(self) -> int:
        """The largest number of batches in flight at once."""
        return max(schedule.depth for _, schedule in self.parts)


def _names_unknown_options(cls: type[_T]) -> type[_T]:
    changed: Any = cls
    init, known = changed.__init__, [field.name for field in fields(changed)]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise TypeError(f"{cls.__name__}: {unknown_name_message('option', name, known)}")
        init(self, *args, **options)

    changed.__init__ = checked_init
    return cls


@_names_unknown_options
@dataclass(frozen=True, slots=True)
class Mode:
    """A mode with its options, for `OverlapEmbeddingStrategy(pipeline=Mode("semi_sync", start_batch=1000))`.

    Args:
        name: A mode's name (see `lightning_overlap.MODES`), or a `Schedule`.
        staleness: For `async_lookup`: number of batches whose updates a lookup does not see, at least 1. None: 2.
        defer_update: In a stale mode, overlap the all-to-all of gradients with the optimizer step and the next forward,
            and update the tables afterwards. The staleness does not change. An evaluation, a checkpoint and the end of
            an epoch see up-to-date tables; a callback at the end of a batch does not see that batch's update.
        start_batch: The first batch of a stale mode, counted over all epochs. Earlier batches train exactly, as in
            `fused_sparse_dist`. The switch loses no batch, repeats no lookup, and does not wait for the device.
        end_batch: The batch that returns to exact training; it still uses lookups that are under way.

    Raises:
        ValueError: No mode has this name (the message lists the nearest names), or the mode rejects an option.
        TypeError: An option has the wrong type, or no option has this name.
    """

    name: ModeName | Schedule = "fused_sparse_dist"
    staleness: int | None = None
    defer_update: bool = False
    start_batch: int = 0
    end_batch: int | None = None

    def __post_init__(self) -> None:
        _ = self.schedules  # raises an error if a name is unknown or an option does not fit

    @property
    def schedule(self) -> Schedule:
        """The mode's table, with its options applied."""
        if self.name == "auto":
            if any(getattr(self, one.name) != one.default for one in fields(self)[1:]):
                raise ValueError(
                    "pipeline='auto' compares modes of equal losses and takes no mode options. Name a mode to set them."
                )
            raise ValueError(
                "'auto' is not a mode: the strategy's pipeline='auto' compares modes of equal losses. Name one of "
                "them, 'fused_sparse_dist' for example."
            )
        schedule = self.name if isinstance(self.name, Schedule) else _named("pipeline", self.name, MODES, ("auto",))
        if self.staleness is not None:
            if self.name != ASYNC_LOOKUP.name:
                raise ValueError(
                    f"staleness={self.staleness!r}: the order of stages of {schedule.name!r} fixes its staleness at "
                    f"{schedule.staleness}. To choose the staleness, use Mode({ASYNC_LOOKUP.name!r}, staleness=...)."
                )
            schedule = async_lookup(self.staleness)
        if self.defer_update:
            schedule = defer_update(schedule)
        return schedule

    @property
    def schedules(self) -> Schedules:
        """The tables to walk: exact before `start_batch` and from `end_batch` on."""
        schedule, start, end = self.schedule, self.start_batch, self.end_batch
        check_number("start_batch", start)
        if end is not None:
            check_number("end_batch", end)
            if end <= start:
                raise ValueError(f"end_batch must be larger than start_batch={start}, got {end}.")
        elif not start:
            return schedule
        if not schedule.staleness:
            raise ValueError(
                f"start_batch={start}, end_batch={end}: {schedule.name!r} is always exact. Use them with a stale mode "
                "(semi_sync, async_lookup)."
            )
        stream, of_exact = (table[Stage.EMBEDDING_LOOKUP].stream for table in (schedule, FUSED_SPARSE_DIST))
        if stream is not of_exact:
            raise ValueError(
                f"all lookups of a run must use one stream, got {FUSED_SPARSE_DIST.name!r} on {of_exact}, "
                f"{schedule.name!r} on {stream}."
            )
        before = [(0, FUSED_SPARSE_DIST)] if start else []
        after = [] if end is None else [(end, FUSED_SPARSE_DIST)]
        return SequentialSchedule((*before, (start, schedule), *after))


def resolve_mode(pipeline: str | Schedule | Mode) -> Mode:
    """Return the mode that a name or a schedule stands for; a `Mode` is returned as is."""
    return pipeline if isinstance(pipeline, Mode) else Mode(pipeline)  # type: ignore[arg-type]


def resolve_stream(stream: str) -> StreamName:
    """Return the stream on which a policy runs early lookups; an unknown name is a ValueError."""
    return _named("stream", stream, STREAMS)


def _named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name ({', '.join((*known, *also))}), got {name!r}.")
    if name not in known:
        raise ValueError(unknown_name_message(kind, name, (*known, *also)))
    return known[name]
