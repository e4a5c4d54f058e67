"""Check the options that choose a schedule: a mode's name, a staleness, a stream policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..text import unknown_name_message
from .modes import ASYNC_LOOKUP, MODES, STREAMS, async_lookup, defer_update, frozen_window
from .schedule import Schedule
from .stages import StreamName

_T = TypeVar("_T")


def resolve_schedule(
    pipeline: str | Schedule,
    staleness: int | None = None,
    deferred: bool = False,
    frozen: bool = False,
    also: tuple[str, ...] = (),
) -> Schedule:
    """Return the schedule of a mode's name, or the given schedule.

    Args:
        pipeline: A mode's name, or a schedule.
        staleness: Of `async_lookup`; None for its default.
        deferred: Whether to defer the updates, see `defer_update`.
        frozen: Whether to make them with the optimizer step, see `frozen_window`.
        also: Names that the caller takes itself, for the message.

    Raises:
        ValueError: No mode has this name (the message lists the nearest names), the mode takes no staleness, the
            staleness is less than 1, or the mode cannot defer its updates or make them with the optimizer step.
        TypeError: `pipeline` is neither a name nor a Schedule, or the staleness is no integer.
    """
    schedule = pipeline if isinstance(pipeline, Schedule) else _named("pipeline", pipeline, MODES, also)
    if staleness is not None:
        if pipeline != ASYNC_LOOKUP.name:
            raise ValueError(
                f"staleness={staleness!r}: {schedule.name!r} has a staleness of {schedule.staleness} by its order of "
                f"stages. To choose it take pipeline={ASYNC_LOOKUP.name!r}."
            )
        schedule = async_lookup(staleness)
    if deferred:
        schedule = defer_update(schedule)
    return frozen_window(schedule) if frozen else schedule


def check_stash(stash_gradients: bool, schedule: Schedule) -> bool:
    """Return `stash_gradients`, whether dense gradients are applied as many steps late as the staleness.

    Raises:
        ValueError: The mode has no staleness.
    """
    if stash_gradients and not schedule.staleness:
        raise ValueError(
            f"stash_gradients: {schedule.name!r} has a staleness of 0, and so would the dense part's be. It is for "
            "semi_sync and async_lookup."
        )
    return bool(stash_gradients)


def resolve_stream(stream: str) -> StreamName:
    """Return the stream that a policy's name puts early lookups on.

    Raises:
        ValueError: No policy has this name; the message lists the nearest names.
        TypeError: Not a string.
    """
    return _named("stream", stream, STREAMS)


def _named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name ({', '.join((*known, *also))}), got {name!r}.")
    if name not in known:
        raise ValueError(unknown_name_message(kind, name, (*known, *also)))
    return known[name]
