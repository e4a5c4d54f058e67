"""Let all ranks agree at every step on the end of the data, stops and saves; they read the result a step later."""

import hashlib
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

MAX_INTERVAL = 255  # longest polling interval, in batches
POLL_LAST = 8
"""Number of batches at an epoch's end that the ranks poll one by one: some may be None on some ranks."""
POLL_EVERY_S = 0.5
"""Approximate seconds between two polls. A rank that was signalled to stop may go on for this long."""

SKIP_ALIKE = (
    "Ranks have to skip the same batches: drop samples in the dataset or the collate function, not whole batches, or "
    "make the batch None on every rank."
)

Group: TypeAlias = dist.ProcessGroup | None  # a group of all ranks; None on one rank
Lowest = Callable[[], list[int]]  # waits for the numbers of all ranks and returns the minimum of each


class StepFlags(NamedTuple):
    """One rank's flags for a batch. The result has the maximum over all ranks; for bools: whether any rank set it."""

    has: bool  # has this batch
    lacks: bool  # lacks this batch, at least for now (`max_steps` may hold it back)
    last: bool  # has no batch after this one
    stop: int  # its own number and 1 if it received SIGTERM, else 0; in a result of the highest such rank
    latest_none: int = -1  # number in the epoch of its last None batch before this one
    requested_interval: int = 0  # `MAX_INTERVAL` minus the number of batches until its next poll
    save: bool = False  # received a preemption signal
    rates: int = 0  # digest of its learning rates when the batch was fetched; in a result -1 if they differ
    call: int = 0  # 0: it polls for a batch; else the number of a call in `CALLS`, counted from 1


Call: TypeAlias = Literal["barrier", "reduce", "all_gather"]
CALLS: Mapping[Call, str] = {
    "barrier": "waits in strategy.barrier",
    "reduce": "reduces a value (self.log with sync_dist=True, or a metric)",
    "all_gather": "gathers values (self.all_gather)",
}
"""Calls of users, and of Lightning on all ranks alike, that wait for all ranks -> what a rank does there."""


class Poll(NamedTuple):
    """A poll of all ranks whose result may not have arrived yet."""

    flags: Tensor  # of all ranks, one after the other: `(num_ranks * 9,)`, int32, on the host
    work: dist.Work

    def wait(self) -> StepFlags:
        """Wait for the flags of all ranks and return the maximum of each.

        Raises as `check_none_batches` does, and a RuntimeError if ranks make different calls.
        """
        self.work.wait()
        by_rank = self.flags.view(-1, len(StepFlags._fields))
        columns = by_rank.t().tolist()  # a loop over ranks would take longer
        has, *_, latest_none, _, _, rates, calls = columns
        if len(set(calls)) > 1:
            raise RuntimeError(_different_calls(calls))
        check_none_batches({rank: latest_none[rank] for rank, with_batch in enumerate(has) if with_batch})
        result = StepFlags(*map(max, columns))
        alike = len(set(compress(rates, has))) <= 1
        return result if alike else result._replace(rates=-1)


def _different_calls(calls: Sequence[int]) -> str:
    does = ["goes on with another batch", *CALLS.values()]
    rank, other = (calls.index(call) for call in sorted(set(calls), reverse=True)[:2])
    return (
        f"rank {rank} {does[calls[rank]]}, and rank {other} {does[calls[other]]}. All ranks have to make such a call "
        "together, outside of `if trainer.is_global_zero:`: log the same keys with sync_dist=True on every rank, or "
        "without it on rank 0 alone (rank_zero_only=True)."
    )


def check_none_batches(latest: Mapping[int, int]) -> None:
    """Raise a RuntimeError if ranks differ in `latest`: rank -> number of its last None batch in the epoch, or -1."""
    if len(set(latest.values())) <= 1:
        return
    rank, number = max(latest.items(), key=lambda one: one[1])
    other, theirs = next(one for one in latest.items() if one[1] != number)
    last = "none" if theirs < 0 else f"batch {theirs}"
    raise RuntimeError(
        f"the ranks have different None batches: the last one so far is batch {number} on rank {rank}, {last} on rank "
        f"{other}. {SKIP_ALIKE}"
    )


