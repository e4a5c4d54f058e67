"""Lightning's evaluation loops with a lookahead: `validate`, `test`, `predict`, and validation inside a fit."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from . import preemption, sigterm
from .fetcher import LookaheadFetcher
from .stand_in import stand_in


class _LookaheadMixin:
    _data_fetcher: _DataFetcher | None
    _is_sequential: bool
    _step: str  # the user's method for a batch
    batch_progress: Any
    num_dataloaders: int
    trainer: Any

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        # A module that takes `dataloader_iter` does its own fetching.
        if type(self._data_fetcher) is _PrefetchDataFetcher:
            self._data_fetcher = self.trainer.strategy.look_ahead(self._data_fetcher, self._step_arguments)

    def on_run_start(self) -> None:
        strategy = self.trainer.strategy
        self._save_if_due()
        strategy.begin_evaluation(self._step)  # before the hooks and steps of the evaluation read the tables
        if isinstance(self._data_fetcher, LookaheadFetcher):
            self._data_fetcher.walker = strategy.make_walker(self._data_fetcher.stream)
        super().on_run_start()  # type: ignore[misc]

    def on_run_end(self) -> Any:
        outputs = super().on_run_end()  # type: ignore[misc]
        self.trainer.strategy.end_evaluation()
        if self.trainer.state.fn != TrainerFn.FITTING:  # a fit goes on, and polls at its next step
            preemption.finish(self.trainer)
        return outputs

    def _step_arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        several = self._is_sequential and self.num_dataloaders > 1
        kwargs = self._build_kwargs(batch, batch_idx, dataloader_idx if several else None)  # type: ignore[attr-defined]
        return self._build_step_args_from_hook_kwargs(kwargs, self._step)  # type: ignore[attr-defined, no-any-return]

    def _verify_dataloader_idx_requirement(self) -> None:
        fetcher = self._data_fetcher  # Lightning's check depends on its class
        if isinstance(fetcher, LookaheadFetcher):
            self._data_fetcher = fetcher.inner
        try:
            super()._verify_dataloader_idx_requirement()  # type: ignore[misc]
        finally:
            self._data_fetcher = fetcher

    def _stop_together(self) -> None:
        walker = getattr(self._data_fetcher, "walker", None)  # of a LookaheadFetcher
        found = preemption.of(self.trainer)
        if found is not None and walker is not None:
            found.note_result(walker.batches.save_agreed)
        self._save_if_due()
        if walker is not None and walker.batches.stop_agreed and not walker.is_last:
            with self._to_be_repeated():
                sigterm.leave(self.trainer)

    def _save_if_due(self) -> None:
        """Save and requeue after a preemption signal; in a fit so that a resumed fit repeats the whole validation."""
        found = preemption.of(self.trainer)
        # The sanity check comes before the first step. Lightning saves no gradients of an accumulation. A fit that was
        # told to stop ends after this validation.
        if found is None or not found.due or self.trainer.sanity_checking:
            return
        accumulates = self.trainer.fit_loop.epoch_loop._should_accumulate
        if self.trainer.state.fn != TrainerFn.FITTING or not (self.trainer.should_stop or accumulates()):
            with self._to_be_repeated():
                found.requeue()

    @contextmanager
    def _to_be_repeated(self) -> Iterator[None]:
        """Within this context a checkpoint of a fit says that its validation broke off at its first batch."""
        # Lightning would go on in the middle, without the metrics of the first part, or skip the rest.
        if self.trainer.state.fn != TrainerFn.FITTING or self.trainer.sanity_checking:
            yield
            return
        progress = self.batch_progress
        before, total = progress.state_dict(), progress.total
        total.ready = total.started = total.completed + 1
        total.processed = total.completed
        progress.reset_on_run()
        try:
            yield
        finally:
            progress.load_state_dict(before)


class _EvaluationLoopMixin(_LookaheadMixin, _EvaluationLoop):
    @property
    @override
    def _step(self) -> str:  # type: ignore[override]
        return "test_step" if self.trainer.testing else "validation_step"

    @override
    def _evaluation_step(self, *args: Any) -> None:
        super()._evaluation_step(*args)
        self._stop_together()


class _PredictionLoopMixin(_LookaheadMixin, _PredictionLoop):
    _is_sequential = True
    _step = "predict_step"

    @override
    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        returned = self._return_predictions
        if isinstance(self._data_fetcher, LookaheadFetcher):
            # Lightning's loop passes nothing to prediction writers if it has not transferred the batch itself.
            wanted = self._store_data_for_prediction_writer(batch_idx, dataloader_idx)
            self._return_predictions = returned or wanted
        try:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        finally:
            self._return_predictions = returned
        self._stop_together()


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let the trainer's evaluation loops look ahead until `undo` is closed."""
    stand_in(trainer.fit_loop.epoch_loop, "val_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "validate_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "test_loop", _EvaluationLoopMixin, undo)
    stand_in(trainer, "predict_loop", _PredictionLoopMixin, undo)
