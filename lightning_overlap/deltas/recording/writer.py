"""A thread that writes cuts to a sink, so that a slow sink does not delay steps."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from ...storage import Piece, Store, StoreError, close_store

MOST_WAITING = 2  # most unwritten cuts; no further cut is made meanwhile
LOOKS_EVERY_S = 0.5  # seconds between checks whether the sink hangs, while a caller waits for it

CutFiles: TypeAlias = Iterable[tuple[str, list[Piece]]]  # name and content of each file of a rank in a cut
T = TypeVar("T")


class CutWriter:
    """Writes the files of one rank. Only its thread uses the sink; a call longer than `timeout_s` is an error."""

    def __init__(self, sink: Store, timeout_s: float = float("inf")) -> None:
        self._sink, self._timeout_s = sink, timeout_s
        self._call: tuple[str, float] | None = None  # the current call of the sink, and its start
        self._jobs = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()  # None ends the thread
        self._cuts = deque[Future[None]](maxlen=MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._ends = False
        self.error: BaseException | None = None  # the first error of a write; nothing is written after it
        self.num_bytes = 0  # written so far
        self.written_step = -1  # step of the newest written cut

    @property
    def is_ready(self) -> bool:
        """Whether it accepts another cut."""
        return sum(not cut.done() for cut in self._cuts) < MOST_WAITING

    def submit(self, step: int, files: Callable[[], CutFiles]) -> None:
        """Make and write the files of the cut at `step` in the thread, after all earlier files."""
        self._cuts.append(self._later(partial(self._write, step, files, self._timed)))

    def write_now(self, step: int, files: CutFiles) -> None:
        """Write files after all earlier files and wait; raise the first error. The calling thread makes the files."""
        self.wait()
        if self.error is None:
            self._write(step, lambda: files, self.call)
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Wait until every file is written, a write fails, or the sink hangs."""
        for cut in self._cuts:
            self._wait_for(cut)

    def call(self, what: str, do: Callable[[], T]) -> T:
        """Return what a call of the sink returns, after all earlier files, or raise its error; `what` names it."""
        result = self._later(partial(self._timed, what, do))
        self._wait_for(result)
        if self.error is not None and not result.done():
            raise self.error
        return result.result()

    def look(self) -> None:
        """Set `error` if a call of the sink takes longer than the timeout."""
        if self.error is None and (call := self._overdue()) is not None:
            self.error = StoreError(
                f"{self._sink} hangs: {call} has not returned for {self._timeout_s:g} s. Check the sink, or raise "
                "EmbeddingDeltas(sink_timeout_s=...), which is limited to half of the strategy's timeout."
            )

    def close(self, timeout_s: float) -> None:
        """End the thread after the current write, for which this waits up to `timeout_s` s; drop unwritten cuts."""
        self._ends = True
        if self._thread is not None:
            self._later(partial(self._timed, "close", partial(close_store, self._sink)))
            self._jobs.put(None)
            self._thread.join(0 if self._overdue() else timeout_s)

    def _later(self, do: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._jobs.put((do, result))
        if self._thread is None:
            # a daemon, so a sink that hangs does not block process exit
            self._thread = threading.Thread(target=self._run, name="embedding deltas", daemon=True)
            self._thread.start()
        return result

    def _run(self) -> None:
        for do, result in iter(self._jobs.get, None):
            try:
                result.set_result(do())
            except BaseException as err:
                result.set_exception(err)

    def _wait_for(self, result: Future[Any]) -> None:
        while self.error is None and not futures.wait([result], LOOKS_EVERY_S).done:
            self.look()

    def _timed(self, what: str, do: Callable[[], T]) -> T:
        self._call = what, time.monotonic()
        try:
            return do()
        finally:
            self._call = None

    def _overdue(self) -> str | None:
        call = self._call
        return None if call is None or time.monotonic() - call[1] < self._timeout_s else call[0]

    def _write(self, step: int, files: Callable[[], CutFiles], call: Callable[[str, Callable[[], None]], None]) -> None:
        if self._ends or self.error:
            return
        try:
            for name, pieces in files():
                call(f"write of {name}", partial(self._sink.put, name, pieces))
                self.num_bytes += sum(map(len, pieces))
                if self.error is not None:  # `look` gave up on this call
                    return
            self.written_step = step
        except BaseException as err:
            self.error = err
