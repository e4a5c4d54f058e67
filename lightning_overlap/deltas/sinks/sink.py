"""The errors of sinks, and what a sink may have besides its protocol."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from ..files import DeltaSink, Piece, joined


class SinkError(OSError):
    """A sink cannot be reached, read or written."""


def check_sink(sink: DeltaSink) -> None:
    """Raise a SinkError if files cannot be written, as far as the sink can tell."""
    getattr(sink, "check", lambda: list(sink.names()))()


def writes_pieces(sink: Any) -> Callable[[str, Sequence[Piece]], None]:
    """Return `write_pieces`, or if the sink lacks it, or a subclass or instance overrides only `write`, `write`."""
    first = (vars(kind) for kind in type(sink).__mro__ if "write" in vars(kind) or "write_pieces" in vars(kind))
    if "write" in getattr(sink, "__dict__", ()) or "write_pieces" not in next(first, ()):
        return lambda name, pieces: sink.write(name, joined(pieces))
    return cast(Callable[[str, Sequence[Piece]], None], sink.write_pieces)


@contextmanager
def as_sink_error(problem: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Replace exceptions of some `kinds` by a `SinkError` with problem, reason (without passwords) and advice."""
    try:
        yield
    except SinkError:
        raise
    except kinds as err:
        reason = getattr(err, "strerror", None) or without_password(str(err)) or type(err).__name__
        raise SinkError(f"{problem}: {reason}. {advice}") from err


def without_password(address: str) -> str:
    """Return an address without its password."""
    return re.sub(r"(?<=://)([^:@/]*):[^@/]*@", r"\1:***@", re.sub(r"(?i)(password=)[^&]*", r"\1***", address))
