"""What all ranks have to know of each other at every step, asked without waiting for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class StepFlags(NamedTuple):
    """What one rank says of a batch; as an answer, whether any rank said so."""

    has: bool
    """It has this batch."""
    lacks: bool
    """It has no such batch, now or ever."""
    last: bool
    """It has no batch after this one."""
    stop: bool
    """It was told to stop (SIGTERM)."""
    skips: bool = False
    """It has skipped a batch that is None, so that it has fewer than its loader says."""
    requested_interval: int = 0
    """How soon it wants to be asked again, see `PollInterval`; as an answer, the most of any rank."""

    minus_skipped: int = 0
    """`-n` for n batches that are None before this one; as an answer, of the rank that has skipped the fewest."""

    minus_at_end: int = 0
    """`-n` for n batches that are None and end its data after this one, or in the place of it where it has no such
    batch; 0 where another follows. As an answer, of the rank that has the fewest."""


class Answer(NamedTuple):
    """An answer that may still be on its way: the flags of all ranks, one after the other."""

    flags: Tensor
    work: dist.Work

    def wait(self) -> StepFlags:
        """Return what any rank said."""
        self.work.wait()
        return StepFlags(*self.flags.view(-1, len(StepFlags._fields)).amax(0).tolist())


Lowest = Callable[[], list[int]]
"""Waits for the lowest of all ranks' numbers, and returns the lowest of each."""


class PollInterval:
    """Decides for which batches the ranks ask each other, where all of them know how many batches they have.

    They ask for the first batch, for the last ones, and now and then for one in between, so that they hear of a rank
    that was told to stop or that has skipped a batch; after that they ask for every batch. An ask costs as much as a
    small model's forward. All decide alike, by batch numbers and by answers. An interval is at most twice the last one.
    """

    def __init__(self) -> None:
        self._next: float = 0
        self._interval = 1
        self._asked: tuple[int, float] | None = None

    def due(self, index: int) -> bool:
        """Whether to ask for a batch."""
        return index >= self._next

    def ask(self, index: int) -> int:
        """Note that the ranks are asked about a batch; none is due again before `hear`.

        Returns `MAX_INTERVAL - interval` for the interval that this rank wants, 0 to `MAX_INTERVAL - 1`.
        """
        now, asked = time.monotonic(), self._asked
        self._asked = index, now
        self._next = float("inf")
        interval = 1
        if asked is not None:
            per_batch_s = (now - asked[1]) / max(1, index - asked[0])
            interval = max(1, min(2 * self._interval, MAX_INTERVAL, int(ASK_EVERY_S / max(per_batch_s, 1e-6))))
        return MAX_INTERVAL - interval

    def hear(self, requested_interval: int, num_batches: float = float("inf")) -> None:
        """Set the next batch to ask for, by the largest value that `ask` returned on any rank.

        It comes after half of the epoch's batches that are left, at most: a rank that skips some ends earlier.
        """
        assert self._asked is not None
        self._interval = MAX_INTERVAL - requested_interval
        self._next = self._asked[0] + max(1, min(self._interval, (num_batches - self._asked[0]) // 2))


ASK_FOR_LAST = 8
"""How many of an epoch's last batches the ranks ask for, one by one: some may be None, on some of them."""

ASK_EVERY_S = 0.5
"""How long a rank that was told to stop may go on before the others are asked."""

MAX_INTERVAL = 255
"""Longest polling interval, in batches.

Ranks send `MAX_INTERVAL - interval`, so that the largest of all ranks' picks the shortest that any asks.
"""


class Consensus:
    """Asks all ranks by an all-to-all of eight numbers on the host: the host waits for it a step later, no device does.

    gloo sends them to each rank at once; its all-reduce passes them on around a ring, twice, which takes half as much
    of the CPU again on two ranks and longer on more. The group is a gloo group of all ranks, for this alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def ask(self, flags: StepFlags) -> Answer:
        """Send this rank's flags and ask for those of all ranks; every rank asks as often and in the same order."""
        sent = torch.tensor(flags * self._group.size(), dtype=torch.int32)
        received = torch.empty_like(sent)
        # Not by `torch.distributed`: who times or delays the all-to-alls of embeddings there means none of these.
        return Answer(received, self._group.alltoall_base(received, sent, [], []))

    def lowest(self, numbers: Sequence[int]) -> Lowest:
        """Start to look for the lowest of each of some numbers over all ranks; the host waits for them later."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        work = self.start(tensor, dist.ReduceOp.MIN)

        def wait() -> list[int]:
            work.wait()
            lowest: list[int] = tensor.tolist()
            return lowest

        return wait

    def broadcast(self, value: Any, src: int) -> Any:
        """Return the value of rank `src`, anything that can be pickled; it is sent between hosts' memories only."""
        values = [value]
        dist.broadcast_object_list(values, src, group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, anything that can be pickled."""
        return gather_objects(value, self._group)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks wait for the answer."""
        [unset_on_all] = self.lowest([not flag])()
        return not unset_on_all

    def start(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Start to give a tensor on the host what `op` makes of all ranks' values, in each place."""
        work: dist.Work | None = dist.all_reduce(values, op, group=self._group, async_op=True)
        assert work is not None
        return work


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, None for the default one: anything that can be pickled."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], T], gather: Callable[[Any], list[Any]]) -> T:
    """Run something on every rank, and raise on all of them what one raises: the others would wait for it.

    `action` waits for no rank after what may fail on one alone; `gather` returns the values of all ranks.

    Raises:
        RuntimeError: In the words of the first rank that has failed.
    """
    result, error, cause = None, None, None
    try:
        result = action()
    except Exception as err:
        error, cause = str(err) if isinstance(err, RuntimeError) else f"{type(err).__name__}: {err}", err
    for message in gather(error):
        if message is not None:
            raise RuntimeError(message) from cause
    return cast(T, result)
