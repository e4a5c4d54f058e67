"""Find out whether all ranks run a module's own forward for the same call, where no collective can ask.

A rank that cannot serve a call from early embeddings reports it in the store and waits until all ranks have. A rank
that served the call goes on, perhaps into a collective; so a thread of each rank answers waiting ranks.
"""

import contextlib
import threading
import time

from .failures import Store

LOOK_EVERY_S = 1.0


class Mismatches:
    """The calls that some rank cannot serve from early embeddings; `key` begins all keys of a run in the store."""

    def __init__(self, store: Store, key: str, num_ranks: int, timeout_s: float) -> None:
        self._store, self._key = store, key
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._served: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def end(self) -> None:
        """End the thread that looks for waiting ranks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()

    def served(self, module: str, step: int) -> None:
        """Note that this rank's call of a module was served early; the first call starts the thread."""
        self._served[module] = step
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._look, name="early_lookup_mismatches", daemon=True)
            self._thread.start()

    def all_ranks(self, module: str, step: int) -> bool:
        """Wait until all ranks call this for the same module and step; False if one was served early or is too late."""
        call = f"{self._key}/{module}/{step}"
        self._store.add(call, 1)
        deadline = time.monotonic() + self._timeout_s
        while self._store.add(call, 0) < self._num_ranks:
            if self._store.add(f"{call}/served", 0) or time.monotonic() > deadline:
                return False
            self._store.compare_set(f"{self._key}/waits", "", f"{step} {module}")  # once an earlier call is gone
            time.sleep(0.01)
        self._store.compare_set(f"{self._key}/waits", f"{step} {module}", "")
        return True

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with its host rank
            while not self._ended.wait(LOOK_EVERY_S):
                step, _, module = self._store.compare_set(f"{self._key}/waits", "", "").decode().partition(" ")
                if module and self._served.get(module, -1) >= int(step):
                    self._store.add(f"{self._key}/{module}/{step}/served", 1)
