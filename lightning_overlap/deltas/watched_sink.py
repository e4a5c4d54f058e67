"""A sink with a clock: whoever waits for one of its calls learns how long that has taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from .arrow_stream import Piece, joined
from .sink import DeltaSink, SinkError, check_sink, takes_pieces


class WatchedSink:
    """Hands each call on to a sink, and notes what is called and since when.

    Args:
        sink: Used by one thread; others may ask how long its call has taken.
    """

    def __init__(self, sink: DeltaSink) -> None:
        self._sink, self._takes_pieces = sink, takes_pieces(sink)
        self._call: tuple[str, float] | None = None

    def __str__(self) -> str:
        return str(self._sink)

    def check(self) -> None:
        """Find out whether parts can be written, as far as the sink can tell."""
        self._timed("check", lambda: check_sink(self._sink))

    def write(self, name: str, part: bytes | list[Piece]) -> None:
        """Keep a part, which may come in pieces."""
        if isinstance(part, bytes):
            self._timed(f"write of {name}", lambda: self._sink.write(name, part))
        elif self._takes_pieces:
            sink: Any = self._sink
            self._timed(f"write of {name}", lambda: sink.write_pieces(name, part))
        else:
            self.write(name, joined(part))

    def names(self) -> list[str]:
        """Return the names of all parts."""
        found: list[str] = self._timed("names", lambda: list(self._sink.names()))
        return found

    def read(self, name: str) -> bytes:
        """Return a part."""
        part: bytes = self._timed(f"read of {name}", lambda: self._sink.read(name))
        return part

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts."""
        self._timed("remove", lambda: self._sink.remove(names))

    def close(self) -> None:
        """Let go of connections."""
        self._timed("close", self._sink.close)

    def _timed(self, what: str, do: Callable[[], Any]) -> Any:
        self._call = what, time.monotonic()
        try:
            return do()
        finally:
            self._call = None

    def overdue(self, timeout_s: float) -> SinkError | None:
        """Return what to raise if a call has taken longer than so many seconds, in any thread."""
        call = self._call
        if call is None or time.monotonic() - call[1] < timeout_s:
            return None
        return SinkError(
            f"{self._sink} hangs: its {call[0]} has not returned for {timeout_s:g} s. Find out why, or give it longer "
            "(EmbeddingDeltas(sink_timeout_s=...), which the strategy's timeout= bounds)."
        )
