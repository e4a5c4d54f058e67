"""A lock that many readers hold at once, or one writer alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


class ReadLock:
    """Lets many threads read at the same time and one write alone; a writer that waits goes before new readers.

    A thread that reads may read again, and one that writes may write or read.
    """

    def __init__(self) -> None:
        self._gate = threading.RLock()  # held by who writes or waits for readers to leave; new readers come through it
        self._changed = threading.Condition()
        self._readers = Counter[int]()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it for reading."""
        own = threading.get_ident()
        with nullcontext() if own in self._readers else self._gate, self._changed:
            self._readers[own] += 1
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
        if threading.get_ident() in self._readers:
            raise RuntimeError("a thread that reads a replica cannot write it: leave `reading()` first.")
        with self._gate:
            with self._changed:
                self._changed.wait_for(lambda: not self._readers)
            yield
