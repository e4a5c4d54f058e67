"""Lightning's fit loop with a lookahead: the loops keep their class names, states and checkpoints.

The live loop objects get a class that mixes in what changes; no loop method is copied. Names of Lightning that
start with an underscore occur in this file only (`PRIVATE_NAMES`; a test names each).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from ..runtime import Executor, InFlightBatch
from ..versions import check_names
from . import sigterm

if TYPE_CHECKING:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "lightning.pytorch.loops.fetchers": ("_DataFetcher", "_DataLoaderIterDataFetcher", "_PrefetchDataFetcher"),
    "lightning.pytorch.loops.fit_loop": ("_FitLoop",),
    "lightning.pytorch.loops.optimization.automatic": ("_AutomaticOptimization",),
    "lightning.pytorch.loops.training_epoch_loop": ("_TrainingEpochLoop",),
    "_FitLoop": ("_data_fetcher", "_should_reload_train_dl", "setup_data"),
    "_TrainingEpochLoop": (
        "_batches_that_stepped",
        "_broadcast_sigterm_tensor",
        "_build_kwargs",
        "_should_check_val_fx",
        "advance",
    ),
    "_DataLoaderIterDataFetcher": ("_batch", "_batch_idx", "_dataloader_idx", "_start_profiler", "_stop_profiler"),
    "LightningModule": ("_on_before_batch_transfer",),
    "Strategy": ("_layer_sync",),
    "Trainer": ("_teardown",),
    "CombinedLoader": ("_state_dicts",),
    "ModelPruning": ("_parameters_to_prune",),
}
"""What this file uses of Lightning beyond its public interface, by the module or class that has it."""

MAX_NONES_AT_END = 2
"""How many batches of an epoch are fetched one early, to know which one is the last where they may be None."""

ExecutorFactory = Callable[["LookaheadFetcher"], Executor]


class StagedBatch:
    """What a loop passes to the strategy's step in the place of the batch.

    Args:
        arguments: What the user's step gets.
        executor: Whose batch it is.
    """

    def __init__(self, arguments: tuple[Any, ...], executor: Executor) -> None:
        self.arguments = arguments
        self.executor = executor


class LookaheadFetcher(_DataLoaderIterDataFetcher):
    """Gives the loop staged batches, and the executor the batches to stage.

    It takes over a stock fetcher whose iterator is already running. As a subclass of the `dataloader_iter`
    fetcher it tells the loop to leave the batch transfer to it.

    Args:
        inner: The stock fetcher.
        trainer: The trainer that fits.
        make_executor: Makes the executor, when the first batch is asked for.
    """

    def __init__(self, inner: _DataFetcher, trainer: Trainer, make_executor: ExecutorFactory) -> None:
        self.inner = inner
        profilers = inner._start_profiler, inner._stop_profiler  # an evaluation loop has set them already
        super().__init__()
        inner._start_profiler, inner._stop_profiler = profilers
        self._trainer = trainer
        self._make_executor = make_executor
        self.executor: Executor | None = None
        self._peeked = False
        self._skipped: deque[tuple[int, int, int]] = deque()
        """Batches that are None: how many others come before it in the epoch, its number, its loader's."""
        self._real: InFlightBatch | None = None  # begun, and to be delivered after those that are None before it
        self._buffered: tuple[Any, int, int] | None = None
        self._num_skipped = 0
        self._num_delivered = 0
        self._has_ended = False
        self._iterated = False
        self._num_allowed: float = 0
        self.num_batches: float = float("inf")
        self.lengths_known = False  # on all ranks
        self._is_whole = False
        self._states_after: dict[int, Any] = {}
        self._state_fetched = self._loader_states()
        self.done = inner.done

    # The loop reads and writes these on its fetcher; they belong to the inner one, which is already running when
    # the base class's constructor would set `fetched` and `length` back.
    @property
    def fetched(self) -> int:
        """Batches taken from the loader in this epoch."""
        return self.inner.fetched

    @fetched.setter
    def fetched(self, value: int) -> None:
        self.inner.fetched = value or self.inner.fetched

    @property
    def length(self) -> int | None:
        """Batches of an epoch, None if the loader does not know."""
        return self.inner.length

    @length.setter
    def length(self, value: int | None) -> None:
        self.inner.length = self.inner.length if value is None else value

    @property
    def _start_profiler(self) -> Callable[[], None]:
        return self.inner._start_profiler

    @_start_profiler.setter
    def _start_profiler(self, value: Callable[[], None]) -> None:
        self.inner._start_profiler = value

    @property
    def _stop_profiler(self) -> Callable[[], None]:
        return self.inner._stop_profiler

    @_stop_profiler.setter
    def _stop_profiler(self, value: Callable[[], None]) -> None:
        self.inner._stop_profiler = value

    @property
    @override
    def combined_loader(self) -> CombinedLoader:
        return self.inner.combined_loader

    @override
    def setup(self, combined_loader: CombinedLoader) -> None:
        self.inner.setup(combined_loader)

    @override
    def __iter__(self) -> LookaheadFetcher:
        self.drop()
        self._iterated = True
        iter(self.inner)
        self._states_after.clear()
        self._state_fetched = self._loader_states()
        self.done = self.inner.done
        return self

    @override
    def __next__(self) -> StagedBatch:  # type: ignore[override]
        self.peek()
        self._peeked = False
        assert self.executor is not None
        self.done = self.executor.is_last and self._real is None and not self._skipped
        return StagedBatch(self._arguments(), self.executor)

    def peek(self) -> Any:
        """Return the batch that `next` is going to deliver.

        Raises:
            StopIteration: The epoch's data has ended.
        """
        if self._peeked:
            return self._batch
        if self.executor is None:
            self.executor = self._make_executor(self)
        self._num_allowed = self.executor.num_trained + self._num_batches_left()
        if self._real is None and not self._has_ended and not self._skips(self._num_delivered):
            self._real = self.executor.next_batch()
            self._has_ended = self._real is None
        if self._skips(self._num_delivered):
            _, batch_idx, self._dataloader_idx = self._skipped.popleft()
            self._batch, self._batch_idx = None, self._number(InFlightBatch(-1, None, batch_idx))
        elif self._real is not None:
            inflight, self._real = self._real, None
            self._num_delivered += 1
            self._batch, self._dataloader_idx = inflight.batch, inflight.dataloader_idx
            self._batch_idx = self._number(inflight)
        else:
            self.done = True
            raise StopIteration
        self._peeked = True
        return self._batch

    def _skips(self, num_delivered: int) -> bool:
        """Whether a batch that is None comes next, once so many others have been delivered."""
        return bool(self._skipped) and (self._has_ended or self._skipped[0][0] <= num_delivered)

    @property
    def exhausted(self) -> bool:
        """Whether this rank has no batch left that all ranks have."""
        return self._buffered is None and self._inner_is_exhausted

    @property
    def _inner_is_exhausted(self) -> bool:
        return self.inner.done or self.inner.fetched >= self.num_batches

    @property
    def length_known(self) -> bool:
        """Whether every rank is known to have as many batches in this epoch; not where it is resumed in the middle."""
        return self.lengths_known and self._is_whole

    @property
    def num_skipped(self) -> int:
        """How many batches of this epoch were None, so far."""
        return self._num_skipped

    @property
    def stop_requested(self) -> bool:
        """Whether this process received SIGTERM."""
        return sigterm.heard(self._trainer)

    def fetch(self) -> tuple[Any, int, int] | None:
        """Fetch one batch and stage it: Lightning's batch-transfer hooks run here, once per batch."""
        assert self.executor is not None
        if self.executor.num_fetched >= self._num_allowed:
            return None
        if self.executor.num_fetched == 0:
            self._is_whole = self.inner.fetched == 0
        index = self.executor.num_fetched
        fetched, self._buffered = self._buffered or self._next_to_train(index), None
        if fetched is None:
            if self.length_known and self.inner.fetched < self.num_batches:
                raise RuntimeError(
                    f"rank {self._trainer.global_rank}: the data loader ended after {self.inner.fetched} batches, its "
                    f"length says {self.num_batches:g}. Does the dataset's __getitem__ raise StopIteration?"
                )
            return None
        batch, batch_idx, dataloader_idx = fetched
        self._note_state(index)
        if self.length_known and not self._state_fetched and self.num_batches - self.inner.fetched <= MAX_NONES_AT_END:
            self._buffered = self._next_to_train(index + 1)  # whether any is left, the last ones being None
        return self._stage(batch, dataloader_idx), batch_idx, dataloader_idx

    def _next_to_train(self, index: int) -> tuple[Any, int, int] | None:
        """Fetch the batch `index`, past those that are None: each rank skips its own, as Lightning does.

        The other ranks' collectives are for the next one that is none of these.
        """
        fetched = self._next_of_inner()
        while fetched is not None and self._is_skipped(fetched[0]):
            self._skipped.append((index, *fetched[1:]))
            self._num_skipped += 1
            fetched = self._next_of_inner()
        return fetched

    def _is_skipped(self, batch: Any) -> bool:
        """Whether the loop trains no such batch."""
        return batch is None

    def _next_of_inner(self) -> tuple[Any, int, int] | None:
        for _ in range(2):
            if not self._inner_is_exhausted:
                with suppress(StopIteration):
                    return next(self.inner)
            if self.inner.fetched > 0 or self._iterated or not self._state_fetched:
                break
            # Resumed behind an epoch's last batch: the loader's iterator goes on there, and so is at its end. Lightning
            # has begun the next epoch, for which it takes a new iterator only where it has not resumed.
            self._iterated = True
            iter(self.inner)
        return None

    @property
    def trained_state(self) -> Any:
        """State of stateful loaders after the batch being trained, not after the ones looked ahead; else None."""
        if self.executor is None or self.executor.current is None:
            return self._state_fetched or None
        # A batch that is only peeked at is not trained, nor is one that waits for the end of others that are None.
        num_waiting = self._real is not None or (self._peeked and self._batch is not None)
        return self._states_after.get(self.executor.current.index - num_waiting)

    def _note_state(self, index: int) -> None:
        """Remember the state of stateful loaders after batch `index`."""
        if not self._state_fetched:
            return  # no loader has a state: Lightning takes long to look for it
        assert self.executor is not None
        before, self._state_fetched = self._state_fetched, self._loader_states()
        if self._state_fetched:
            if index == 0:
                self._states_after[-1] = before
            # Without a length the inner fetcher has fetched one batch more, to know whether it is the last.
            self._states_after[index] = before if self.inner.length is None else self._state_fetched
            # The batch being trained may be the first of those in flight, and only be peeked at.
            self._states_after.pop(index - self.executor.depth - 1, None)

    def _loader_states(self) -> Any:
        # Lightning takes the state of loaders that have one, and an empty list otherwise.
        return self.inner.combined_loader._state_dicts()

    @override
    def reset(self) -> None:
        self.drop()
        self.inner.reset()
        self.done = self.inner.done

    @override
    def teardown(self) -> None:
        if self.executor is not None:
            self.executor.abandon()
        self.inner.teardown()

    @property
    def _epoch_loop(self) -> _TrainingEpochLoop:
        return self._trainer.fit_loop.epoch_loop

    def drop(self) -> None:
        """Drop the batches that were looked ahead, on all ranks alike."""
        self._peeked = False
        self._batch = self._real = self._buffered = None
        self._num_delivered, self._num_skipped, self._has_ended = 0, 0, False
        self._skipped.clear()
        if self.executor is not None:
            self.executor.drain()

    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of the user's step for the batch that is delivered."""
        return tuple(self._epoch_loop._build_kwargs(OrderedDict(), self._batch, self._batch_idx).values())

    def _number(self, inflight: InFlightBatch) -> int:
        """The `batch_idx` of the batch that is delivered next."""
        return self._epoch_loop.batch_idx + 1

    def _stage(self, batch: Any, dataloader_idx: int) -> Any:
        """Run the batch-transfer hooks; Lightning calls them with loader 0 in training."""
        return None if batch is None else stage_batch(self._trainer, batch, 0)

    def _num_batches_left(self) -> float:
        """Batches that `max_steps` leaves to train: fetching more would take data from a later `fit`."""
        loop, trainer = self._epoch_loop, self._trainer
        if loop.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
            return float("inf")
        done_of_step = loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        return (loop.max_steps - loop.global_step) * trainer.accumulate_grad_batches - done_of_step


