"""What all ranks have to know of each other at every step, asked without waiting for the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Flags(NamedTuple):
    """What one rank says of a batch; as an answer, whether any rank said so."""

    has: bool
    """It has this batch."""

    lacks: bool
    """It has no such batch, now or ever."""

    last: bool
    """It has no batch after this one."""

    stop: bool
    """It was told to stop (SIGTERM)."""


class Answer(Protocol):
    """An answer that may still be on its way."""

    def wait(self) -> Flags:
        """Return what any rank said."""


class Agreement(Protocol):
    """Asks all ranks."""

    def ask(self, flags: Flags) -> Answer:
        """Say this rank's flags and ask for everybody's; every rank asks as often and in the same order."""


@dataclass(frozen=True, slots=True)
class _AllReduced:
    flags: Tensor
    work: dist.Work

    def wait(self) -> Flags:
        self.work.wait()
        return Flags(*map(bool, self.flags.tolist()))


class GroupAgreement:
    """Asks by an all-reduce of four bytes on the host: no device waits for it, and the host a step later.

    Args:
        group: A gloo group of all ranks, for this alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def ask(self, flags: Flags) -> Answer:
        """Start the all-reduce."""
        tensor = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return _AllReduced(tensor, work)

    def broadcast(self, value: Any, src: int) -> Any:
        """Return rank `src`'s value, anything that can be pickled; no device has a part in it."""
        values = [value]
        dist.broadcast_object_list(values, src, group=self._group)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so."""
        tensor = torch.tensor(flag, dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return bool(tensor)

    def shortest(self, num_batches: float) -> float:
        """Return the fewest batches that any rank has; `inf` is a loader without a length."""
        tensor = torch.tensor(num_batches, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return float(tensor)


class Counters(Protocol):
    """Counters that all ranks share (a `torch.distributed.Store`)."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its value."""


def default_store() -> Counters | None:
    """Return the store that the process group was made with, where ranks can leave word without a collective."""
    if not dist.is_initialized():
        return None
    store: Counters = dist.distributed_c10d._get_default_store()
    return store
