"""The stream of batches: it takes them from Lightning's fetcher and stages each for the executor.

It skips None batches, copies batches that the loader may overwrite, and notes the loaders' states for checkpoints.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher

from ...distributed import ASK_FOR_LAST
from ...runtime import BatchMemory, FetchedBatch, StageTimer, keeps_its_data
from . import sigterm
from .epoch import Epoch

NUM_AT_HAND = 2
"""Batches taken from a loader of unknown length before they are staged, so that ranks ask only every other batch."""


class SkippedBatch(NamedTuple):
    """A None batch that the loop has not seen yet."""

    num_before: int
    """Batches of the epoch before it that are not None."""
    batch_idx: int
    dataloader_idx: int


class BatchStream:
    """The batches of a fit or an evaluation, staged in the order of Lightning's fetcher: a `runtime.BatchSource`.

    Lightning skips a *None batch*, for which the collate function has returned None. All ranks have to skip the same
    batches.

    The iterator of `inner`, Lightning's fetcher, may be running. With `sends_sizes` the ranks compare their None
    batches with each batch's sizes; otherwise they ask each other.
    """

    def __init__(
        self, inner: _DataFetcher, trainer: Trainer, epoch: Epoch, *, trains: bool, sends_sizes: bool = False
    ) -> None:
        self.inner, self.trains = inner, trains
        self._trainer, self._epoch, self._sends_sizes = trainer, epoch, sends_sizes
        self.skipped: deque[SkippedBatch] = deque()
        """None batches from the loader that the loop has not seen yet, the oldest first."""
        self._buffered: deque[FetchedBatch] = deque()  # taken from the loader, not staged yet
        is_own = all(map(keeps_its_data, inner.combined_loader.flattened))
        self._memory = BatchMemory(trainer.strategy.root_device.type, is_own=is_own)
        self._own_those_of_inner()
        self._iterated = False  # whether `iter(self.inner)` was called here
        self.states = self._read_states()
        """States of the loaders after the last batch that was taken; empty if no loader has a state."""
        self.forget()

    def forget(self) -> None:
        """Forget the batches that were fetched ahead."""
        self._buffered.clear()
        self.skipped.clear()
        self._index = -1  # of the batch fetched last
        self.latest_none = -1
        """Number in the epoch of the last None batch that was taken; -1 if there is none."""
        self._is_whole = False  # whether this epoch began at its first batch, not resumed in the middle

    def begin_epoch(self) -> None:
        """Begin to iterate the loaders anew."""
        self.forget()
        self._iterated = True
        self._memory.begin_epoch()
        iter(self.inner)
        self._own_those_of_inner()
        self.states = self._read_states()

    # -- what the executor asks for ---------------------------------------------------------------------------------

    @property
    def num_fetched(self) -> int:
        """Batches staged in this epoch."""
        return self._index + 1

    @property
    def num_batches(self) -> float:
        """Length of the shortest rank's epoch, None batches included; `inf` if it is not known."""
        return self._epoch.num_batches

    @property
    def length_known(self) -> bool:
        """Whether all ranks are known to have equally many batches left; not in an epoch resumed in the middle."""
        return self._epoch.lengths_known and self._is_whole and self._sends_sizes

    @property
    def exhausted(self) -> bool:
        """Whether this rank has no further batch, up to the length of the shortest rank's epoch."""
        return not self._buffered and self._inner_is_exhausted

    @property
    def num_certain(self) -> int:
        """Number of batches after the last fetched batch that will surely be staged."""
        if not self._buffered or self.latest_none >= 0:
            return 0
        in_inner: list[Any] = getattr(self.inner, "batches", [])[:1]
        num = len(self._buffered) + sum(not self._is_skipped(batch) for batch, _, _ in in_inner)
        return int(min(num, self._epoch.num_allowed - self.num_fetched))

    @property
    def stop_requested(self) -> bool:
        """Whether this process received SIGTERM."""
        return sigterm.heard(self._trainer)

    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Fetch batch `index` and stage it: Lightning's batch-transfer hooks run here, once per batch.

        Returns:
            The staged batch; None at the end of the epoch, and while `max_steps` allows no more.

        Raises:
            RuntimeError: The data ends before the length of its loader, on which the other ranks rely.
        """
        if index >= self._epoch.num_allowed:
            return None
        if index == 0:
            self._is_whole = self.inner.fetched == 0
        fetched = self._buffered.popleft() if self._buffered else self._next_to_train(index, timer)
        if fetched is None:
            return None
        self._index = index
        # Before the loader makes the next batch, which may overwrite this one. Lightning names loader 0 in training.
        staged = stage_batch(self._trainer, fetched.batch, 0 if self.trains else fetched.dataloader_idx)
        for ahead in range(index + 1 + len(self._buffered), index + 1 + self._num_to_buffer):
            if ahead < self._epoch.num_allowed and (following := self._next_to_train(ahead, timer)) is not None:
                self._buffered.append(following)
        return fetched._replace(batch=staged)

    # -- what the fetcher asks for ----------------------------------------------------------------------------------

    def nones_after(self, num_before: int) -> list[int]:
        """Return the numbers of the None batches that come right after `num_before` other batches."""
        return [skipped.batch_idx for skipped in self.skipped if skipped.num_before == num_before]

    def goes_on_after(self, num_before: int) -> bool:
        """Return whether another batch follows that is not None; may fetch it, so call this at an epoch's end."""
        if self.num_fetched <= num_before and not self.exhausted:
            following = self._next_to_train(num_before, None)
            self._buffered.extend([] if following is None else [following])
        return self.num_fetched > num_before or bool(self._buffered)

    # -- Lightning's fetcher ------------------------------------------------------------------------------------------

    @property
    def _inner_is_exhausted(self) -> bool:
        return self.inner.done or self.inner.fetched >= self.num_batches

    @property
    def _num_to_buffer(self) -> int:
        """Number of batches to take from the loader before they are staged, so that the ranks learn of its end."""
        if self.length_known:
            # Only among the last batches, which the ranks ask about: the remaining batches may all be None.
            return int(self.num_batches - self.inner.fetched <= ASK_FOR_LAST)
        keeps = self._trainer.world_size > 1 and self._memory.is_own
        return NUM_AT_HAND - (self.inner.length is None) if keeps else 0  # without a length the inner fetcher holds one

    def _next_to_train(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        """Return the batch `index`, past None batches; None at the end."""
        while (fetched := self._next_of_inner(timer)) is not None:
            if not self._is_skipped(fetched.batch):
                return fetched._replace(latest_none=self.latest_none)
            self.skipped.append(SkippedBatch(index, fetched.batch_idx, fetched.dataloader_idx))
            self.latest_none = fetched.batch_idx
        return None

    def _is_skipped(self, batch: Any) -> bool:
        """Whether the loop skips this batch."""
        return self.trains and batch is None

    def _next_of_inner(self, timer: StageTimer | None) -> FetchedBatch | None:
        for _ in range(2):
            if not self._inner_is_exhausted:
                with suppress(StopIteration), nullcontext() if timer is None else timer.data():
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
            self._iterated = True
            iter(self.inner)
            self._own_those_of_inner()
        if self.length_known and self.inner.fetched < self.num_batches:
            raise RuntimeError(
                f"rank {self._trainer.global_rank}: the data loader ended after {self.inner.fetched} batches, its "
                f"length says {self.num_batches:g}. Does the dataset's __getitem__ raise StopIteration?"
            )
        return None

    def _own_those_of_inner(self) -> None:
        """Copy the batches that the inner fetcher holds, if the loader may overwrite them (`BatchMemory`)."""
        held: list[Any] = getattr(self.inner, "batches", [])
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
        return self.inner.combined_loader._state_dicts() if self.trains else []


def stage_batch(trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
    """Prepare a batch as Lightning's loops do before its step: convert, transfer hooks, copy to the device."""
    module: LightningModule = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    strategy = trainer.strategy
    with trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.batch_to_device"):  # type: ignore[attr-defined]
        return strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
