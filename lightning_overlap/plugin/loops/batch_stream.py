"""The stream of batches: it takes them from Lightning's fetcher and stages each for the walker."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer

from ...balance import Balancer, Exchange
from ...compat.lightning import DataFetcher, batches_held, loader_states, transfer_batch
from ...distributed import POLL_LAST
from ...runtime import NOTHING, BatchMemory, FetchedBatch, Rates, StageTimer, allocates_batches
from . import preemption, sigterm
from .epoch import Epoch

NUM_AT_HAND = 2  # batches taken early from a loader of unknown length, so that ranks poll only every other batch


class BatchStream:
    """The batches of a fit or an evaluation, staged in the order of Lightning's fetcher: a `runtime.BatchSource`."""

    # With `sends_sizes` the ranks compare their None batches with each batch's sizes; otherwise by polls.
    # With a `balancer` the ranks exchange samples of each batch before it is staged, while earlier ones train.
    def __init__(
        self,
        inner: DataFetcher,
        trainer: Trainer,
        *,
        trains: bool,
        sends_sizes: bool,
        balancer: Balancer | None = None,
        rates_now: Callable[[], Rates] = Rates,  # this rank's learning rates, for a comparison with other ranks'
    ) -> None:
        self.inner, self.trains, self.epoch = inner, trains, Epoch(trainer, trains=trains)
        self._trainer, self._sends_sizes = trainer, sends_sizes
        self._rates_now = rates_now
        # None batches (from the collate function) that the loop has not seen yet, each with the number of the epoch's
        # other batches before it. Lightning skips them, and all ranks have to skip the same.
        self.skipped: deque[tuple[int, FetchedBatch]] = deque()
        self._buffered: deque[FetchedBatch] = deque()  # taken from the loader, not staged yet
        allocates = all(map(allocates_batches, inner.combined_loader.flattened))
        self._balancer = balancer
        self._exchange: Future[Exchange | None] | None = None  # of the next batch to be staged, if it has begun
        # To be balanced, batches have to stay valid on the host until later ones were taken.
        held_on = trainer.strategy.root_device.type if balancer is None else "cpu"
        self._memory = BatchMemory(held_on, allocates=allocates)
        self._own_those_of_inner()  # its iterator may be running
        self._iterated = False  # whether `iter(self.inner)` was called here
        self._took = False  # whether a batch was taken from its iterator
        self.states = self._read_states()  # of the loaders after the last batch that was taken; may be empty
        self.forget()

    def forget(self) -> None:
        """Forget the batches that were fetched ahead; all ranks call this alike."""
        if self._balancer is not None:
            self._balancer.settle()
        self._exchange = None
        self._any_ended = False  # whether some rank has no further batch, in exchanges of samples
        self._buffered.clear()
        self.skipped.clear()
        self._index = -1  # of the batch fetched last
        self.latest_none = -1  # number in the epoch of the last None batch that was taken
        self._is_whole = False  # whether this epoch began at its first batch, not resumed in the middle

    def begin_epoch(self) -> None:
        """Begin to iterate the loaders anew."""
        self.forget()
        if self.states and not self._took and not self._iterated:
            # Resumed in the validation after an epoch's last batch. A loader whose iterator is a generator takes up its
            # state only when it is asked for a batch: the next epoch would begin, and end, where the last one ended.
            with suppress(StopIteration), sigterm.fetching(self._trainer):
                next(self.inner.iterator)  # type: ignore[arg-type]
        self._iterate_inner()
        self.states = self._read_states()

    @property
    def num_fetched(self) -> int:
        """Batches staged in this epoch."""
        return self._index + 1

    @property
    def has_batches(self) -> bool:
        """Whether this rank has taken a batch from the loader in this epoch."""
        return self.num_fetched > 0 or bool(self._buffered)

    @property
    def is_without_batches(self) -> bool:
        """Whether some rank has no batch in this epoch, as the ranks found when they balanced the first one."""
        return self._any_ended and self.num_fetched == 0

    @property
    def num_batches(self) -> float:
        """Length of the shortest rank's epoch, None batches included; `inf` if it is not known."""
        return self.epoch.num_batches

    @property
    def length_known(self) -> bool:
        """Whether all ranks are known to have equally many batches left; not in an epoch resumed in the middle."""
        return self.epoch.lengths_known and self._is_whole and self._sends_sizes

    @property
    def exhausted(self) -> bool:
        """Whether this rank has no further batch, up to the length of the shortest rank's epoch."""
        return not self._buffered and self._inner_is_exhausted

    @property
    def num_certain(self) -> int:
        """Number of batches after the last fetched batch that will surely be staged."""
        if not self._buffered or self.latest_none >= 0:
            return 0
        in_inner = batches_held(self.inner)[:1]
        num = len(self._buffered) + sum(not self.trains or batch is not None for batch, _, _ in in_inner)
        return int(min(num, self.epoch.num_allowed - self.num_fetched))

    @property
    def stop_requested(self) -> bool:
        """Whether this process received SIGTERM."""
        return sigterm.received(self._trainer)

    @property
    def save_requested(self) -> bool:
        """Whether this process received a preemption signal that is not dealt with yet."""
        found = preemption.of(self._trainer)
        return found is not None and found.wanted

    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Fetch batch `index` and stage it: Lightning's batch-transfer hooks run here, once per batch."""
        if index >= self.epoch.num_allowed:
            return None
        if index == 0:
            self._is_whole = self.inner.fetched == 0
        if self._balancer is not None:
            fetched = self._next_balanced(self._balancer, index, timer)
        else:
            fetched = self._next_own(index, timer)
        if fetched is None:
            return None
        self._index = index
        staged = self._stage(fetched)  # before the loader makes the next batch, which may overwrite this one
        for ahead in range(index + 1 + len(self._buffered), index + 1 + self._num_to_buffer):
            if ahead < self.epoch.num_allowed:
                self._buffer(ahead, timer)
        if self._balancer is not None and not self._any_ended and index + 1 < self.epoch.num_allowed:
            self._exchange = self._start_exchange(self._balancer, index + 1, timer)
        return fetched._replace(batch=staged, rates=self._rates_now())

    def _next_own(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        return self._buffered.popleft() if self._buffered else self._next_to_train(index, timer)

    def _next_balanced(self, balancer: Balancer, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Return batch `index` with the samples that this rank has got, or None if any rank lacks the batch."""
        if self._any_ended:
            return None if self.trains else self._next_own(index, timer)
        started, self._exchange = self._exchange, None
        exchanged = (started or self._start_exchange(balancer, index, timer)).result()
        if exchanged is None:
            self._any_ended = True
            return None if self.trains else self._next_own(index, timer)
        return self._buffered.popleft()._replace(batch=exchanged.batch, balanced=exchanged.balanced)

    def _start_exchange(self, balancer: Balancer, index: int, timer: StageTimer | None) -> Future[Exchange | None]:
        """Start the exchange of batch `index`, the next one to be staged; all ranks call this alike."""
        if not self._buffered:
            self._buffer(index, timer)
        if not self._buffered:
            return balancer.start(None, lacks=True, number=index)
        own = self._buffered[0]
        return balancer.start(own.batch, lacks=False, number=index, dataloader_idx=own.dataloader_idx)

    def _stage(self, fetched: FetchedBatch) -> Any:
        dataloader_idx = 0 if self.trains else fetched.dataloader_idx  # Lightning names loader 0 in training
        return transfer_batch(self._trainer, fetched.batch, dataloader_idx)

    def nones_after(self, num_before: int) -> list[int]:
        """Return the numbers of the None batches that come right after `num_before` other batches."""
        return [none.batch_idx for before, none in self.skipped if before == num_before]

    def num_none_at_end(self, num_before: int) -> int:
        """Return how many None batches end the epoch on all ranks, after `num_before` others; all ranks call this."""
        if not self.trains:
            return 0
        if self.num_fetched <= num_before and not self.exhausted:
            self._buffer(num_before, None)
        goes_on = self.num_fetched > num_before or bool(self._buffered)
        return self.epoch.num_none_at_end(self.nones_after(num_before), goes_on=goes_on)

    @property
    def _inner_is_exhausted(self) -> bool:
        return self.inner.done or self.inner.fetched >= self.num_batches

    @property
    def _num_to_buffer(self) -> int:
        """Number of batches to take from the loader before they are staged, so that the ranks learn of its end."""
        if self.length_known:
            # Only among the last batches, which the ranks poll: the remaining batches may all be None.
            return int(self.num_batches - self.inner.fetched <= POLL_LAST)
        keeps = self._trainer.world_size > 1 and self._memory.is_own
        return NUM_AT_HAND - (self.inner.length is None) if keeps else 0  # without a length the inner fetcher holds one

    def _buffer(self, index: int, timer: StageTimer | None) -> None:
        if (following := self._next_to_train(index, timer)) is not None:
            self._buffered.append(following)

    def _next_to_train(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        while (fetched := self._next_of_inner(timer)) is not None:
            if not self.trains or fetched.batch is not None:
                return fetched._replace(latest_none=self.latest_none)
            self.skipped.append((index, fetched))
            self.latest_none = fetched.batch_idx
        return None

    def _next_of_inner(self, timer: StageTimer | None) -> FetchedBatch | None:
        for _ in range(2):
            if not self._inner_is_exhausted:
                self._took = True
                with suppress(StopIteration), NOTHING if timer is None else timer.data():
                    with sigterm.fetching(self._trainer):
                        batch, batch_idx, dataloader_idx = next(self.inner)
                    if self.inner.length is None:  # it holds the next batch; this batch was copied when it came
                        self._own_those_of_inner()
                    else:
                        batch = self._memory.own(batch)
                    return FetchedBatch(batch, batch_idx, dataloader_idx, loader_states=self._states_after())
            if self.inner.fetched > 0 or self._iterated or not self.states:
                break
            # Resumed after an epoch's last batch: the loader's iterator continues at its end. Lightning begins the next
            # epoch with this iterator, as it makes a new one only if it has not resumed.
            self._iterate_inner()
        if self.epoch.lengths_known and self._is_whole and self.inner.fetched < self.num_batches:
            raise RuntimeError(
                f"rank {self._trainer.global_rank}: the data loader ended after {self.inner.fetched} batches, its "
                f"length says {self.num_batches:g}. Does the dataset's __getitem__ raise StopIteration?"
            )
        return None

    def _iterate_inner(self) -> None:
        self._iterated = True
        with sigterm.fetching(self._trainer):
            iter(self.inner)
        self._own_those_of_inner()

    def _own_those_of_inner(self) -> None:
        """Copy the batches that the inner fetcher holds, if the loader may overwrite them (`BatchMemory`)."""
        held = batches_held(self.inner)
        held[:] = [(self._memory.own(batch), batch_idx, dataloader_idx) for batch, batch_idx, dataloader_idx in held]

    def _states_after(self) -> Any:
        """Return the states of the loaders after the batch that the inner fetcher has just returned."""
        if not self.states:
            return self.states  # no loader has a state, and Lightning is slow to look for it
        before, self.states = self.states, self._read_states()
        # Without a length the inner fetcher has fetched the next batch, to know whether this is the last.
        return before if self.inner.length is None else self.states

    def _read_states(self) -> Any:
        # Only loaders with a state count. No checkpoint holds the position of an evaluation.
        return loader_states(self.inner) if self.trains else []
