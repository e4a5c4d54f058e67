"""Lightning's evaluation loops with a lookahead: `validate`, `test`, `predict`, and validation inside a fit."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from ...compat.lightning import DataFetcher, EvaluationLoop, PredictionLoop, accumulates, gives_batches
from ...runtime import Flight
from ...sparse import without_batches
from . import preemption, sigterm
from .fetcher import LookaheadFetcher
from .stand_in import stand_in


class _LookaheadMixin:
    batch_progress: Any
    fetcher: DataFetcher | None
    step: str  # the user's method for a batch
    trainer: Any

    @property
    def skip(self) -> bool:
        """Whether there is nothing to evaluate; raises a RuntimeError if that holds on some ranks only."""
        own: bool = super().skip  # type: ignore[misc]
        if len(set(self.trainer.strategy.gather(own))) > 1:
            raise RuntimeError(without_batches(self.step))
        return own

    def reset(self) -> None:
        with sigterm.fetching(self.trainer):  # of a loader without a length Lightning takes the first batch here
            super().reset()  # type: ignore[misc]
        if gives_batches(self.fetcher):
            arguments = self.step_arguments  # type: ignore[attr-defined]
            self.fetcher = self.trainer.strategy.look_ahead(self.fetcher, arguments)

    def on_run_start(self) -> None:
        strategy = self.trainer.strategy
        self._save_if_due()
        strategy.begin_evaluation(self.step)  # before the hooks and steps of the evaluation read the tables
        if isinstance(self.fetcher, LookaheadFetcher):
            self.fetcher.walker = strategy.make_walker(self.fetcher.stream)
            self.fetcher.take_part = self._take_part
        super().on_run_start()  # type: ignore[misc]

    def before_end_hooks(self) -> None:
        self.trainer.strategy.before_end_hooks()

    def on_run_end(self) -> Any:
        outputs = super().on_run_end()  # type: ignore[misc]
        self.trainer.strategy.end_evaluation()
        if self.trainer.state.fn != TrainerFn.FITTING:  # a fit goes on, and polls at its next step
            preemption.finish(self.trainer)
        return outputs

    def _take_part(self, flight: Flight) -> None:
        """Take part in the lookups of a batch that other ranks have, once this rank's own batches have ended."""
        assert isinstance(self.fetcher, LookaheadFetcher)
        assert self.fetcher.walker is not None
        self.trainer.strategy.take_part(self.fetcher.walker, flight)
        self.after_step()

    def check_signatures(self) -> None:
        fetcher = self.fetcher  # Lightning's check depends on its class
        if isinstance(fetcher, LookaheadFetcher):
            self.fetcher = fetcher.inner
        try:
            super().check_signatures()  # type: ignore[misc]
        finally:
            self.fetcher = fetcher

    def after_step(self) -> None:
        """Stop after this batch if the ranks have agreed on it."""
        walker = getattr(self.fetcher, "walker", None)  # of a LookaheadFetcher
        found = preemption.of(self.trainer)
        if found is not None and walker is not None:
            found.note_result(walker.batches.save_agreed)
        self._save_if_due()
        if walker is None or walker.is_last:
            return
        if (told := walker.batches.told_to_stop) is not None:
            sigterm.leave(self.trainer, told)

    def _save_if_due(self) -> None:
        """Save and requeue after a preemption signal; in a fit so that a resumed fit repeats the whole validation."""
        found = preemption.of(self.trainer)
        # The sanity check comes before the first step. Lightning saves no gradients of an accumulation. A fit that was
        # told to stop ends after this validation.
        if found is None or not found.due or self.trainer.sanity_checking:
            return
        ends_or_accumulates = self.trainer.should_stop or accumulates(self.trainer)
        if self.trainer.state.fn != TrainerFn.FITTING or not ends_or_accumulates:
            found.requeue()


class _EvaluationLoopMixin(_LookaheadMixin, EvaluationLoop):
    """A validation or a test with a lookahead."""

    def setup_data(self) -> None:
        fit_loop, make = self.trainer.fit_loop, super().setup_data
        if self.trainer.state.fn != TrainerFn.FITTING:
            make()
        else:
            fit_loop.loader_epochs.make(self, make, is_early=fit_loop.begins)

    def before_end_hooks(self) -> None:
        super().before_end_hooks()
        resume = getattr(self.trainer.fit_loop, "resume", None)
        if resume is not None:
            resume.validation_ends()


class _PredictionLoopMixin(_LookaheadMixin, PredictionLoop):
    """Predictions with a lookahead."""


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let the trainer's evaluation loops look ahead until `undo` is closed."""
    stand_in(trainer.fit_loop.epoch_loop, "val_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "validate_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "test_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "predict_loop", _PredictionLoopMixin, undo)
