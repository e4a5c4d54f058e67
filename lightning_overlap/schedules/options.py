"""Look up a mode or a stream policy by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..text import unknown_name_message
from .modes import STREAMS
from .stages import StreamName

_T = TypeVar("_T")


def resolve_stream(stream: str) -> StreamName:
    """Return the stream on which a policy runs early lookups.

    Raises:
        ValueError: No policy has this name; the message lists the nearest names.
        TypeError: The name is not a string.
    """
    return named("stream", stream, STREAMS)


def named(kind: str, name: object, known: Mapping[str, _T], also: tuple[str, ...] = ()) -> _T:
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
