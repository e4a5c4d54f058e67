"""Lightning's fit loop with a lookahead: during a fit the trainer has loops of this package in the place of its own."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils import data
from typing_extensions import override

from ...compat.lightning import (
    AutomaticOptimization,
    DataFetcher,
    EpochLoop,
    FitLoop,
    accumulates,
    end_shorter_loaders,
    gives_batches,
    takes_iterator,
    tell_sampler_epoch,
)
from ...distributed import warn_on_rank_zero
from .. import first_words
from . import preemption, sigterm
from .batch_stream import BatchStream
from .epoch import allows_empty_loaders, without_batches
from .fetcher import LookaheadFetcher, NoneFetcher, StepArguments
from .generators import ResumedGenerators
from .loader_epochs import LoaderEpochs
from .resume import Rest, Resume
from .stand_in import stand_in

_LOADER_EPOCHS = "lightning_overlap_loader_epochs"  # entry of the fit loop's state
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
    resume: Resume
    generators: ResumedGenerators
    loader_epochs: LoaderEpochs
    loader_states: list[Any]  # of a checkpoint, with which the loaders are to go on
    begins: bool  # whether the fit begins: Lightning then makes validation loaders for the progress bar

    @override
    def setup_data(self) -> None:
        if self.makes_loaders_anew and isinstance(self.fetcher, LookaheadFetcher):
            self.fetcher.drop()  # batches of an epoch that was cut short
        self.loader_epochs.make(self, super().setup_data)
        self.generators.has_iterators()
        if gives_batches(self.fetcher):
            strategy, epoch_loop = self.trainer.strategy, self.epoch_loop
            fetcher: LookaheadFetcher = strategy.look_ahead(  # type: ignore[attr-defined]
                self.fetcher, _step_arguments(epoch_loop), lambda: epoch_loop.batch_idx + 1
            )
            self.fetcher = fetcher
            if self.loader_states:
                batches: Any = epoch_loop.batch_progress.current
                end_shorter_loaders(fetcher.inner, batches.processed)
            fetcher.resume(self.loader_states)
            self.loader_states = []
            self._end_together(fetcher.stream)
        elif takes_iterator(self.fetcher) and self.trainer.strategy.balance is not None:  # type: ignore[attr-defined]
            warn_on_rank_zero("balance has no effect: training_step takes the data loader's iterator, not batches.")

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
    @contextmanager
    def making_iterator(self) -> Iterator[None]:
        with self.loader_epochs.making_iterator(), sigterm.fetching(self.trainer):
            yield

    @override
    def load_loader_states(self) -> None:
        # A resumed fit goes on with the iterator that is made next. Lightning tells samplers the epoch only after it.
        epochs: Any = self.epoch_progress.current
        ended = self.epoch_loop.batch_progress.is_last_batch and epochs.processed < epochs.started
        for loader in self.loaders:
            tell_sampler_epoch(loader, epochs.processed + ended)
        if self.resume.begins_data:  # then the states are those of an earlier epoch's end
            self.loader_states = []
        else:
            super().load_loader_states()
        if self.resume.loaded:
            saved = self.trainer.strategy.take_generators()  # type: ignore[attr-defined]
            self.generators.resume(saved, inside_epoch=self.resume.enters_epoch)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super().load_state_dict(*args, **kwargs)
        self.resume.roll_back()

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.loader_states = state_dict.get("combined_loader") or []
        self.resume.take(state_dict)
        self.loader_epochs.load_state_dict(state_dict.get(_LOADER_EPOCHS, {}))
        self.trainer.should_stop |= state_dict.get(_STOPS, False)
        # configure_optimizers may have asked for the number of steps. The loaders that were made for that have neither
        # their own states of the checkpoint nor the data module's.
        self.forget_loaders()

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        state_dict = super().on_save_checkpoint()
        fetcher = self.fetcher
        if "combined_loader" in state_dict and isinstance(fetcher, LookaheadFetcher):
            batches: Any = self.epoch_loop.batch_progress.current
            under_way = batches.ready > batches.processed  # a resumed fit begins this batch anew
            state_dict["combined_loader"] = (fetcher.states_before if under_way else fetcher.trained_states) or None
        found = preemption.of(self.trainer)
        if found is not None and found.saving and self.trainer.should_stop:
            # Lightning begins every fit with False: a requeued job would train on after an early stop.
            state_dict[_STOPS] = True
        self.resume.save(state_dict)
        state_dict[_LOADER_EPOCHS] = self.loader_epochs.state_dict()
        return state_dict

    @property
    @override
    def done(self) -> bool:
        # An epoch that a checkpoint was saved in has an end to come, also after the last step of the fit.
        return not (self.resume.enters_epoch and self.max_batches != 0) and super().done

    @override
    def reset(self) -> None:
        if self.resume.loaded and self.trainer.is_global_zero:
            first_words.tell(f"lightning_overlap: training continues after step {self.trainer.global_step}")
        self.resume.begin()
        super().reset()

    @override
    def on_run_start(self) -> None:
        if self.resume.owes_plateau:
            self.resume.owes_plateau = False
            # It is a step of the epoch that is over: Lightning has not counted that epoch yet when it does the step.
            self.epoch_progress.current.completed -= 1
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            self.epoch_progress.current.completed += 1
        self.begins = True
        super().on_run_start()
        self.begins = False
        if self.resume.enters_epoch:
            # Lightning calls the hook that sets it at the beginning of an epoch only.
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(self.trainer)

    @override
    def on_advance_start(self) -> None:
        self.generators.begin_epoch()
        super().on_advance_start()

    @override
    def advance(self) -> None:
        self.resume.enters_epoch = False
        super().advance()

    @override
    def on_advance_end(self) -> None:
        self.trainer.strategy.end_epoch()  # type: ignore[attr-defined]
        with sigterm.before_lightning_leaves(self.trainer):
            super().on_advance_end()
        # A signal in the last steps of the epoch comes too late for the polls about batches.
        _leave_if_agreed(self.trainer)

    @override
    def on_run_end(self) -> None:
        super().on_run_end()
        preemption.finish(self.trainer)  # a signal in the last epoch's end


class _EpochLoopMixin(EpochLoop):
    @property
    def _resume(self) -> Resume:
        return self.trainer.fit_loop.resume  # type: ignore[no-any-return]

    @override
    def reset(self) -> None:
        # Lightning counts what is left to do of a batch, which is done here, and forgets which batches were None.
        progress: Any = self.batch_progress.current
        continues, num_stepped, num_started = self.restarting, self.num_stepped, progress.started
        super().reset()
        if continues:
            self.num_stepped, progress.started = num_stepped, num_started

    @override
    def on_run_start(self, data_fetcher: DataFetcher) -> None:
        with self.trainer.fit_loop.generators.beginning_batches():
            super().on_run_start(data_fetcher)
        self._resume.begin_epoch()

    @property
    @override
    def done(self) -> bool:
        return self._resume.rest is Rest.NOTHING and super().done

    @override
    def advance(self, data_fetcher: DataFetcher) -> None:
        resume = self._resume
        if resume.rest is Rest.UNKNOWN:
            # As Lightning guesses: a checkpoint after a batch that a validation follows is one of the validation's end.
            resume.rest = Rest.UPDATE if self.validates_after(data_fetcher) else Rest.NOTHING
        if resume.rest is not Rest.NOTHING:
            return  # the batch is trained, what is left of it follows
        if isinstance(data_fetcher, LookaheadFetcher):
            data_fetcher = self._look_at_next(data_fetcher)
        else:
            _leave_if_agreed(self.trainer)
        super().advance(data_fetcher)

    @override
    def on_advance_end(self, data_fetcher: DataFetcher) -> None:
        resume, found = self._resume, preemption.of(self.trainer)
        if isinstance(data_fetcher, LookaheadFetcher) and data_fetcher.walker is not None and found is not None:
            found.note_result(data_fetcher.walker.batches.save_agreed)
        with sigterm.before_lightning_leaves(self.trainer):
            try:
                super().on_advance_end(data_fetcher)
            except SIGTERMException:
                if not self.trainer.validating:  # else Lightning raises it at the end
                    resume.batch_is_over()
                raise
        resume.batch_is_over()
        if found is not None and found.due and self._is_between_steps(found):
            found.requeue()

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if update_plateau_schedulers and not self._resume.knows_metrics:
            return
        super().update_lr_schedulers(interval, update_plateau_schedulers)
        if update_plateau_schedulers and interval == "epoch":
            self._resume.num_plateau = self.batch_progress.total.ready

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
            is_empty = fetcher.walker.batches.num_batches == 0 or fetcher.stream.is_without_batches
            if is_empty and self.batch_progress.current.ready == 0:
                self._name_ranks_without_batches(fetcher.stream)
            raise
        if (told := fetcher.walker.batches.told_to_stop) is not None:
            sigterm.leave(self.trainer, told)
        return NoneFetcher(fetcher) if batch is None else fetcher

    def _name_ranks_without_batches(self, stream: BatchStream) -> None:
        """Raise if no rank trains because some have no batch, or warn if batches were trained before; on all ranks."""
        has_batches: list[bool] = self.trainer.strategy.gather(stream.has_batches)
        if not any(has_batches):
            return
        message = without_batches(has_batches, self.trainer.current_epoch)
        if self.batch_progress.total.ready == 0 and not allows_empty_loaders(self.trainer):
            raise RuntimeError(f"{message} Give every rank a batch, or fewer ranks to the Trainer.")
        warnings.warn(message, stacklevel=2)

    @override
    def share_sigterm(self) -> None:
        """Do nothing: the ranks have agreed on a stop with the batch, without a broadcast and a host sync per step."""

    @override
    def validates_after(self, fetcher: DataFetcher) -> bool:
        if self._resume.rest is Rest.UPDATE:
            return False
        # With a fetcher of the class for `dataloader_iter` Lightning's loop validates on every last batch.
        decision = super().validates_after(fetcher.inner if isinstance(fetcher, LookaheadFetcher) else fetcher)
        if self.trainer.val_check_batch is None:
            # With a time interval each rank decides by its own clock, and a rank that validates alone waits forever.
            decision = self.trainer.strategy.broadcast(decision)
        if decision:
            self._resume.begin_validation()
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
    stop = trainer.global_rank + 1 if sigterm.received(trainer) else 0
    lowest_stop, unwanted = strategy.lowest([-stop, not wanted])()  # type: ignore[attr-defined]
    if found is not None:
        found.note_result(not unwanted)
    if lowest_stop:
        sigterm.leave(trainer, -lowest_stop - 1)


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let the trainer's fit loop look ahead until `undo` is closed."""
    stand_in(trainer, "fit_loop", _FitLoopMixin, undo)
    loop: Any = trainer.fit_loop
    loop.resume = Resume(trainer, num_over=loop.epoch_loop.batch_progress.total.ready)
    loop.generators, loop.loader_states, loop.begins = ResumedGenerators(trainer), [], False
    loop.loader_epochs = LoaderEpochs(trainer)
    for own in ("resume", "generators", "loader_states", "loader_epochs", "begins"):
        undo.callback(vars(loop).pop, own)
    undo.callback(_forget_broken_loader, trainer.fit_loop)
    stand_in(trainer.fit_loop, "epoch_loop", _EpochLoopMixin, undo)
    loop.epoch_loop.log_in_place()
    stand_in(trainer.fit_loop.epoch_loop, "automatic_optimization", _AutomaticOptimizationMixin, undo)


def _forget_broken_loader(loop: Any) -> None:
    fetcher = loop.fetcher
    if fetcher is not None and not isinstance(fetcher, LookaheadFetcher) and fetcher.iterator is None:
        # The loader could not be iterated. Lightning would ask for its length while it handles the error, and hide the
        # loader's own error by another.
        loop.fetcher = None
