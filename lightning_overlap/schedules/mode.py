"""A mode with its options: one value, checked on construction. Modes and stream policies are found by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..text import unknown_name_message
from .modes import ASYNC_LOOKUP, MODES, STREAMS, ModeName, async_lookup, defer_update, frozen_window
from .schedule import Schedule
from .sequential import Schedules, with_exact_warmup
from .stages import StreamName

_T = TypeVar("_T")


def _names_unknown_options(cls: Any) -> Any:
    """Let a dataclass name an unknown option with the nearest valid ones."""
    init, known = cls.__init__, [field.name for field in fields(cls)]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise TypeError(f"{cls.__name__}: {unknown_name_message('option', name, known)}")
        init(self, *args, **options)

    cls.__init__ = checked_init
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
        frozen_window: With `accumulate_grad_batches=k`, in an exact mode with sparse stages: update the tables at the
            optimizer step, with the k batches' updates in order. All k lookups see the tables as of the previous
            step, so only one lookup in k waits for an update. Otherwise each batch's backward updates the tables.
        stash_gradients: In a mode of staleness k, each step of the dense optimizers applies the gradients from k steps
            earlier, which are as old as the embeddings. The first k steps apply nothing; the end of `fit` applies the
            gradients of the last k steps. A checkpoint holds the waiting gradients.
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
    frozen_window: bool = False
    stash_gradients: bool = False
    start_batch: int = 0
    end_batch: int | None = None

    def __post_init__(self) -> None:
        schedule = self.schedule
        with_exact_warmup(schedule, self.start_batch, self.end_batch)
        if self.stash_gradients and not schedule.staleness:
            raise ValueError(
                f"stash_gradients: {schedule.name!r} has a staleness of 0, so no gradient would be late. Use it with "
                "semi_sync or async_lookup."
            )

    @property
    def schedule(self) -> Schedule:
        """The mode's table, with its options applied."""
        if self.name == "auto":
            raise ValueError(
                "pipeline='auto' compares modes of equal losses and takes no mode options. Name a mode to set them."
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
        return frozen_window(schedule) if self.frozen_window else schedule

    @property
    def schedules(self) -> Schedules:
        """The tables to walk: exact before `start_batch` and from `end_batch` on."""
        return with_exact_warmup(self.schedule, self.start_batch, self.end_batch)


def resolve_mode(pipeline: str | Schedule | Mode) -> Mode:
    """Return the mode that a name or a schedule stands for; a `Mode` is returned as is."""
    return pipeline if isinstance(pipeline, Mode) else Mode(pipeline)  # type: ignore[arg-type]


def resolve_stream(stream: str) -> StreamName:
    """Return the stream on which a policy runs early lookups.

    Raises:
        ValueError: No policy has this name; the message lists the nearest names.
        TypeError: The name is not a string.
    """
    return _named("stream", stream, STREAMS)


def _named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
    """Return the entry of a name; messages name the argument (`kind`) and further valid names (`also`).

    Raises:
        ValueError: The name is unknown; the message lists the nearest names.
        TypeError: The name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name ({', '.join((*known, *also))}), got {name!r}.")
    if name not in known:
        raise ValueError(unknown_name_message(kind, name, (*known, *also)))
    return known[name]