def num_trained(trainer: Trainer) -> int:
    """Return how many batches a trainer has trained, over all epochs, those before a checkpoint included."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def stage_batch(trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
    """Do what Lightning's loops do with a batch before its step: convert, transfer hooks, copy to the device."""
    module: LightningModule = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    strategy = trainer.strategy
    with trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.batch_to_device"):  # type: ignore[attr-defined]
        return strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def has_known_length(combined_loader: CombinedLoader) -> bool:
    """Whether no loader can end before its length, as an iterable dataset, a sampler or a loader of the user's may."""
    return all(
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        for loader in combined_loader.flattened
    )


class _NoneFetcher(_DataFetcher):
    """Hands a None batch through, so that the loop warns and skips as it always does."""

    def __init__(self, fetcher: LookaheadFetcher) -> None:
        super().__init__()
        self._fetcher = fetcher

    @override
    def __next__(self) -> Any:
        next(self._fetcher)
        self.done = self._fetcher.done
        return None, self._fetcher._batch_idx, self._fetcher._dataloader_idx


class _AutomaticOptimizationMixin(_AutomaticOptimization):
    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().run(*args, **kwargs)
        # Step or no step (accumulated, or skipped by the user's optimizer_step): what comes next may read tables.
        self.trainer.strategy.end_optimization()  # type: ignore[attr-defined]
        return outputs


