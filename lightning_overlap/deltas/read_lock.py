"""A lock that many readers hold at once, or one writer alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadLock:
    """Lets many threads read at the same time and one write alone; a writer that waits goes before new readers.

    A thread that reads may read again, and one that writes may write or read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: dict[int, int] = {}
        self._writer: int | None = None
        self._depth = 0
        self._writers_waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it for reading."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._writer == own or own in self._readers or (self._writer is None and not self._writers_waiting)
                )
            )
            self._readers[own] = self._readers.get(own, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._readers[own] -= 1
                if not self._readers[own]:
                    del self._readers[own]
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold it alone.

        Raises:
            RuntimeError: This thread holds it for reading: it would wait for itself.
        """
        own = threading.get_ident()
        with self._changed:
            if self._writer != own:
                if own in self._readers:
                    raise RuntimeError("a thread that reads a replica cannot write it: leave `reading()` first.")
                self._writers_waiting += 1
                try:
                    self._changed.wait_for(lambda: self._writer is None and not self._readers)
                finally:
                    self._writers_waiting -= 1
                self._writer = own
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._writer = None
                self._changed.notify_all()
