"""Lightning's fit loop with a lookahead: during a fit the trainer has loops of this package in the place of its own."""

import warnings
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from torch.utils import data
from typing_extensions import override

from ...compat.lightning import (
    AutomaticOptimization,
    DataFetcher,
    EpochLoop,
    FitLoop,
    accumulates,
    gives_batches,
    tell_sampler_epoch,
)
from . import preemption, sigterm
from .batch_stream import BatchStream
from .epoch import allows_empty_loaders, without_batches
from .fetcher import LookaheadFetcher, NoneFetcher, StepArguments
from .stand_in import stand_in

_STOPS = "lightning_overlap_stops"  # entry of a preempted fit's checkpoint: it was told to stop early


class _AutomaticOptimizationMixin(AutomaticOptimization):
    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().run(*args, **kwargs)
        # Also without an optimizer step (accumulation, the user's optimizer_step): later hooks may read tables.
        self.trainer.strategy.end_optimization()  # type: ignore[attr-defined]
        return outputs


class _FitLoopMixin(FitLoop):
    epoch_loop: EpochLoop

    @override
    def setup_data(self) -> None:
        if self.makes_loaders_anew and isinstance(self.fetcher, LookaheadFetcher):
            self.fetcher.drop()  # batches of an epoch that was cut short
        super().setup_data()
        if gives_batches(self.fetcher):
            strategy, epoch_loop = self.trainer.strategy, self.epoch_loop
            fetcher: LookaheadFetcher = strategy.look_ahead(  # type: ignore[attr-defined]
                self.fetcher, _step_arguments(epoch_loop), lambda: epoch_loop.batch_idx + 1
            )
            self.fetcher = fetcher
            self._end_together(fetcher.stream)

    def _end_together(self, stream: BatchStream) -> None:
        """Set the epoch's length to the shortest rank's; all ranks call this, and ranks with more batches warn."""
        own = self.max_batches
        # Whether all loaders surely have as many batches as their length, unlike loaders with the user's classes.
        is_certain = all(
            type(loader) is data.DataLoader
            and not isinstance(loader.dataset, data.IterableDataset)
            and type(loader.sampler) in (data.RandomSampler, data.SequentialSampler, data.DistributedSampler)
            and type(loader.batch_sampler) in (data.BatchSampler, type(None))
            for loader in stream.inner.combined_loader.flattened
        )
        stream.epoch.agree(own, is_certain=is_certain)
        if stream.num_batches == 0 < max(stream.epoch.lengths):
            warnings.warn(without_batches(stream.epoch.lengths, self.trainer.current_epoch), stacklevel=2)
            self.max_batches = 0
            return
        if stream.num_batches == own:
            return
        warnings.warn(
            f"Rank {self.trainer.global_rank} has {own} batches, another rank {stream.num_batches:g}: all ranks end "
            "the epoch there, and the remaining batches of this rank are not trained.",
            stacklevel=2,
        )
        self.max_batches = int(stream.num_batches)
        interval = self.trainer.val_check_interval
        if isinstance(interval, float) and self.trainer.val_check_batch is not None:
            self.trainer.val_check_batch = max(1, int(self.max_batches * interval))

    @override
    def load_loader_states(self) -> None:
        # A resumed fit goes on with the iterator that is made next. Lightning tells samplers the epoch only after it.
        epochs: Any = self.epoch_progress.current
        ended = self.epoch_loop.batch_progress.is_last_batch and epochs.processed < epochs.started
        for loader in self.loaders:
            tell_sampler_epoch(loader, epochs.processed + ended)
        super().load_loader_states()

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.trainer.should_stop |= state_dict.get(_STOPS, False)
        # configure_optimizers may have asked for the number of steps. The loaders that were made for that have neither
        # their own states of the checkpoint nor the data module's.
        self.forget_loaders()

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state_dict = super().on_save_checkpoint()
        fetcher = self.fetcher
        if "combined_loader" in state_dict and isinstance(fetcher, LookaheadFetcher):
            state_dict["combined_loader"] = fetcher.trained_states or None
        found = preemption.of(self.trainer)
        if found is not None and found.saving and self.trainer.should_stop:
            # Lightning begins every fit with False: a requeued job would train on after an early stop.
            state_dict[_STOPS] = True
        return state_dict

    @override
    def on_advance_end(self) -> None:
        self.trainer.strategy.end_epoch()  # type: ignore[attr-defined]
        with preemption.before_lightning_leaves(self.trainer):
            super().on_advance_end()
        # A signal in the last steps of the epoch comes too late for the polls about batches.
        _leave_if_agreed(self.trainer)

    @override
    def on_run_end(self) -> None:
        super().on_run_end()
        preemption.finish(self.trainer)  # a signal in the last epoch's end


