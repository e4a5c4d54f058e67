"""The protocol of sinks, and their errors."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, runtime_checkable

from ..parts import Piece, joined


class SinkError(OSError):
    """A sink cannot be reached, read or written."""


@runtime_checkable
class DeltaSink(Protocol):
    """Stores parts by name, for replicas and resumed trainings.

    Each rank writes through its own pickled copy of the user's sink, which must open its connection at the first use;
    any number of processes read at the same time. A sink that cannot be read may return no names: then every fit begins
    with a base. It may also have `check()`, which raises a `SinkError` if parts cannot be written, and
    `write_pieces(name, pieces)`, which is called instead of `write` and saves a copy: it writes the joined bytes of
    `pieces` (`bytes` or `memoryview`), whose memory is reused when it returns.
    """

    def write(self, name: str, part: bytes) -> None:
        """Store or replace a part; return when it is durable and complete for every reader."""

    def names(self) -> Iterable[str]:
        """Return the names of all stored parts, without other files or keys."""

    def read(self, name: str) -> bytes:
        """Return a part; raise a KeyError if it does not exist."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts, in the given order; missing names are ignored."""

    def close(self) -> None:
        """Close connections; the next call opens them again."""


def check_sink(sink: DeltaSink) -> None:
    """Raise a SinkError if parts cannot be written, as far as the sink can tell."""
    getattr(sink, "check", lambda: list(sink.names()))()


def writes_pieces(sink: Any) -> Callable[[str, Sequence[Piece]], None]:
    """Return `write_pieces`, or if the sink lacks it, or a subclass or instance overrides only `write`, `write`."""
    first = (vars(kind) for kind in type(sink).__mro__ if "write" in vars(kind) or "write_pieces" in vars(kind))
    if "write" in getattr(sink, "__dict__", ()) or "write_pieces" not in next(first, ()):
        return lambda name, pieces: sink.write(name, joined(pieces))
    return cast(Callable[[str, Sequence[Piece]], None], sink.write_pieces)


@contextmanager
def told(problem: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
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
