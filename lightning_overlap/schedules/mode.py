"""A mode with its options: one value, checked on construction. Modes and stream policies are found by name."""

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from ..text import nearest_names, unknown_name_message
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
        name: A mode's name (see `lightning_overlap.MODES`), a `Schedule`, or the text of one (`str(schedule)`). A name
            as the log prints it has options, too: "async_lookup_3_deferred" is `staleness=3, defer_update=True`.
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

    name: ModeName | str | Schedule = "fused_sparse_dist"
    staleness: int | None = None
    defer_update: bool = False
    start_batch: int = 0
    end_batch: int | None = None

    def __post_init__(self) -> None:
        self._read_name()
        _ = self.schedules  # raises an error if these batches cannot be

    def _read_name(self) -> None:
        """Turn a schedule's text into the schedule, and a name that the log prints into a mode and its options."""
        name = self.name
        if not isinstance(name, str) or name in MODES:
            return
        if ":" in name:
            object.__setattr__(self, "name", Schedule.parse(name))
        elif (printed := mode_printed_as(name)) is not None:
            if None not in (self.staleness, printed.staleness) and self.staleness != printed.staleness:
                raise ValueError(
                    f"staleness={self.staleness!r}: the name {name!r} says {printed.staleness}. "
                    f"Use Mode({printed.name!r}, staleness=...)."
                )
            for option in fields(self):
                value = getattr(printed, option.name)
                if option.name == "name" or value != option.default:
                    object.__setattr__(self, option.name, value)

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
        if isinstance(self.name, str) and self.name not in MODES:
            raise ValueError(unknown_mode_message("pipeline", self.name, (*MODES, "auto")))
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


def mode_printed_as(name: str) -> Mode | None:
    """Return the mode whose table has this name, as logs print it ("async_lookup_3_deferred"), or None."""
    number = re.search(r"_(\d{1,9})(?=_|$)", name)
    staleness = None if number is None else int(number[1])
    switches = [option.name for option in fields(Mode) if option.default is False]
    for known in MODES:
        for values in itertools.product((False, True), repeat=len(switches)):
            try:
                mode = Mode(known, staleness, **dict(zip(switches, values, strict=True)))
            except ValueError:  # this mode does not take these options
                continue
            if mode.schedule.name == name:
                return mode
    return None


def unknown_mode_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown mode; it never suggests a mode of another staleness than the name says."""
    if name.lstrip().startswith("Mode("):
        return (
            f"{kind} is a text, {name!r}. In Python write the Mode without quotes; in YAML write "
            "{class_path: lightning_overlap.Mode, init_args: {name: async_lookup, staleness: 3}}."
        )
    known = list(known)
    words, number = re.split(r"[\W_]*\d|,", name)[0], re.search(r"\d{1,9}", name)
    if number is None or not any(one in MODES and MODES[one].staleness for one in nearest_names(words, known)):
        return unknown_name_message(kind, name, known)
    options: dict[str, object] = {"staleness": int(number[0])}
    if "defer" in name:
        options["defer_update"] = True
    for option, before in (("start_batch", "before batch"), ("end_batch", "from batch")):  # as the log says it
        if (batch := re.search(rf"{before} (\d{{1,9}})", name)) is not None:
            options[option] = int(batch[1])
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    meant = f"Mode({ASYNC_LOOKUP.name!r}, {given})" if options["staleness"] else repr(FUSED_SPARSE_DIST.name)
    return f"unknown {kind} {name!r}. Did you mean {meant}? Known: {', '.join(known)}."


def resolve_mode(pipeline: str | Schedule | Mode) -> Mode:
    """Return the mode that a name or a schedule stands for; a `Mode` is returned as is."""
    return pipeline if isinstance(pipeline, Mode) else Mode(pipeline)


def resolve_stream(stream: str) -> StreamName:
    """Return the stream on which a policy runs early lookups; an unknown name is a ValueError."""
    return _named("stream", stream, STREAMS)


def _named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name ({', '.join((*known, *also))}), got {name!r}.")
    if name not in known:
        raise ValueError(unknown_name_message(kind, name, (*known, *also)))
    return known[name]
