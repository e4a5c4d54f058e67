"""Calls that all ranks have to make together, and that users write: a rank that goes on without one is an error."""

import atexit
import contextlib
import sys
import weakref

import torch.distributed as dist

from .mismatches import Mismatches
from .stores import DeadlineStore, RanksStore

_ANY_NUMBER = 1 << 62  # of failures
_POINT = "shared call"
LEAVE_S = 3.0  # how long a process that keeps the store waits at its end for ranks that have not ended yet


class SharedCalls:
    """Lets ranks meet before a collective that a user's code calls on every rank, or should call.

    The trainer's own way is divided into parts (`begin_shared_calls`), the same on all ranks. In each of them the ranks
    make the same calls. A rank that waits for another one learns of it when that one begins its next part, or ends.
    """

    def __init__(
        self, store: RanksStore, key: str, rank: int, num_ranks: int, timeout_s: float, *, num_failed: int | None = None
    ) -> None:
        self._mismatches = Mismatches(store, key, rank, num_ranks, timeout_s, counts_steps=False, num_failed=num_failed)
        self.key = key
        self._store, self._num_ranks, self._timeout_s = store, num_ranks, timeout_s
        self._rank, self._part, self._num_calls = rank, 0, 0
        _open.add(self)
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # before the process groups end

    def begin_shared_calls(self) -> None:
        """Note that this rank has made all calls of the present part, and begin the next one."""
        self._mismatches.passed((_POINT, self._num_calls + 1), self._part)
        self._part, self._num_calls = self._part + 1, 0

    def meet(self, call: str, advice: str) -> None:
        """Wait until all ranks make this call.

        Raises a RuntimeError with the `advice` if a rank makes another call, or goes on without one; also if a rank
        has failed or does not come in time.
        """
        try:
            other = self._mismatches.other(
                (_POINT, self._num_calls + 1), self._part, call, waits=f"in its call of {call}"
            )
        except dist.DistError as err:  # the store ends with the rank that keeps it
            raise RuntimeError(f"rank {self._rank} calls {call}, and another rank has ended. {advice}") from err
        if other is not None:
            does = "goes on without it" if other.what is None else f"calls {other.what}"
            raise RuntimeError(f"rank {self._rank} calls {call}, rank {other.rank} {does}. {advice}")
        self._num_calls += 1

    def end(self) -> None:
        """Tell ranks that still wait, or will wait, that this rank makes no more calls."""
        _open.discard(self)
        self._mismatches.passed(
            (_POINT, self._num_calls + 1), self._part, starts_thread=False
        )  # an ending process may start none
        self._part, self._num_calls = self._part + 1, 0
        self._mismatches.end()

    def wait_for_others(self, timeout_s: float) -> None:
        """If this process keeps the store, wait until the others have ended too: they may still read from it."""
        if isinstance(self._store, DeadlineStore):
            keys = [self._mismatches.ended_key(rank) for rank in range(self._num_ranks)]
            self._store.wait_here(keys, timeout_s)

    def end_and_follow(self, key: str) -> "SharedCalls":
        """End, and return an object for what comes after it, without asking the store: its rank may have ended.

        It waits for ranks that have failed, too: in this run or in a later one, whose error they have caught.
        """
        self.end()
        return SharedCalls(self._store, key, self._rank, self._num_ranks, self._timeout_s, num_failed=_ANY_NUMBER)


_open: weakref.WeakSet[SharedCalls] = weakref.WeakSet()


def _end_all() -> None:
    for calls in list(_open):
        with contextlib.suppress(Exception):
            calls.end()
            if not hasattr(sys, "last_value"):  # else ranks that lose this one need not know how
                calls.wait_for_others(LEAVE_S)
