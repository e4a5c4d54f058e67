"""Find out whether all ranks do the same at a point of a step, where no collective can compare them.

A rank that does something unusual there (it calls a module that it has not called before, calls it otherwise, or leaves
the call out) reports it in the store and waits until all ranks have. A rank that does the usual thing goes on, perhaps
into a collective that waits for the other rank; so a thread of each rank reports to waiting ranks.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from .stores import ANSWER_S, FAILED, NoAnswerError, RanksStore, longest_pause_s

LOOK_EVERY_S = 1.0
ANNOUNCE_AFTER_S = 0.05  # ranks that do the same come within this time, mostly


Point: TypeAlias = tuple[str | int, ...]  # a place in every step, where ranks do the usual thing or another one


class Deed(NamedTuple):
    """What a rank does at a point of a step."""

    rank: int
    what: str | None  # None: the usual thing
    point: Point
    step: int


class Mismatches:
    """What some rank does otherwise than usual; `key` begins all keys of a run in the store.

    `counts_steps` says whether users know what is counted as a step: then errors name it. `num_failed` is how often a
    rank had failed before; None: the store is asked.
    """

    def __init__(
        self,
        store: RanksStore,
        key: str,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        *,
        counts_steps: bool = True,
        num_failed: int | None = None,
    ) -> None:
        self._store, self._key, self._counts_steps = store, key, counts_steps
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self.num_failed = store.add(FAILED, 0) if num_failed is None else num_failed
        self._passed: dict[Point, int] = {}
        self._agreed: dict[Point, list[str]] = {}  # by point: the last keys in the store
        self._look_at_ended = 0.0  # when to look again for ranks that have ended
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def end(self) -> None:
        """End the thread that looks for waiting ranks; leave them a report, unless this rank has failed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join(ANSWER_S)  # it may wait for the store
        if self._passed and sys.exception() is None:
            with contextlib.suppress(Exception):
                # `set` waits for no answer: the rank that keeps the store may be the first to end.
                self._store.set(self.ended_key(self._rank), json.dumps([*self._passed.items()]))
                self._store.set(f"{self._key}/ended", str(self._rank))

    def ended_key(self, rank: int) -> str:
        """Return the key under which a rank leaves its report."""
        return f"{self._key}/ended/{rank}"

    def passed(self, point: Point, step: int, *, starts_thread: bool = True) -> None:
        """Note that this rank does the usual thing at a point and does not wait; the first note starts a thread."""
        self._passed[point] = step
        if self._thread is None and starts_thread:
            self._ended.clear()
            self._thread = threading.Thread(target=self._look, name="early_lookup_mismatches", daemon=True)
            self._thread.start()

    def other(self, point: Point, step: int, what: str = "", *, waits: str = "for the others") -> Deed | None:
        """Wait until all ranks do the same unusual thing at a point of a step; return None, or what another one does.

        `waits` says for users where this rank waits: "at the end of its forward", say. Raises a RuntimeError if another
        rank has failed, or does not come to the point in time.
        """
        mine = Deed(self._rank, what, point, step)
        here = f"{self._name(mine)}/{what}"
        began, pause_s, announced = time.monotonic(), 0.0005, False
        num_here = self._store.add(here, 1)
        while num_here < self._num_ranks:
            waited_s = time.monotonic() - began
            if waited_s > ANNOUNCE_AFTER_S:
                if not announced:
                    # Once for all ranks that do the same: else they would all write one list, as long as they are many.
                    self._change_waiting(
                        lambda waiting: waiting if any(one[1:] == mine[1:] for one in waiting) else [*waiting, mine]
                    )
                    announced = True
                found = self._found(mine)
                if found is not None:
                    # If all came, one of them has gone on since.
                    return None if self._store.add(here, 0) >= self._num_ranks else found
                if self._store.add(FAILED, 0) > self.num_failed:
                    raise RuntimeError(f"Another rank has failed, for which this rank waited {waits}.")
                if waited_s > self._timeout_s:
                    of_step = f" in step {step}" if self._counts_steps else ""
                    raise RuntimeError(
                        f"this rank waited {waits}{of_step}, and another rank did not come within {self._timeout_s:g} "
                        "s. If it is only slow, pass a longer timeout= to the strategy."
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s(self._num_ranks, num_requests=5))
            num_here = self._store.add(here, 0)
        if announced:
            self._change_waiting(lambda waiting: [one for one in waiting if one != mine])
        # When all ranks are here, they have left the time before, and nobody reads the key of the time before that.
        keys = self._agreed.setdefault(point, [])
        keys.append(here)
        if len(keys) > 2:
            self._store.delete_key(keys.pop(0))
        return None

    def _found(self, mine: Deed) -> Deed | None:
        """Return what is known of another rank that does something else."""
        for one in self._waiting():
            if one[2:] == mine[2:] and one.what != mine.what:
                return one
        rank = self._store.compare_set(f"{self._name(mine)}/passed", "", "")
        if rank:
            return mine._replace(rank=int(rank), what=None)
        if (now := time.monotonic()) >= self._look_at_ended:
            self._look_at_ended = now + LOOK_EVERY_S
            # The last rank that has ended probably knows; while none has, nobody's report is read.
            last = self._store.compare_set(f"{self._key}/ended", "", "")
            for other in dict.fromkeys([int(last), *range(self._num_ranks)]) if last else ():
                if other == self._rank:
                    continue
                passed = json.loads(self._store.compare_set(self.ended_key(other), "", "") or b"[]")
                if any(tuple(point) == mine.point and step >= mine.step for point, step in passed):
                    return mine._replace(rank=other, what=None)
        return None

    def _name(self, deed: Deed) -> str:
        return f"{self._key}/{'/'.join(map(str, deed.point))}/{deed.step}"

    def _waiting(self) -> list[Deed]:
        return _read(self._store.compare_set(f"{self._key}/waiting", "", ""))

    def _change_waiting(self, change: Callable[[list[Deed]], list[Deed]]) -> None:
        before = b""
        while True:
            after = json.dumps(change(_read(before))).encode()
            if after == before:
                return
            found = self._store.compare_set(f"{self._key}/waiting", before.decode(), after.decode())
            if found == after:
                return
            before = found

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with its host rank
            while not self._ended.wait(LOOK_EVERY_S):
                with contextlib.suppress(NoAnswerError):  # it may answer later
                    for one in self._waiting():
                        if self._passed.get(one.point, -1) >= one.step:
                            self._store.compare_set(f"{self._name(one)}/passed", "", str(self._rank))


def _read(waiting: bytes) -> list[Deed]:
    return [Deed(rank, what, tuple(point), step) for rank, what, point, step in json.loads(waiting or b"[]")]
