"""Exchanges the samples of batches between ranks, on a thread and a process group of its own."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..distributed import gather_objects, together
from .assignment import Ints, assign, loads
from .options import Balance
from .samples import Samples, samples_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Balanced:
    """What balancing did to a batch, on all ranks."""

    before: tuple[float, ...]
    """Cost of each rank's samples as its data loader gave them."""
    after: tuple[float, ...]
    """Cost of each rank's samples in training."""
    num_moved: int = 0
    """Samples that train on another rank than their data loader's."""
    num_bytes: int = 0
    """Bytes that this rank sent to others for it: costs, sizes and samples."""


class Exchange(NamedTuple):
    """The result of a batch's exchange."""

    batch: Any
    balanced: Balanced | None  # None for a batch that stayed as it was, as the ranks' batches do not go together


class _Has(IntEnum):
    """What a rank has to give to an exchange."""

    BATCH = 0
    NO_BATCH = 1
    ERROR = 2


class _Header(NamedTuple):
    """What each rank sends first, as int64."""

    has: int
    num_samples: int = 0
    digest: int = 0  # of the batch's description
    dataloader_idx: int = 0


@dataclass(slots=True)
class _Own:
    """This rank's part of an exchange."""

    samples: Samples | None = None
    costs: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    digest: int = 0  # of the batch's description
    error: RuntimeError | None = None


