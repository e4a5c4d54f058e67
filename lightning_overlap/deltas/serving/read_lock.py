"""A lock for many readers or one writer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


class ReadLock:
    """Allows many readers or one writer, reentrant; the writer may read. A waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._gate = threading.RLock()  # held by the current or waiting writer; new readers pass through it
        self._changed = threading.Condition()
        self._readers: list[int] = []  # a thread as often as it reads

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock for reading."""
        own = threading.get_ident()
        with nullcontext() if own in self._readers else self._gate, self._changed:
            self._readers.append(own)
        try:
            yield
        finally:
            with self._changed:
                self._readers.remove(own)
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone; raise a RuntimeError if this thread is reading."""
        if threading.get_ident() in self._readers:
            raise RuntimeError("a thread inside `reading()` cannot update the replica: leave `reading()` first.")
        with self._gate:
            with self._changed:
                self._changed.wait_for(lambda: not self._readers)
            yield
