"""The fetcher from which Lightning's loops take staged batches: it adapts the stream of batches and the walker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ...compat.lightning import DataFetcher, StagedFetcher
from ...runtime import Flight, Walker
from .batch_stream import BatchStream

StepArguments = Callable[[Any, int, int], tuple[Any, ...]]  # from (batch, batch_idx, dataloader_idx)


@dataclass(slots=True)
class StagedBatch:
    """Replaces the batch in the strategy's step: the arguments of the user's step, and the walker around it."""

    arguments: tuple[Any, ...]
    walker: Walker


class LookaheadFetcher(StagedFetcher):
    """Gives a loop the batches that the walker has staged, and the None batches between them."""

    def __init__(
        self,
        stream: BatchStream,
        step_arguments: StepArguments,
        begin_shared_calls: Callable[[], None],
        next_number: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(stream.inner)
        self.stream = stream
        self.walker: Walker | None = None  # the loop sets it before it takes the first batch
        self.take_part: Callable[[Flight], None] | None = None  # what an evaluation does for a batch of other ranks
        self._step_arguments, self._begin_shared_calls, self._next_number = (
            step_arguments,
            begin_shared_calls,
            next_number,
        )
        self._forget()

    def _forget(self) -> None:
        self.batch = None
        self._peeked = False  # whether `batch` is still to be delivered
        self._waiting: Flight | None = None  # the walker's batch, after the None batches before it
        self._num_delivered = 0  # batches of this epoch that are not None, `batch` included
        self._num_none_left: int | None = None  # None batches that end the epoch; None until its last batch is known
        self._has_ended = False  # whether the walker has ended the epoch
        self.trained_states: Any = self.stream.states  # of the loaders after the batch being trained; may be empty
        self.states_before: Any = self.stream.states  # of the loaders before that batch
        self._states_after_none: Any = self.stream.states  # of the loaders after the None batch delivered last

    @override
    def __iter__(self) -> LookaheadFetcher:
        self.drop()
        self.stream.begin_epoch()
        self._forget()
        self.done = self.inner.done
        return self

    def resume(self, states: list[Any]) -> None:
        """Note the states with which the loaders go on in the middle of an epoch, if there are any.

        The inner fetcher of a loader without a length has taken the next batch since.
        """
        if states and self.stream.inner.length is None:
            self.trained_states = self.states_before = states

    def drop(self) -> None:
        """Drop the batches that were fetched ahead, on all ranks alike."""
        self.stream.forget()
        self._begin_shared_calls()
        if self.walker is not None:
            self.walker.drain()
        self._forget()

    @override
    def __next__(self) -> StagedBatch:  # type: ignore[override]
        self.peek()
        assert self.walker is not None
        self._peeked, self.states_before = False, self.trained_states
        current = self.walker.batches.current
        if self.batch is None:
            self.trained_states = self._states_after_none
        elif current is not None:
            self.trained_states = current.loader_states
        has_none = self.walker.is_last or (not self.stream.trains and self.walker.batches.is_own_last)
        is_last = self._waiting is None and (self._has_ended or has_none)
        self.done = is_last and self._count_none_at_end() == 0
        return StagedBatch(self._step_arguments(self.batch, self.batch_idx, self.dataloader_idx), self.walker)

    def peek(self) -> Any:
        """Return the batch that `next` will deliver; begin the walker's iteration for it."""
        if self._peeked:
            return self.batch
        assert self.walker is not None, "the loop sets it"
        # A None batch comes after the walker has begun the batch that follows: by then all ranks have compared them.
        if self._waiting is None and not self._has_ended:
            self.stream.epoch.allow(self.walker.num_trained)
            self._begin_shared_calls()
            self._waiting = self.walker.next_batch()
            while self._waiting is not None and self._waiting.is_padding:  # of other ranks: this one has no more
                self._join_lookups(self._waiting)
                self._waiting = self.walker.next_batch()
            self._has_ended = self._waiting is None
        if self._waiting is None and not self._count_none_at_end():
            self.done = True
            self.trained_states = self.stream.states
            raise StopIteration
        if self._waiting is None or self.stream.nones_after(self._num_delivered):
            self._take_none()
        else:
            self._take(self._waiting)
        if self._next_number is not None:  # in an evaluation a batch keeps its loader's number
            self.batch_idx = self._next_number()
        self._peeked = True
        return self.batch

    def _join_lookups(self, flight: Flight) -> None:
        assert self.take_part is not None, "the loop of an evaluation sets it"
        self.take_part(flight)
        self._begin_shared_calls()

    def _take_none(self) -> None:
        """Make the next None batch the one to deliver: it comes before the walker's batch, or ends the epoch."""
        _, none = self.stream.skipped.popleft()
        self.batch, self.batch_idx, self.dataloader_idx = None, none.batch_idx, none.dataloader_idx
        self._states_after_none = none.loader_states
        self._num_none_left = None if self._waiting else self._count_none_at_end() - 1

    def _take(self, flight: Flight) -> None:
        """Make the walker's batch the one to deliver."""
        self.batch, self.batch_idx, self.dataloader_idx = flight.batch, flight.batch_idx, flight.dataloader_idx
        self._waiting = None
        self._num_delivered += 1

    def _count_none_at_end(self) -> int:
        """Return the number of None batches left at the epoch's end; all ranks come here after their last batch."""
        if self._num_none_left is None:
            self._num_none_left = self.stream.num_none_at_end(self._num_delivered)
        return self._num_none_left

    @override
    def teardown(self) -> None:
        if self.walker is not None:
            self.walker.abandon()
        super().teardown()


class NoneFetcher(DataFetcher):
    """Gives a loop a fetcher's next batch, which is None: Lightning's loop warns of it and skips it."""

    def __init__(self, fetcher: LookaheadFetcher) -> None:
        super().__init__()
        self._fetcher = fetcher

    @override
    def __next__(self) -> Any:
        next(self._fetcher)
        self.done = self._fetcher.done
        return None, self._fetcher.batch_idx, self._fetcher.dataloader_idx
