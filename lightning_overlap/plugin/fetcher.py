"""The fetcher that gives Lightning's fit loop its batches while it stages coming ones.

It replaces Lightning's own fetcher (`inner`), and takes batches from it: it stages each one when the executor asks for
it, skips batches that are None, and keeps the states of the data loaders for checkpoints. Evaluations have one too
(`evaluation_loops.py`).

A *None batch* is one for which the collate function returns None: Lightning skips it. Each rank may skip others. Those
that all ranks have skipped by then *count* in `batch_idx` and schedulers on all ranks; further ones of a rank do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from typing_extensions import override

from ..distributed import ASK_FOR_LAST, SkippedBatches
from ..runtime import BatchMemory, Executor, InFlightBatch, keeps_its_data
from ..tables import has_model_parallel_tables
from . import sigterm

NUM_AT_HAND = 2
"""Batches taken from a loader of unknown length before they are staged: so ranks ask about every other batch only."""

_Fetched: TypeAlias = "tuple[tuple[Any, int, int], Any]"
"""(batch, batch_idx, dataloader_idx) from Lightning's fetcher, and the states of the loaders after this batch."""

StepArguments = Callable[[Any, int, int], tuple[Any, ...]]
"""Returns the arguments of the user's step for (batch, batch_idx, dataloader_idx)."""


class StagedBatch:
    """What a loop passes to the strategy's step in the place of the batch: the arguments of the user's step.

    `executor` runs the stages around it; `check` is called between its forward and its backward, if it is not None.
    """

    def __init__(self, arguments: tuple[Any, ...], executor: Executor, check: Callable[[], None] | None) -> None:
        self.arguments, self.executor, self.check = arguments, executor, check


class LoaderStates:
    """States of the data loaders after each batch in flight: a checkpoint takes that of the batch being trained.

    Lightning would take the present state, which is that after the last batch fetched.

    Args:
        inner: The fetcher that takes batches from the loaders.
        kept: Whether a checkpoint may ask for them; if not no state is read.
    """

    def __init__(self, inner: _DataFetcher, *, kept: bool) -> None:
        self._inner, self._kept = inner, kept
        self.begin_epoch()

    def _read(self) -> Any:
        # Lightning takes the state of loaders that have one, and an empty list otherwise.
        return self._inner.combined_loader._state_dicts() if self._kept else None

    def begin_epoch(self) -> None:
        """Forget the batches of another epoch."""
        self.latest: Any = self._read()
        """States after the last batch fetched; empty if no loader has a state."""
        self.after: dict[int, Any] = {-1: self.latest}
        """States after each batch in flight, by its number; those of -1 are before the first one."""

    def read(self) -> Any:
        """Return the states after the batch that the inner fetcher has just given; empty if no loader has a state."""
        if not self.latest:
            return self.latest  # no loader has a state: Lightning takes long to look for it
        before, self.latest = self.latest, self._read()
        # Without a length the inner fetcher has fetched one batch more, to know whether it is the last.
        return before if self._inner.length is None else self.latest

    def note(self, index: int, states: Any, depth: int) -> None:
        """Remember the states after a batch, as `read` gave them; those older than `depth` batches are let go."""
        if not states:
            return
        self.after[index] = states
        # The batch being trained may be the first of those in flight, and only be peeked at.
        self.after.pop(index - depth - 1, None)


def _of_inner(name: str) -> Any:
    """Return a property of the fetcher that reads and writes the attribute `name` of the inner one."""
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