class Balancer:
    """Balances the batches of a run. All ranks start equally many exchanges in the same order; one on two or more.

    A thread works them off in this order. Only it uses the group, which is gloo's.
    """

    def __init__(self, options: Balance, group: dist.ProcessGroup, tell: Callable[[str], None]) -> None:
        self.options, self._group, self._tell = options, group, tell
        self._rank, self._num_ranks = group.rank(), group.size()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Exchange | None], Future[Exchange | None]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Exchange | None] | None = None
        self._capacity = 0  # costs that are sent with a header, the same on all ranks
        self._told: set[str] = set()

    def start(self, batch: Any, *, lacks: bool, number: int, dataloader_idx: int = 0) -> Future[Exchange | None]:
        """Start the exchange of a batch, or tell the others that this rank lacks it; all ranks call this alike.

        The future gives None if any rank lacks the batch. It raises a RuntimeError on all ranks if a function of the
        user's fails on any, or if the batches have a field without samples, or differ in their fields. `number` is for
        errors.
        """
        job: Future[Exchange | None] = Future()
        self._jobs.put((lambda: self._exchange(batch, lacks, number, dataloader_idx), job))
        if self._thread is None:
            # a daemon, so that a rank which waits for lost ranks can end
            self._thread = threading.Thread(target=self._run, name="balanced batches", daemon=True)
            self._thread.start()
        self._last = job
        return job

    def settle(self) -> None:
        """Wait until all exchanges that were started are over; all ranks call this alike. Their errors are dropped."""
        if self._last is not None:
            with suppress(Exception):
                self._last.result()

    def close(self) -> None:
        """End the thread after its present exchange; waits for nothing."""
        if self._thread is not None:
            while not self._jobs.empty():
                with suppress(queue.Empty):
                    self._jobs.get_nowait()
            self._jobs.put(None)
            self._thread = None

    def _run(self) -> None:
        for do, job in iter(self._jobs.get, None):
            try:
                job.set_result(do())
            except BaseException as err:
                job.set_exception(err)
            del do, job  # they hold batches

    # Everything below runs on the thread.

    def _exchange(self, batch: Any, lacks: bool, number: int, dataloader_idx: int) -> Exchange | None:
        own = _Own() if lacks else self._weigh(batch, number)
        headers, costs, num_bytes = self._gather_costs(own, lacks, dataloader_idx)
        if any(header.has == _Has.ERROR for header in headers):
            self._raise_together(own.error)
        if any(header.has == _Has.NO_BATCH for header in headers):
            return None
        assert own.samples is not None
        if self._do_not_go_together(headers):
            return Exchange(batch, None)
        if len({header.digest for header in headers}) > 1:
            self._name_difference(own.samples, number)
        ranks = assign(costs)
        moved = int((ranks != np.arange(self._num_ranks)[:, None]).sum())
        if moved:
            batch, num_sent = self._send(own.samples, ranks, number)
            num_bytes += num_sent
        return Exchange(batch, Balanced(_numbers(costs.sum(axis=1)), _numbers(loads(costs, ranks)), moved, num_bytes))

    def _weigh(self, batch: Any, number: int) -> _Own:
        """Ask the user's function for the costs, and look at the batch's fields."""
        try:
            costs = _checked_costs(self.options.cost(batch))
            samples = samples_of(batch, len(costs), self.options)
            return _Own(samples, costs, _digest(samples.describe()))
        except BaseException as err:  # of any kind: the other ranks wait for an answer
            return _Own(error=self._named(err, number))

    def _named(self, err: BaseException, number: int) -> RuntimeError:
        """Return an error of this rank that says which batch it is about."""
        what = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        named = RuntimeError(f"balance, batch {number} of the epoch on rank {self._rank}: {what}")
        named.__cause__ = err
        return named

    def _gather_costs(
        self, own: _Own, lacks: bool, dataloader_idx: int
    ) -> tuple[list[_Header], NDArray[np.float64], int]:
        """Return the header of each rank, the costs by rank (if all have as many), and the bytes sent."""
        has = _Has.NO_BATCH if lacks else _Has.BATCH if own.error is None else _Has.ERROR
        header = np.array(_Header(has, len(own.costs), own.digest, dataloader_idx), np.int64)
        room = np.zeros(self._capacity, np.float32)
        fits = own.costs[: self._capacity]
        room[: len(fits)] = fits
        received = self._all_gather(np.concatenate([header.view(np.uint8), room.view(np.uint8)]))
        num_bytes = received[0].nbytes * (self._num_ranks - 1)
        headers = [_Header(*row[: header.nbytes].view(np.int64).tolist()) for row in received]
        count = max(one.num_samples for one in headers)
        costs = received[:, header.nbytes :]
        if count > self._capacity:
            self._capacity = count
            room = np.zeros(count, np.float32)
            room[: len(own.costs)] = own.costs
            costs = self._all_gather(room.view(np.uint8))
            num_bytes += room.nbytes * (self._num_ranks - 1)
        by_rank = np.ascontiguousarray(costs).view(np.float32)[:, :count]
        return headers, by_rank.astype(np.float64), num_bytes

    def _do_not_go_together(self, headers: list[_Header]) -> bool:
        """Whether the ranks' batches stay as they are, on all ranks alike; rank 0 says why, once."""
        counts = [header.num_samples for header in headers]
        if len(set(counts)) > 1:
            self._tell_once(
                f"balance: batches with unequal numbers of samples on the ranks (here {counts}) stay as they are: a "
                "sample's part in the mean loss depends on the size of its rank's batch."
            )
            return True
        # in an evaluation a rank may be at another loader already
        return len({header.dataloader_idx for header in headers}) > 1

    def _tell_once(self, text: str) -> None:
        kind = text.split("(")[0]
        if self._rank == 0 and kind not in self._told:
            self._told.add(kind)
            self._tell(text)

    def _name_difference(self, samples: Samples, number: int) -> None:
        """Raise a RuntimeError that names a field in which the ranks' batches differ, on all ranks alike."""
        by_rank = [dict(one) for one in gather_objects(samples.describe(), self._group)]
        for path in sorted({path for one in by_rank for path in one}):
            found = [one.get(path) for one in by_rank]
            if len(set(found)) > 1:
                rank = next(rank for rank, what in enumerate(found) if what != found[0])
                first, other = (what or "nothing" for what in (found[0], found[rank]))
                raise RuntimeError(
                    f"balance, batch {number} of the epoch: {path} is {first} on rank 0, {other} on rank {rank}. Ranks "
                    "exchange samples, so their batches need the same fields, and the same values in the fields "
                    "that belong to no sample (numbers, texts). Make a value of each sample a tensor, or give Balance "
                    "the functions split and join."
                )
        raise RuntimeError(f"balance, batch {number} of the epoch: the ranks have different batches.")

    def _send(self, samples: Samples, ranks: Ints, number: int) -> tuple[Any, int]:
        """Exchange the samples; return this rank's new batch, and the bytes sent.

        Its samples are in the order of the ranks that they come from, then of their places there.
        """
        me, size = self._rank, self._num_ranks
        chunks, error = [], None
        try:
            for places in (np.flatnonzero(ranks[me] == rank) for rank in range(size)):
                chunks.append(np.concatenate(samples.pack(places)) if len(places) else _NOTHING)
        except BaseException as err:  # of an object of the user's, which cannot be pickled
            chunks, error = [_NOTHING] * size, self._named(err, number)
        kept, chunks[me] = chunks[me], _NOTHING  # not sent
        num_sent = torch.tensor([len(chunk) if error is None else -1 for chunk in chunks])
        num_received = torch.empty_like(num_sent)
        self._all_to_all(num_received, num_sent)
        sizes = num_received.tolist()
        if min(sizes) < 0:
            self._raise_together(error)
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = torch.from_numpy(np.concatenate(chunks))
        self._all_to_all(received, sent, sizes, num_sent.tolist())
        parts = np.split(received.numpy(), np.cumsum(sizes[:-1]))
        parts[me] = kept
        counts = [int((of_rank == me).sum()) for of_rank in ranks]
        try:
            batch = samples.join(parts, counts)
        except BaseException as err:
            batch, error = None, self._named(err, number)
        if self._all_gather(np.array([error is not None], np.uint8)).any():
            self._raise_together(error)
        return batch, len(sent) + (num_sent.nbytes // size + 1) * (size - 1)

    def _raise_together(self, error: RuntimeError | None) -> None:
        """Raise the first failing rank's error on all ranks; all call this."""
        together(lambda: _raise(error), self._group)

    def _all_gather(self, own: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes of all ranks, `(R, len(own))`; all have equally many."""
        sent = torch.from_numpy(own).repeat(self._num_ranks)
        received = torch.empty_like(sent)
        self._all_to_all(received, sent)
        return received.view(self._num_ranks, -1).numpy()

    def _all_to_all(self, received: Tensor, sent: Tensor, *sizes: list[int]) -> None:
        # Not through `torch.distributed`: timers and benchmarks patch its all-to-alls, for the thread that trains.
        self._group.alltoall_base(received, sent, *(sizes or ([], []))).wait()


_NOTHING = np.empty(0, np.uint8)


class _CostError(ValueError):
    """The user's function returned no costs."""


def _checked_costs(given: Any) -> Floats:
    if isinstance(given, Tensor) and given.device.type != "cpu":
        raise _CostError(f"cost returned a tensor on {given.device}: let it return one on the CPU.")
    try:
        costs = np.asarray(given.detach().to(torch.float64) if isinstance(given, Tensor) else given, np.float64)
    except (TypeError, ValueError) as err:
        raise _CostError(f"cost returned {given!r}: it has to return a number for each sample.") from err
    if costs.ndim != 1:
        raise _CostError(
            f"cost returned numbers of the shape {tuple(costs.shape)}: it has to return one for each sample, (B,)."
        )
    with np.errstate(over="ignore"):
        sent = costs.astype(np.float32)
    for wrong, what in (
        (~np.isfinite(costs), "which is not a finite number"),
        (costs < 0, "which is negative"),
        (~np.isfinite(sent), "which is too large: costs are sent as float32, whose largest number is 3.4e+38"),
    ):
        if wrong.any():
            place = int(wrong.argmax())
            raise _CostError(f"cost returned {costs[place]} for sample {place}, {what}.")
    return sent


def _raise(error: RuntimeError | None) -> None:
    if error is not None:
        raise error


def _digest(description: list[tuple[str, str]]) -> int:
    text = "\n".join(f"{path}: {what}" for path, what in description)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _numbers(costs: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(costs.tolist())