class _FitLoopMixin(_FitLoop):
    _make_executor: ExecutorFactory

    @override
    def setup_data(self) -> None:
        if self._should_reload_train_dl and isinstance(self._data_fetcher, LookaheadFetcher):
            self._data_fetcher.drop()  # of an epoch that was cut short
        super().setup_data()
        # A module that takes `dataloader_iter` does its own fetching and runs without lookahead.
        if type(self._data_fetcher) is _PrefetchDataFetcher:
            self._data_fetcher = LookaheadFetcher(self._data_fetcher, self.trainer, self._make_executor)
            self._end_together(self._data_fetcher)

    def _end_together(self, fetcher: LookaheadFetcher) -> None:
        """Take the length of the shortest rank's epoch, where Lightning takes each rank's own."""
        own, strategy = self.max_batches, self.trainer.strategy
        fetcher.num_batches = strategy.shortest_epoch(own)  # type: ignore[attr-defined]
        knows = has_known_length(fetcher.combined_loader)
        any_does_not = strategy.any_rank(not knows)  # type: ignore[attr-defined]
        fetcher.lengths_known = knows and not any_does_not
        if fetcher.num_batches == own:
            return
        warnings.warn(
            f"Rank {self.trainer.global_rank} has {own} batches, another rank {fetcher.num_batches:g}: all ranks end "
            "the epoch after the fewest, this rank's others are not trained.",
            UserWarning,
            stacklevel=2,
        )
        self.max_batches = int(fetcher.num_batches)
        interval = self.trainer.val_check_interval
        if isinstance(interval, float) and self.trainer.val_check_batch is not None:
            self.trainer.val_check_batch = max(1, int(self.max_batches * interval))

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state_dict = super().on_save_checkpoint()
        fetcher = self._data_fetcher
        if "combined_loader" in state_dict and isinstance(fetcher, LookaheadFetcher):
            state_dict["combined_loader"] = fetcher.trained_state
        return state_dict

    @override
    def on_advance_end(self) -> None:
        self.trainer.strategy.update_tables()  # type: ignore[attr-defined]
        super().on_advance_end()
        # Told in the last steps of the epoch, too late for the agreement that goes with the batches.
        _leave_if_agreed(self.trainer)


