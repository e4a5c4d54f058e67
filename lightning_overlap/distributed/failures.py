"""How ranks that fail tell each other why, through the store: no collective can be trusted then."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as public as `dist.Store`
from torch.distributed import Store as Store  # type: ignore[attr-defined]


def default_store() -> Store | None:
    """Return the store that the process group was made with."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


_num_runs = itertools.count()


class Word(NamedTuple):
    """What a rank that fails leaves for the others."""

    rank: int
    error: str
    """Type and message."""
    place: str
    """Where the rank was."""
    stderr: str
    """Where the rank's errors go: the same for ranks that share a terminal, a pipe or a file."""


def _stderr() -> str:
    try:
        file = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # a stream of Python's own, in notebooks
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{socket.gethostname()} {file.st_dev} {file.st_ino}"


class FirstCause:
    """Lets a rank that fails because it lost another one say why that one failed.

    Every rank makes as many of these, in the same order. The first rank that fails leaves word in the store.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self.rank = rank
        self._key = f"lightning_overlap/first_cause/{next(_num_runs)}"
        self.first: Word | None = None
        """What the rank that failed first has said, once this one has failed too; None where nobody knows."""

    @property
    def is_first(self) -> bool:
        """Whether this rank failed before all others, as far as it knows."""
        return self.first is not None and self.first.rank == self.rank

    @property
    def store_port(self) -> int | None:
        """The port of the store that ranks tell each other by; None where it has none, as a file."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return store.port if isinstance(store, TCPStore) else None

    @property
    def shares_stderr(self) -> bool:
        """Whether the rank that failed first prints where this one does."""
        return self.first is not None and self.first.stderr == _stderr()

    def note(self, error: BaseException, place: str) -> None:
        """Leave word of the error, or, where another rank did so before, add its word to the error. Never raises."""
        mine = Word(self.rank, f"{type(error).__name__}: {error}", place, _stderr())
        with contextlib.suppress(Exception):  # the store ends with the rank that keeps it
            self.first = Word(*json.loads(self._store.compare_set(self._key, "", json.dumps(mine))))
            if self.first.rank != self.rank and self.first.error != mine.error:
                error.add_note(f"rank {self.first.rank} had failed {self.first.place}: {self.first.error}")

    def leave(self, num_ranks: int, timeout_s: float) -> None:
        """Say that this rank is about to end; the first one to fail then waits for so many. Never raises."""
        with contextlib.suppress(Exception):
            self._all_come(f"{self._key}/gone", num_ranks if self.is_first else 1, timeout_s)

    def told(self) -> None:
        """Say that the first cause has been told. Never raises."""
        with contextlib.suppress(Exception):
            self._store.set(f"{self._key}/told", "")

    def wait_until_told(self, timeout_s: float) -> None:
        """Wait until the first cause has been told, or so many seconds; the store may end after that. Never raises."""
        with contextlib.suppress(Exception):
            self._store.wait([f"{self._key}/told"], timedelta(seconds=timeout_s))

    def all_failed(self, num_ranks: int, place: str, timeout_s: float) -> bool:
        """Whether all ranks come here from the same place within a time: then they may save together. Never raises."""
        verdict = "alone"
        with contextlib.suppress(Exception):
            # The first one to know decides for all: another one's time may be up at this very moment.
            mine = "together" if self._all_come(f"{self._key}/here {place}", num_ranks, timeout_s) else "alone"
            verdict = self._store.compare_set(f"{self._key}/verdict", "", mine).decode()
        return verdict == "together"

    def _all_come(self, key: str, num_ranks: int, timeout_s: float) -> bool:
        """Count this rank, and wait until so many have come, or so many seconds; whether they have."""
        deadline = time.monotonic() + timeout_s
        num_here = self._store.add(key, 1)
        while num_here < num_ranks and time.monotonic() < deadline:
            time.sleep(0.01)
            num_here = self._store.add(key, 0)
        return num_here >= num_ranks
