"""What ranks tell each other where a call cannot be served from early embeddings, which no collective can ask.

A rank whose call has to run the module's own forward waits until all ranks say so of the same call. A rank that was
served goes on, perhaps into a collective, where it hears nothing: so a thread of each rank looks now and then whether
another one waits for a call that was served here, and says so in its place.
"""

from __future__ import annotations

import contextlib
import threading
import time

from ..distributed import Store

LOOK_EVERY_S = 1.0
"""How often a rank looks whether another one waits in vain."""


class Mismatches:
    """The calls of this run's modules that some rank cannot serve from early embeddings.

    Word is left in the store under a key of this run, the same on all ranks.
    """

    def __init__(self, store: Store, key: str, num_ranks: int, timeout_s: float) -> None:
        self._store, self._key = store, key
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._served: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def end(self) -> None:
        """Stop looking."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()

    def served(self, module: str, step: int) -> None:
        """Note that this rank's call in a step was served early; from then on look who waits in vain."""
        self._served[module] = step
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._look, name="early_lookup_mismatches", daemon=True)
            self._thread.start()

    def all_ranks(self, module: str, step: int) -> bool:
        """Wait until all ranks come here for the same call; False if one of them was served, or is too late."""
        call = f"{self._key}/{module}/{step}"
        self._store.add(call, 1)
        deadline = time.monotonic() + self._timeout_s
        while self._store.add(call, 0) < self._num_ranks:
            if self._store.add(f"{call}/served", 0) or time.monotonic() > deadline:
                return False
            self._store.compare_set(f"{self._key}/waits", "", f"{step} {module}")  # once an earlier call's is gone
            time.sleep(0.01)
        self._store.compare_set(f"{self._key}/waits", f"{step} {module}", "")
        return True

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with the rank that keeps it
            while not self._ended.wait(LOOK_EVERY_S):
                step, _, module = self._store.compare_set(f"{self._key}/waits", "", "").decode().partition(" ")
                if module and self._served.get(module, -1) >= int(step):
                    self._store.add(f"{self._key}/{module}/{step}/served", 1)