class _EpochLoopMixin(_TrainingEpochLoop):
    @override
    def reset(self) -> None:
        # The stock loop sees by the length that a checkpoint is of an epoch's last batch. Not all loaders have one.
        begins_anew = self.restarted_on_train_batch_end and self.batch_progress.is_last_batch
        super().reset()
        if begins_anew and self.batch_progress.current.ready > 0:
            self.batch_progress.reset_on_run()
            self.scheduler_progress.reset_on_run()
            self.automatic_optimization.optim_progress.reset_on_run()
            self.val_loop.batch_progress.total.reset()

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        if isinstance(data_fetcher, LookaheadFetcher):
            data_fetcher = self._look_at_next(data_fetcher)
        else:
            _leave_if_agreed(self.trainer)
        super().advance(data_fetcher)

    def _look_at_next(self, fetcher: LookaheadFetcher) -> _DataFetcher:
        """Return the fetcher for the batch that comes next."""
        try:
            batch = fetcher.peek()
        except StopIteration:
            if self.restarting:
                # Stopped in the validation after an epoch's last batch: the stock loop has that left to run.
                return fetcher
            raise
        assert fetcher.executor is not None
        if fetcher.executor.stop_agreed:
            sigterm.leave(self.trainer)
        return _NoneFetcher(fetcher) if batch is None else fetcher

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: the ranks have agreed on it with the batch, without a broadcast and a read per step."""

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        # With the `dataloader_iter` fetcher the stock loop validates on every last batch.
        inner = data_fetcher.inner if isinstance(data_fetcher, LookaheadFetcher) else data_fetcher
        decision = super()._should_check_val_fx(inner)
        if self.trainer.val_check_batch is None:
            # By the time, that is by the clock of each rank: one that validates alone waits for the others forever.
            decision = self.trainer.strategy.broadcast(decision)
        return decision


def _leave_if_agreed(trainer: Trainer) -> None:
    """Ask all ranks, and wait for the answer, whether one of them was told to stop."""
    if trainer.strategy.any_rank(sigterm.heard(trainer)):  # type: ignore[attr-defined]
        sigterm.leave(trainer)


def check_lightning(trainer: Trainer) -> None:
    """Raise if the installed Lightning lacks a private name that this file uses.

    Raises:
        ImportError: With the name, the installed and the supported versions.
    """
    owners: dict[str, object] = {"Strategy": trainer.strategy, "_FitLoop": trainer.fit_loop}
    owners |= {"_TrainingEpochLoop": trainer.fit_loop.epoch_loop, "LightningModule": trainer.lightning_module}
    check_names("lightning", PRIVATE_NAMES, owners)


def install(trainer: Trainer, make_executor: ExecutorFactory) -> None:
    """Give the trainer's live fit loop the lookahead."""
    check_lightning(trainer)
    mix_in(trainer.fit_loop, _FitLoopMixin)
    mix_in(trainer.fit_loop.epoch_loop, _EpochLoopMixin)
    mix_in(trainer.fit_loop.epoch_loop.automatic_optimization, _AutomaticOptimizationMixin)
    cast(_FitLoopMixin, trainer.fit_loop)._make_executor = make_executor


