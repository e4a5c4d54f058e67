"""Look up what a user names: a mode, a stream policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..text import unknown_name_message
from .modes import STREAMS
from .stages import StreamName

_T = TypeVar("_T")


def resolve_stream(stream: str) -> StreamName:
    """Return the stream that a policy's name puts early lookups on.

    Raises:
        ValueError: No policy has this name; the message lists the nearest names.
        TypeError: Not a string.
    """
    return named("stream", stream, STREAMS)


def named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
    """Return what a name stands for.

    Args:
        kind: The argument's name, for the message.
        name: The user's name.
        known: The names that it may have.
        also: Names that the caller takes itself, for the message.

    Raises:
        ValueError: It is unknown; the message lists the nearest names.
        TypeError: It is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a name ({', '.join((*known, *also))}), got {name!r}.")
    if name not in known:
        raise ValueError(unknown_name_message(kind, name, (*known, *also)))
    return known[name]