class PollInterval:
    """Decides for which batches the ranks poll each other: a poll costs as much as a small model's forward."""

    def __init__(self) -> None:
        self._next: float = 0
        self._interval = 1
        self._polled: tuple[int, float] | None = None  # the last polled batch, and when

    def due(self, index: int) -> bool:
        """Whether to poll the ranks for a batch."""
        return index >= self._next

    def note_poll(self, index: int) -> int:
        """Note a poll; return `MAX_INTERVAL` minus this rank's preferred interval: the maximum is the shortest."""
        now, polled = time.monotonic(), self._polled
        self._polled = index, now
        self._next = float("inf")
        if polled is None:
            return MAX_INTERVAL - 1
        per_batch_s = (now - polled[1]) / max(1, index - polled[0])
        return MAX_INTERVAL - max(1, min(2 * self._interval, MAX_INTERVAL, int(POLL_EVERY_S / max(per_batch_s, 1e-6))))

    def note_result(self, requested_interval: int, num_batches: float = float("inf")) -> None:
        """Set the next batch to poll, by the largest value that `note_poll` returned on any rank."""
        assert self._polled is not None
        self._interval = MAX_INTERVAL - requested_interval
        # After half of the remaining batches at most: a rank that skips batches ends earlier.
        self._next = self._polled[0] + max(1, min(self._interval, (num_batches - self._polled[0]) // 2))


class Consensus:
    """Messages between all ranks on the host, over a gloo group that is used only here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def poll(self, flags: StepFlags) -> Poll:
        """Send this rank's flags to all ranks; all ranks poll equally often, in the same order."""
        return Poll(*self.exchange(flags))

    def meet(self, call: Call) -> None:
        """Wait until all ranks make this call; raises a RuntimeError if one goes on with another batch or call."""
        self.poll(StepFlags(False, False, False, 0, call=1 + [*CALLS].index(call))).wait()

    def exchange(self, numbers: Sequence[int]) -> tuple[Tensor, dist.Work]:
        """Send equally many numbers to all ranks; return those of all, one rank after the other, and the work.

        They are int32 on the host, `(num_ranks * len(numbers),)`, and are there once the work is done.
        """
        # An all-reduce would pass the numbers around a ring twice: 1.5 times the CPU time on two ranks.
        sent = torch.tensor([*numbers] * self._group.size(), dtype=torch.int32)
        received = torch.empty_like(sent)
        # Not through `torch.distributed`: timers and benchmarks patch its all-to-alls.
        return received, self._group.alltoall_base(received, sent, [], [])

    def lowest(self, numbers: Sequence[int]) -> Lowest:
        """Start computing the minimum of each number over all ranks; the returned function waits for the result."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        work = self.start(tensor, dist.ReduceOp.MIN)

        def wait() -> list[int]:
            work.wait()
            return list(tensor.tolist())

        return wait

    def broadcast(self, value: Any, src: int) -> Any:
        """Return the value of rank `src`, any picklable object."""
        values = [value]
        dist.broadcast_object_list(values, src, group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, any picklable object."""
        return gather_objects(value, self._group)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks wait for the result."""
        [unset_on_all] = self.lowest([not flag])()
        return not unset_on_all

    def start(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Start an in-place all-reduce of a tensor on the host; return its work."""
        work: dist.Work | None = dist.all_reduce(values, op, group=self._group, async_op=True)
        assert work is not None
        return work


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Return the values of all ranks of a group (None: the default group), any picklable objects."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_if_unequal(value: T, group: Group = None) -> list[T]:
    """Return the values of all ranks; if all are equal, one of them.

    For values that grow with the number of ranks and are almost always equal: only digests travel then.
    """
    digests = gather_objects(hashlib.blake2b(pickle.dumps(value), digest_size=16).digest(), group)
    return [value] if len(set(digests)) == 1 else gather_objects(value, group)


def gather_on_rank_zero(value: T, group: Group) -> list[T]:
    """Return the values of all ranks on rank 0 of a group, on other ranks nothing; any picklable objects."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def together(action: Callable[[], T], group: Group, *, alike: tuple[type[Exception], ...] = ()) -> T:
    """Call a function on every rank of a group and return its result; all ranks raise the first failing rank's error.

    It is a RuntimeError unless its type is in `alike`. The function must not wait for other ranks after anything that
    may fail on a single rank.
    """
    result, _ = vote_together(action, True, group, alike=alike)
    return result


def vote_together(
    action: Callable[[], T], vote: bool, group: Group, *, alike: tuple[type[Exception], ...] = ()
) -> tuple[T, bool]:
    """Call a function as `together` does; return its result, and whether all ranks vote yes."""
    result, error, cause = None, None, None
    try:
        result = action()
    except alike as err:
        error, cause = err, err
    except Exception as err:
        error, cause = RuntimeError(str(err) if isinstance(err, RuntimeError) else f"{type(err).__name__}: {err}"), err
    errors, votes = zip(*gather_objects((error, vote), group), strict=True)
    for found in errors:
        if found is not None:
            raise found from cause
    return cast(T, result), all(votes)


def warn_on_rank_zero(text: str) -> None:
    """Warn on one rank of what is the same on all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, UserWarning, stacklevel=3)
