"""How ranks that fail tell each other why, through the store: no collective can be trusted then."""

from __future__ import annotations

import contextlib
import itertools
import json
import time

import torch.distributed as dist
from torch.distributed import Store as Store  # type: ignore[attr-defined]  # as public as `dist.Store`


def default_store() -> Store | None:
    """Return the store that the process group was made with."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


_num_runs = itertools.count()


class FirstCause:
    """Lets a rank that fails because it lost another one say why that one failed.

    Args:
        store: Where the first rank that fails leaves word; every rank makes as many of these, in the same order.
        rank: The rank of this process, named in its word.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._key = f"lightning_overlap/first_cause/{next(_num_runs)}"

    def note(self, error: BaseException, place: str) -> None:
        """Leave word of the error, or, where another rank did so before, add its word to the error. Never raises.

        Args:
            error: What this rank failed with.
            place: Where this rank was.
        """
        mine = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store ends with the rank that keeps it
            word = json.dumps([self._rank, mine, place])
            rank, first, where = json.loads(self._store.compare_set(self._key, "", word))
            if rank != self._rank and first != mine:
                error.add_note(f"rank {rank} had failed {where}: {first}")

    def all_failed(self, num_ranks: int, place: str, timeout_s: float) -> bool:
        """Whether all ranks come here from the same place within a time: then they may save together. Never raises.

        Args:
            num_ranks: How many there are.
            place: Where this rank was.
            timeout_s: How long to wait for the others, in seconds.
        """
        deadline = time.monotonic() + timeout_s
        verdict = "alone"
        with contextlib.suppress(Exception):
            here = f"{self._key}/here {place}"
            num_here = self._store.add(here, 1)
            while num_here < num_ranks and time.monotonic() < deadline:
                time.sleep(0.01)
                num_here = self._store.add(here, 0)
            # The first one to know decides for all: another one's time may be up at this very moment.
            mine = "together" if num_here >= num_ranks else "alone"
            verdict = self._store.compare_set(f"{self._key}/verdict", "", mine).decode()
        return verdict == "together"
