"""The protocol of a sink, and the errors of sinks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


class SinkError(OSError):
    """A sink cannot be reached, read or written."""


@runtime_checkable
class DeltaSink(Protocol):
    """Keeps parts by their names, for replicas to read and for a resumed training to know what they have read.

    One process writes (each rank has a sink of its own, a copy of the one that the user made: it must be picklable and
    open its connection when it is first used), any number read at the same time. A sink that cannot read back may
    return no names: every fit then begins with a base.

    A sink may have a method `check()` too, which raises a `SinkError` where nothing could be written: see `check_sink`.
    One that writes to files may have `write_pieces(name, pieces)`, which does what `write` does for the bytes of all
    pieces, one after the other (`bytes` or `memoryview`). It is called instead, as `write` would need a copy of them;
    when it returns, their memory may be written again.
    """

    def write(self, name: str, part: bytes) -> None:
        """Keep a part; return once it cannot get lost and every reader may see it, whole.

        Writing the same name again replaces it.
        """

    def names(self) -> Iterable[str]:
        """Return the names of all parts that are kept, without other files or keys at the same place."""

    def read(self, name: str) -> bytes:
        """Return a part.

        Raises:
            KeyError: There is none of that name.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts, in the given order; names that are not there are ignored."""

    def close(self) -> None:
        """Let go of connections; the next call opens them anew."""


def check_sink(sink: DeltaSink) -> None:
    """Find out whether parts can be written, as far as the sink can tell.

    Raises:
        SinkError: They cannot.
    """
    check = getattr(sink, "check", None)
    if check is not None:
        check()
    else:
        list(sink.names())


def takes_pieces(sink: DeltaSink) -> bool:
    """Return whether to call `write_pieces`: a sink has it, and no subclass or instance overrides `write` alone."""
    if "write" in getattr(sink, "__dict__", ()):
        return False
    first = (vars(kind) for kind in type(sink).__mro__ if "write" in vars(kind) or "write_pieces" in vars(kind))
    return "write_pieces" in next(first, ())


@contextmanager
def told(problem: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within this context errors of some kinds are raised as a `SinkError`.

    Args:
        problem: What cannot be done, for the message.
        advice: What to do about it.
        *kinds: The exceptions to replace; their reason is in the message, without passwords.
    """
    try:
        yield
    except SinkError:
        raise
    except kinds as err:
        reason = getattr(err, "strerror", None) or without_password(str(err)) or type(err).__name__
        raise SinkError(f"{problem}: {reason}. {advice}") from err


def without_password(address: str) -> str:
    """Return an address that may be shown: a password in it is replaced."""
    return re.sub(r"(?<=://)([^:@/]*):[^@/]*@", r"\1:***@", re.sub(r"(?i)(password=)[^&]*", r"\1***", address))