class _EpochLoopMixin(EpochLoop):
    @override
    def reset(self) -> None:
        # By the loader's length Lightning's loop knows that a checkpoint is of an epoch's last batch. Some have none.
        begins_anew = self.restarted_on_train_batch_end and self.batch_progress.is_last_batch
        fit_loop = self.trainer.fit_loop
        in_epoch = fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end
        is_between = self.batch_progress.is_last_batch or self.batch_progress.total.ready == 0
        starts_anew = self.restarted_on_last and is_between and not in_epoch
        if starts_anew and self.restarting:  # type: ignore[has-type]
            # Saved before an epoch, in a fit without `max_epochs`: Lightning would skip the epoch that begins.
            self.restarting = False
        super().reset()
        if begins_anew and self.batch_progress.current.ready > 0:
            self.batch_progress.reset_on_run()
            self.scheduler_progress.reset_on_run()
            self.automatic_optimization.optim_progress.reset_on_run()
            self.val_loop.batch_progress.total.reset()

    @override
    def advance(self, data_fetcher: DataFetcher) -> None:
        if isinstance(data_fetcher, LookaheadFetcher):
            data_fetcher = self._look_at_next(data_fetcher)
        else:
            _leave_if_agreed(self.trainer)
        super().advance(data_fetcher)

    @override
    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        found = preemption.of(self.trainer)
        if found is None:
            super().on_advance_end(data_fetcher)
            return
        if isinstance(data_fetcher, LookaheadFetcher) and data_fetcher.walker is not None:
            found.note_result(data_fetcher.walker.batches.save_agreed)
        with preemption.before_lightning_leaves(self.trainer):
            super().on_advance_end(data_fetcher)
        if found.due and self._is_between_steps(found):
            found.requeue()

    def _is_between_steps(self, found: preemption.Preemption) -> bool:
        """Whether a fit that resumes here goes on exactly as this one does: with the next step of the epoch."""
        # Lightning saves no gradients of an accumulation, repeats what follows a validation (a step of
        # ReduceLROnPlateau), and loses the metrics of an epoch whose last step is over.
        validated = found.validates and not self.val_loop.skip
        return not (validated or accumulates(self.trainer) or self.ends)

    def _look_at_next(self, fetcher: LookaheadFetcher) -> DataFetcher:
        if fetcher.walker is None:
            fetcher.walker = self.trainer.strategy.make_walker(fetcher.stream)
        try:
            batch = fetcher.peek()
        except StopIteration:
            if fetcher.walker.batches.num_batches == 0 and self.batch_progress.current.ready == 0:
                self._name_ranks_without_batches(fetcher.stream)
            if not self.restarting:
                raise
            return fetcher  # resumed in the validation after an epoch's last batch, which the loop still has to run
        if fetcher.walker.batches.stop_agreed:
            sigterm.leave(self.trainer)
        return NoneFetcher(fetcher) if batch is None else fetcher

    def _name_ranks_without_batches(self, stream: BatchStream) -> None:
        """Raise if no rank trains because some have no batch, or warn if batches were trained before; on all ranks."""
        has_batches: list[bool] = self.trainer.strategy.gather(stream.num_fetched > 0)
        message = without_batches(has_batches, self.trainer.current_epoch)
        if self.batch_progress.total.ready == 0 and not allows_empty_loaders(self.trainer):
            raise RuntimeError(f"{message} Give every rank a batch, or fewer ranks to the Trainer.")
        warnings.warn(message, stacklevel=2)

    @override
    def share_sigterm(self) -> None:
        """Do nothing: the ranks have agreed on a stop with the batch, without a broadcast and a host sync per step."""

    @override
    def validates_after(self, fetcher: DataFetcher) -> bool:
        # With a fetcher of the class for `dataloader_iter` Lightning's loop validates on every last batch.
        decision = super().validates_after(fetcher.inner if isinstance(fetcher, LookaheadFetcher) else fetcher)
        if self.trainer.val_check_batch is None:
            # With a time interval each rank decides by its own clock, and a rank that validates alone waits forever.
            decision = self.trainer.strategy.broadcast(decision)
        if (found := preemption.of(self.trainer)) is not None:
            found.validates = decision
        return decision


def _step_arguments(epoch_loop: EpochLoop) -> StepArguments:
    """Return a function that returns the arguments of `training_step`; Lightning reads its signature in each step."""
    known, num_arguments = None, 0

    def arguments(batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        nonlocal known, num_arguments
        step = epoch_loop.trainer.lightning_module.training_step
        function = getattr(step, "__func__", step)
        if function is not known:
            known, num_arguments = function, epoch_loop.num_step_arguments(batch, batch_idx)
        return (batch, batch_idx)[:num_arguments]

    return arguments


def _leave_if_agreed(trainer: Trainer) -> None:
    """Poll all ranks about signals; all ranks call this and wait."""
    found, strategy = preemption.of(trainer), trainer.strategy
    wanted = found is not None and found.wanted
    goes_on, unwanted = strategy.lowest([not sigterm.received(trainer), not wanted])()  # type: ignore[attr-defined]
    if found is not None:
        found.note_result(not unwanted)
    if not goes_on:
        sigterm.leave(trainer)


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let the trainer's fit loop look ahead until `undo` is closed."""
    stand_in(trainer, "fit_loop", _FitLoopMixin, undo)
    undo.callback(_forget_broken_loader, trainer.fit_loop)
    stand_in(trainer.fit_loop, "epoch_loop", _EpochLoopMixin, undo)
    stand_in(trainer.fit_loop.epoch_loop, "automatic_optimization", _AutomaticOptimizationMixin, undo)


def _forget_broken_loader(loop: Any) -> None:
    fetcher = loop.fetcher
    if fetcher is not None and not isinstance(fetcher, LookaheadFetcher) and fetcher.iterator is None:
        # The loader could not be iterated. Lightning would ask for its length while it handles the error, and hide the
        # loader's own error by another.
        loop.fetcher = None
