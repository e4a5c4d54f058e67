"""The errors of sinks, and what a sink may have besides its protocol."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from ...text import message_without_secrets, without_secrets
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
def as_sink_error(problem: str, address: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Replace exceptions of some `kinds` by a `SinkError` with problem, reason (without the address's secrets), advice.

    Such an exception is its cause, unless the address has secrets: a traceback shows causes as they are.
    """
    try:
        yield
    except SinkError:
        raise
    except kinds as err:
        has_secrets = without_secrets(address) != address
        reason = message_without_secrets(getattr(err, "strerror", None) or str(err), address) or type(err).__name__
        if has_secrets and isinstance(err, ValueError):  # it may name any piece of an address that it cannot read
            reason = f"{type(err).__name__}; if its password has @ / : ? or #, write %40 %2F %3A %3F %23 for them"
        raise SinkError(f"{problem}: {reason}. {advice}") from (None if has_secrets else err)
