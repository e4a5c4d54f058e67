"""A thread that writes cuts to a sink, one after another, so that a slow sink stalls no step."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable

from .sink import DeltaSink

MOST_WAITING = 2
"""Cuts that are being written, or wait for it: while there are as many, no other is made."""

Chunks = Callable[[], Iterable[tuple[str, bytes]]]
"""Makes the chunks of a part: names and contents."""


class CutWriter:
    """Writes the parts of one rank.

    Args:
        sink: Where to; used by this thread alone while cuts are under way.
    """

    def __init__(self, sink: DeltaSink) -> None:
        self._sink = sink
        self._waiting: deque[tuple[int, Chunks]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False
        self.error: BaseException | None = None
        """What a write has failed with; nothing is written after it."""
        self.num_bytes = 0
        """Written so far."""
        self.written_step = -1
        """The step of the newest cut that was written."""
        self.num_outstanding = 0
        """Cuts that are being written, or wait for it."""

    @property
    def is_ready(self) -> bool:
        """Whether it would take another cut."""
        return self.num_outstanding < MOST_WAITING

    def submit(self, step: int, chunks: Chunks) -> None:
        """Write a part after those before it.

        Args:
            step: Of its cut.
            chunks: Called in the thread.
        """
        with self._changed:
            self._waiting.append((step, chunks))
            self.num_outstanding += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedding deltas", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def write_now(self, step: int, chunks: Iterable[tuple[str, bytes]]) -> None:
        """Write a part in the calling thread, after those before it.

        Args:
            step: Of its cut.
            chunks: Names and contents.

        Raises:
            BaseException: What the sink raised, now or before.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        try:
            self._write(step, chunks)
        except BaseException as err:
            self.error = err
            raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is written, or has failed.

        Args:
            timeout_s: How long, at most.

        Returns:
            Whether nothing is outstanding.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_outstanding or self.error is not None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End: what is being written is finished within a time, what waits is dropped."""
        with self._changed:
            self._ends = True
            self.num_outstanding -= len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return  # a sink that hangs must not keep the process; the thread is a daemon's
        with contextlib.suppress(Exception):
            self._sink.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    return
                step, chunks = self._waiting.popleft()
            try:
                self._write(step, chunks())
            except BaseException as err:
                self.error = err
            with self._changed:
                self.num_outstanding -= 1
                if self.error is not None:
                    self.num_outstanding -= len(self._waiting)
                    self._waiting.clear()
                    self._ends = True
                self._changed.notify_all()

    def _write(self, step: int, chunks: Iterable[tuple[str, bytes]]) -> None:
        for name, part in chunks:
            self._sink.write(name, part)
            self.num_bytes += len(part)
        self.written_step = step