class LookaheadFetcher(_DataLoaderIterDataFetcher):
    """Gives the loop staged batches, and the executor the batches to stage.

    It is a subclass of the fetcher for `dataloader_iter`, for which Lightning's loop does no batch transfer itself. It
    owns the executor (made for the first batch), None batches until their turn, and what is known of the epoch's end.
    `inner` is Lightning's fetcher, whose iterator may be running; `trains` tells a fit from an evaluation.
    """

    def __init__(self, inner: _DataFetcher, trainer: Trainer, step_arguments: StepArguments, *, trains: bool) -> None:
        self.inner, self.trains = inner, trains
        kept = {name: getattr(inner, name) for name in ("fetched", "length", "_start_profiler", "_stop_profiler")}
        super().__init__()  # resets them, by way of the properties below, on the inner one, which is running already
        for name, value in kept.items():
            setattr(inner, name, value)
        self._trainer = trainer
        self._step_arguments = step_arguments
        self.executor: Executor | None = None
        self._peeked = False
        self._skipped: deque[tuple[int, int, int]] = deque()
        """None batches to come: how many others come before it in the epoch, its batch_idx, its dataloader_idx."""
        self.told: SkippedBatches | None = None  # tells other ranks what this one skips; None in evaluations
        self._real: InFlightBatch | None = None  # the executor's batch, to be delivered after the None ones before it
        self._buffered: deque[_Fetched] = deque()  # fetched after the batch that was staged last
        is_own = all(map(keeps_its_data, inner.combined_loader.flattened))
        self._memory = BatchMemory(trainer.strategy.root_device.type, is_own=is_own)
        self._own_those_of_inner()
        self.num_skipped = self._num_delivered = 0  # None batches fetched in this epoch; other batches delivered
        self.counts = True  # whether the batch that was delivered counts on all ranks: all do but some None ones
        self._num_counted = self._num_counted_before = 0  # None batches that count: so far; before the last other batch
        self.num_to_catch_up = 0  # None batches that came to count with this batch: their scheduler steps are to come
        self._unchecked = False  # whether a None batch was delivered since `_check_steps`
        self._ends_with_none = False  # `InFlightBatch.ends_with_none` of the last batch delivered that is not None
        self._has_ended = False  # whether the executor said that the epoch is over, as it does on all ranks
        self._iterated = False  # whether `iter(self.inner)` was called by this fetcher
        self._num_allowed: float = 0  # batches to fetch in this epoch, by `max_steps`
        self._num_in_window = 0  # batches since the last optimizer step
        self.window: tuple[int, bool] | None = None
        """With accumulation the `batch_idx` in all ranks' count, and whether they step; None: as Lightning counts."""
        self.num_batches: float = float("inf")  # length of the shortest rank's epoch
        self.lengths_known = False  # whether the lengths of all ranks are known
        self._is_whole = False  # whether this epoch began at its first batch: not if it is resumed in the middle
        self._states = LoaderStates(inner, kept=trains)  # no checkpoint holds the position of an evaluation
        self.done = inner.done

    fetched = _of_inner("fetched")
    length = _of_inner("length")
    _start_profiler = _of_inner("_start_profiler")
    _stop_profiler = _of_inner("_stop_profiler")
    combined_loader = _of_inner("combined_loader")

    @override
    def __iter__(self) -> LookaheadFetcher:
        self.drop()
        self._iterated = True
        self._memory.begin_epoch()
        if self.told is not None:
            self.told.begin_epoch()
        iter(self.inner)
        self._own_those_of_inner()
        self._states.begin_epoch()
        self.done = self.inner.done
        return self

    @override
    def __next__(self) -> StagedBatch:  # type: ignore[override]
        self.peek()
        self._peeked = False
        assert self.executor is not None
        self.done = self.executor.is_last and self._real is None and not self._skips
        arguments = self._step_arguments(self._batch, self._batch_idx, self._dataloader_idx)
        accumulates = self.told is not None and self._every > 1
        self.window = self._place_in_window(self.executor) if accumulates else None
        check = self._check_steps if self._num_delivered_none and self.told and self.length_known else None
        return StagedBatch(arguments, self.executor, check)

    def peek(self) -> Any:
        """Return the batch that `next` is going to deliver; begin the executor's iteration for it.

        Raises:
            StopIteration: The epoch's data has ended.
        """
        if self._peeked:
            return self._batch
        if self.executor is None:
            self.executor = self._trainer.strategy.make_executor(self)  # type: ignore[attr-defined]
        if self.executor.queue.num_fetched == 0:
            self._num_in_window = self._num_ready % self._every
        self._num_allowed = self.executor.num_trained - (self._real is not None) + self._num_batches_left()
        # Which None batches count is known with the batch after them, or once the epoch has ended.
        if not (self._real or self._has_ended or (self._skips and (self.told is None or self._at_end))):
            self._real = self.executor.next_batch()
            self._has_ended = self._real is None
        if self._skips:
            _, batch_idx, self._dataloader_idx = self._skipped.popleft()
            self._batch, self._batch_idx = None, self._number(batch_idx)
            self._count_none()
        elif self._real is not None:
            inflight, self._real = self._real, None
            self._num_delivered += 1
            self._batch, self._dataloader_idx = inflight.batch, inflight.dataloader_idx
            self._batch_idx, self._ends_with_none = self._number(inflight.batch_idx), inflight.ends_with_none
            self.counts = True
            if self.told is not None and not self.length_known:
                self.num_to_catch_up = inflight.fewest_skipped - self._num_counted
                self._num_counted = inflight.fewest_skipped
            self._num_counted_before = self._num_counted
        else:
            self.done = True
            raise StopIteration
        self._peeked = True
        return self._batch

    @property
    def _skips(self) -> bool:
        """Whether a None batch comes next; one that lies after the last batch of all ranks never does."""
        return bool(self._skipped) and self._skipped[0][0] <= self._num_delivered

    @property
    def _every(self) -> int:
        """How many batches share an optimizer step."""
        return self._trainer.accumulate_grad_batches

    @property
    def _num_delivered_none(self) -> int:
        return self.num_skipped - len(self._skipped)

    @property
    def _at_end(self) -> bool:
        """Whether the last batch that is not None has been delivered; all ranks know that by now."""
        assert self.executor is not None
        return self._real is None and (self._has_ended or self.executor.is_last)

    def _count_none(self) -> None:
        """Decide if a None batch counts: if every rank has skipped as many before the next batch, or after the last.

        If lengths are known each rank goes by its own count up to the last batch; `_check_steps` compares the counts.
        """
        if self.told is None or (self.length_known and not self._at_end):
            self.counts, self._unchecked = True, True
        else:
            self.counts = self._num_counted < (self._num_at_end if self._real is None else self._real.fewest_skipped)
        self._num_counted += self.counts

    @property
    def _num_at_end(self) -> int:
        """How many None batches count in the whole epoch; known at its end."""
        assert self.executor is not None
        return self._num_counted_before + self.executor.end.num_none_at_end

    @property
    def num_uncounted(self) -> int:
        """How many None batches this rank has skipped in this epoch that do not count."""
        return self._num_delivered_none - self._num_counted

    def _place_in_window(self, executor: Executor) -> tuple[int, bool] | None:
        """Return `window` for the batch that is delivered."""
        number = self._batch_idx - self.num_uncounted
        steps = (number + 1) % self._every == 0
        if self._batch is not None:
            steps = steps or (executor.is_last and not self._ends_with_none)
            self._num_in_window = 0 if steps else self._num_in_window + 1
        elif self._at_end:
            steps = self.counts and (steps or self._num_counted == self._num_at_end)
        return (number, steps) if self._batch is not None or self._at_end else None

    def _check_steps(self) -> None:
        """Raise a RuntimeError if None batches make ranks step their optimizers or schedulers at different batches."""
        assert self.told is not None
        trainer, num, skipped = self._trainer, self._num_delivered, self._num_delivered_none
        waits = not has_model_parallel_tables(trainer.lightning_module)
        if self.window is not None:
            number, steps = self.window
            by_end = steps and (number + 1) % self._every != 0
            self.told.check_window(num, skipped, number, self._every, by_end=by_end, waits=waits)
        moves_rates = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        if self._unchecked and moves_rates and trainer.lightning_module.automatic_optimization:
            self.told.check_rates(num, skipped, waits=waits)
        self._unchecked = False

    @property
    def exhausted(self) -> bool:
        """Whether this rank has no further batch, up to the length of the shortest rank's epoch."""
        return not self._buffered and self._inner_is_exhausted

    @property
    def _inner_is_exhausted(self) -> bool:
        return self.inner.done or self.inner.fetched >= self.num_batches

    @property
    def length_known(self) -> bool:
        """Whether all ranks are known to have equally many batches left; not in an epoch resumed in the middle."""
        return self.lengths_known and self._is_whole

    def num_skipped_after(self, index: int) -> int:
        """How many None batches come after batch `index`, which is not delivered yet, among those fetched."""
        return sum(num_before > index for num_before, _, _ in self._skipped)

    def check_skipped(self, *, over_epochs: bool) -> None:
        """Check that all ranks come to a validation after this batch; see `SkippedBatches.check`."""
        if self.told is not None:
            at_skipped = self._batch is None
            self.told.check(
                self._num_delivered, self._num_delivered_none, at_skipped=at_skipped, over_epochs=over_epochs
            )

    @property
    def stop_requested(self) -> bool:
        """Whether this process received SIGTERM."""
        return sigterm.heard(self._trainer)

    def fetch(self) -> tuple[Any, int, int] | None:
        """Fetch one batch and stage it: Lightning's batch-transfer hooks run here, once per batch.

        Returns:
            (batch, batch_idx, dataloader_idx); None at the end of the epoch, and while `max_steps` allows no more.

        Raises:
            RuntimeError: The data has ended before the length of its loader, on which the other ranks rely.
        """
        assert self.executor is not None
        if self.executor.queue.num_fetched >= self._num_allowed:
            return None
        if self.executor.queue.num_fetched == 0:
            self._is_whole = self.inner.fetched == 0
        index = self.executor.queue.num_fetched
        fetched = self._buffered.popleft() if self._buffered else self._next_to_train(index)
        if fetched is None:
            return None
        (batch, batch_idx, dataloader_idx), states = fetched
        self._states.note(index, states, self.executor.depth)
        # Before the loader makes the next batch, which may overwrite this one. Lightning names loader 0 in training.
        staged = stage_batch(self._trainer, batch, 0 if self.trains else dataloader_idx)
        for ahead in range(index + 1 + len(self._buffered), index + 1 + self._num_to_buffer):
            if ahead < self._num_allowed and (following := self._next_to_train(ahead)) is not None:
                self._buffered.append(following)
        return staged, batch_idx, dataloader_idx

    @property
    def _num_to_buffer(self) -> int:
        """How many batches to take from the loader before they are staged, so that the ranks know of its end."""
        if self.length_known:
            # Only among the last batches, which the ranks ask about: further ones may all be None.
            return int(self.num_batches - self.inner.fetched <= ASK_FOR_LAST)
        keeps = self._trainer.world_size > 1 and self._memory.is_own
        return NUM_AT_HAND - (self.inner.length is None) if keeps else 0  # without a length the inner one holds one

    @property
    def num_certain(self) -> int:
        """How many batches after the one fetched last are sure to be staged."""
        if not self._buffered or self.num_skipped > 0 or self.executor is None:
            return 0
        in_inner: list[Any] = getattr(self.inner, "batches", [])[:1]
        num = len(self._buffered) + sum(not self._is_skipped(batch) for batch, _, _ in in_inner)
        return int(min(num, self._num_allowed - self.executor.queue.num_fetched - 1))

    def _next_to_train(self, index: int) -> _Fetched | None:
        """Return the batch `index`, past None batches; None at the end. Each rank skips its own, as in Lightning."""
        while (fetched := self._next_of_inner()) is not None and self._is_skipped(fetched[0][0]):
            self._skipped.append((index, fetched[0][1], fetched[0][2]))
            self.num_skipped += 1
            if self.told is not None:
                self.told.note(index)
        return fetched

    def _is_skipped(self, batch: Any) -> bool:
        """Whether the loop trains no such batch."""
        return self.trains and batch is None

    def _next_of_inner(self) -> _Fetched | None:
        for _ in range(2):
            if not self._inner_is_exhausted:
                timer = None if self.executor is None else self.executor.order.timer
                with suppress(StopIteration), nullcontext() if timer is None else timer.data():
                    fetched = next(self.inner)
                    if self.inner.length is None:  # it holds one batch more; this one was copied when it came
                        self._own_those_of_inner()
                    else:
                        fetched = (self._memory.own(fetched[0]), *fetched[1:])
                    return fetched, self._states.read()
            if self.inner.fetched > 0 or self._iterated or not self._states.latest:
                break
            # Resumed after an epoch's last batch: the loader's iterator goes on there, at its end. Lightning begins the
            # next epoch with that iterator, as it makes a new one only if it has not resumed.
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

    @property
    def trained_state(self) -> Any:
        """States of the loaders after the batch being trained, not after those fetched ahead; None if none has one."""
        if self.executor is None or self.executor.current is None:
            return self._states.latest or None
        # A batch that is only peeked at is not trained, nor is one that waits for None batches before it.
        num_waiting = self._real is not None or (self._peeked and self._batch is not None)
        return self._states.after.get(self.executor.current.index - num_waiting) or None

    @override
    def teardown(self) -> None:
        if self.executor is not None:
            self.executor.abandon()
        self.inner.teardown()

    @property
    def _epoch_loop(self) -> _TrainingEpochLoop:
        return self._trainer.fit_loop.epoch_loop

    def drop(self) -> None:
        """Drop the batches that were fetched ahead, on all ranks alike."""
        self._batch, self._real, self._peeked, self.window = None, None, False, None
        self._buffered.clear()
        if self.told is not None:
            self.told.forget(len(self._skipped))
        self._num_delivered, self.num_skipped, self._has_ended = 0, 0, False
        self._num_counted = self._num_counted_before = self.num_to_catch_up = 0
        self._skipped.clear()
        if self.executor is not None:
            self.executor.drain()

    @property
    def _num_ready(self) -> int:
        return self._epoch_loop.batch_progress.current.ready

    def _number(self, number: int) -> int:
        """Return the `batch_idx` of the next batch: the loop's count in training, else its number in its loader."""
        return self._epoch_loop.batch_idx + 1 if self.trains else number

    def _num_batches_left(self) -> float:
        """How many batches `max_steps` leaves to train: fetching more would take data from a later `fit`."""
        loop, trainer = self._epoch_loop, self._trainer
        if not self.trains or loop.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
            return float("inf")
        # Ranks may have skipped different None batches: they go by the batches that all of them have trained.
        done_of_step = (self._num_ready if self.told is None else self._num_in_window) % self._every
        return (loop.max_steps - loop.global_step) * self._every - done_of_step


def stage_batch(trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
    """Do what Lightning's loops do with a batch before its step: convert, transfer hooks, copy to the device."""
    module: LightningModule = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    strategy = trainer.strategy
    with trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.batch_to_device"):  # type: ignore[attr-defined]
        return strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