def uninstall(trainer: Trainer) -> None:
    """Give the loops their own classes back; in-flight work of a fetcher that is still there is dropped."""
    loop = trainer.fit_loop
    if not isinstance(loop, _FitLoopMixin):
        return
    fetcher = loop._data_fetcher
    if isinstance(fetcher, LookaheadFetcher):
        if fetcher.executor is not None:
            fetcher.executor.abandon()
    elif fetcher is not None and fetcher.iterator is None:
        # The loader could not be iterated. Lightning would ask it for its length on the way out and raise once more,
        # in the place of the loader's own error.
        loop._data_fetcher = None
    del loop._make_executor
    for live in (loop, loop.epoch_loop, loop.epoch_loop.automatic_optimization):
        take_out(live)


def revert_layer_sync(strategy: DDPStrategy) -> None:
    """Undo what the strategy's layer-sync plugin (`sync_batchnorm=True`) did to the model."""
    if strategy._layer_sync is not None and strategy.model is not None:
        strategy.model = strategy._layer_sync.revert(strategy.model)


def tear_down(trainer: Trainer) -> None:
    """Do what Lightning does at the end of a run, where an error keeps it from that."""
    trainer._teardown()


def logged_step(trainer: Trainer) -> int:
    """Return the step under which loggers write now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def pruned_weights(callback: ModelPruning) -> list[Any]:
    """Return the weights that a pruning callback has chosen in its `setup`."""
    return [getattr(module, name) for module, name in callback._parameters_to_prune]


def mix_in(live: Any, mixin: type) -> None:
    """Give a live object a class that mixes in what changes, of the same name: profiler actions and logs contain it."""
    cls = type(live)
    live.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def take_out(live: Any) -> None:
    """Undo `mix_in`."""
    live.__class__ = type(live).__bases__[1]
