"""A thread that writes cuts to a sink, one after another, so that a slow sink stalls no step."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from .arrow_stream import Piece, num_bytes
from .sink import DeltaSink
from .watched_sink import WatchedSink

MOST_WAITING = 2
"""Cuts that are being written, or wait for it: while there are as many, no other is made."""

LOOKS_EVERY_S = 0.5
"""How often whoever waits for the sink looks whether it hangs."""

Content: TypeAlias = bytes | list[Piece]
"""Of a chunk."""

Chunks: TypeAlias = Callable[[], Iterable[tuple[str, Content]]]
"""Makes the chunks of a part: names and contents."""

T = TypeVar("T")


class CutWriter:
    """Writes the parts of one rank. Its thread alone uses the sink; who waits for it waits for no call without limit.

    Args:
        sink: Where to.
        timeout_s: How long one call of the sink may take, in seconds; then it counts as one that hangs, which is an
            error.
    """

    def __init__(self, sink: DeltaSink, timeout_s: float = float("inf")) -> None:
        self._sink = WatchedSink(sink)
        self._timeout_s = timeout_s
        self._jobs: deque[tuple[bool, Callable[[], None]]] = deque()
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

        def write() -> None:
            try:
                self._write(step, chunks())
            except BaseException as err:
                self._fail(err)

        self._add(write, is_cut=True)

    @property
    def sink(self) -> SinkInThread:
        """The sink, for the thread that made this one."""
        return SinkInThread(self.call)

    def call(self, do: Callable[[WatchedSink], T]) -> T:
        """Return what the thread gets from the sink, after the parts before it.

        Args:
            do: Given the sink.

        Raises:
            SinkError: The sink hangs.
            BaseException: What the sink raised, or a write before.
        """
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(do(self._sink))
            except BaseException as err:
                answer.set_exception(err)

        self._add(ask, is_cut=False)
        self._wait_until(answer.done)
        if not answer.done():
            assert self.error is not None
            raise self.error
        return answer.result()

    def write_now(self, step: int, chunks: Iterable[tuple[str, Content]]) -> None:
        """Write a part, after those before it, and wait for it.

        Args:
            step: Of its cut.
            chunks: Names and contents, which the calling thread makes.

        Raises:
            SinkError: The sink hangs.
            BaseException: What the sink raised, now or before.
        """
        self.wait()
        if self.error is not None:
            raise self.error
        try:
            for name, part in chunks:
                self.sink.write(name, part)
                self.num_bytes += len(part) if isinstance(part, bytes) else num_bytes(part)
        except BaseException as err:
            self.error = err
            raise
        self.written_step = step

    def wait(self) -> None:
        """Wait until every part is written, or one has failed, or the sink hangs."""
        self._wait_until(lambda: not self.num_outstanding)

    def look(self) -> None:
        """Take a call of the sink that has not returned in time as an error."""
        error = None if self.error is not None else self._sink.overdue(self._timeout_s)
        if error is not None:
            self._fail(error)

    def close(self, timeout_s: float) -> None:
        """End: what is being written is finished within a time, what waits is dropped.

        Args:
            timeout_s: A sink that hangs must not keep the process: its thread is a daemon's.
        """
        with self._changed:
            self._drop()
            self._ends = True
            if self._thread is not None:
                self._jobs.append((False, self._close_sink))
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(0 if self._sink.overdue(self._timeout_s) else timeout_s)

    def _close_sink(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()

    def _add(self, do: Callable[[], None], *, is_cut: bool) -> None:
        with self._changed:
            self._jobs.append((is_cut, do))
            self.num_outstanding += is_cut
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedding deltas", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: is_over() or self.error is not None, LOOKS_EVERY_S):
                self.look()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._drop()
            self._changed.notify_all()

    def _drop(self) -> None:
        """Forget what waits."""
        self.num_outstanding -= sum(is_cut for is_cut, _ in self._jobs)
        self._jobs.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._ends)
                if not self._jobs:
                    return
                is_cut, do = self._jobs.popleft()
            do()
            with self._changed:
                self.num_outstanding -= is_cut
                self._changed.notify_all()

    def _write(self, step: int, chunks: Iterable[tuple[str, Content]]) -> None:
        for name, part in chunks:
            self._sink.write(name, part)
            self.num_bytes += len(part) if isinstance(part, bytes) else num_bytes(part)
            if self.error is not None:  # it came back after it had counted as one that hangs
                return
        self.written_step = step


class SinkInThread:
    """A sink whose calls a thread makes, while the caller waits, but not without limit.

    Args:
        call: Lets the thread do something with the sink, and waits.
    """

    def __init__(self, call: Callable[[Callable[[WatchedSink], Any]], Any]) -> None:
        self._call = call

    def check(self) -> None:
        """Find out whether parts can be written, as far as the sink can tell."""
        self._call(lambda sink: sink.check())

    def write(self, name: str, part: Content) -> None:
        """Keep a part."""
        self._call(lambda sink: sink.write(name, part))

    def names(self) -> list[str]:
        """Return the names of all parts."""
        return list(self._call(lambda sink: sink.names()))

    def read(self, name: str) -> bytes:
        """Return a part."""
        return bytes(self._call(lambda sink: sink.read(name)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts."""
        self._call(lambda sink: sink.remove(names))

    def close(self) -> None:
        """Let go of connections."""
        self._call(lambda sink: sink.close())
