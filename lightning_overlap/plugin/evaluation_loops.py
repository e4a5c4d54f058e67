"""Lightning's evaluation loops with a lookahead: `validate`, `test`, `predict`, and validation inside a fit.

As in `fit_loop.py` the live loop objects get a class that mixes in what changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from typing_extensions import override

from ..schedules import Stage
from . import sigterm
from .fetcher import ExecutorFactory, LookaheadFetcher, StagedBatch, stage_batch
from .fit_loop import mix_in, take_out
from .run import HasRun


def _run_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the user's step of an evaluation, with early embeddings if its batch was looked ahead."""
    if not (args and isinstance(args[0], StagedBatch)):
        return step(*args, **kwargs)
    [staged] = args
    with staged.executor.forward():
        output = step(*staged.arguments)
    staged.executor.stage_done(Stage.DENSE_FORWARD)
    return output


class EvaluatesAhead(HasRun):
    """The hooks of a strategy around evaluations; without a run they are those of DDPStrategy.

    Owns nothing: it tells the run where an evaluation begins and ends.
    """

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return _run_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return _run_step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return _run_step(super().predict_step, *args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_evaluation("validation_step")

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_evaluation("test_step")

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_evaluation("predict_step")

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()
        super().on_validation_end()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()
        super().on_test_end()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()
        super().on_predict_end()

    def _begin_evaluation(self, step: str) -> None:
        if self._run is not None:
            self._run.begin_evaluation(step)

    def _end_evaluation(self) -> None:
        if self._run is not None:
            self._run.end_evaluation()


class EvaluationFetcher(LookaheadFetcher):
    """Gives an evaluation loop staged batches, numbered as its loader numbers them."""

    _keeps_states = False  # no checkpoint holds the position of an evaluation

    @override
    def _number(self, number: int) -> int:
        return number

    @override
    def _stage(self, batch: Any, dataloader_idx: int) -> Any:
        return stage_batch(self._trainer, batch, dataloader_idx)

    @override
    def _is_skipped(self, batch: Any) -> bool:
        return False

    @override
    def _num_batches_left(self) -> float:
        return float("inf")


class _LookaheadMixin:
    """What the two evaluation loops have in common."""

    _make_executor: ExecutorFactory
    _data_fetcher: _DataFetcher | None
    trainer: Trainer

    def _step_arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        raise NotImplementedError

    def reset(self) -> None:
        """Take over the fetcher. A module that takes `dataloader_iter` does its own fetching."""
        super().reset()  # type: ignore[misc]
        fetcher = self._data_fetcher
        if type(fetcher) is _PrefetchDataFetcher:
            self._data_fetcher = EvaluationFetcher(fetcher, self.trainer, self._make_executor, self._step_arguments)

    def _verify_dataloader_idx_requirement(self) -> None:
        """Show Lightning its own fetcher meanwhile: what it asks of the user depends on the kind."""
        fetcher = self._data_fetcher
        if isinstance(fetcher, EvaluationFetcher):
            self._data_fetcher = fetcher.inner
        try:
            super()._verify_dataloader_idx_requirement()  # type: ignore[misc]
        finally:
            self._data_fetcher = fetcher

    def _stop_together(self) -> None:
        """Leave after the same step on all ranks when one of them has received SIGTERM."""
        fetcher = self._data_fetcher
        executor = fetcher.executor if isinstance(fetcher, EvaluationFetcher) else None
        if executor is not None and executor.stop_agreed and not executor.is_last:
            sigterm.leave(self.trainer)


class _EvaluationLoopMixin(_LookaheadMixin, _EvaluationLoop):
    @override
    def _step_arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        several = self._is_sequential and self.num_dataloaders > 1
        kwargs = self._build_kwargs(batch, batch_idx, dataloader_idx if several else None)
        step = "test_step" if self.trainer.testing else "validation_step"
        return self._build_step_args_from_hook_kwargs(kwargs, step)

    @override
    def _evaluation_step(self, *args: Any) -> None:
        super()._evaluation_step(*args)
        self._stop_together()


class _PredictionLoopMixin(_LookaheadMixin, _PredictionLoop):
    @override
    def _step_arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        kwargs = self._build_kwargs(batch, batch_idx, dataloader_idx if self.num_dataloaders > 1 else None)
        return self._build_step_args_from_hook_kwargs(kwargs, "predict_step")

    @override
    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        returned = self._return_predictions
        if isinstance(self._data_fetcher, EvaluationFetcher):
            # The stock loop leaves the prediction writers out where it does not transfer the batch itself.
            wanted = self._store_data_for_prediction_writer(batch_idx, dataloader_idx)
            self._return_predictions = returned or wanted
        try:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        finally:
            self._return_predictions = returned
        self._stop_together()


def _loops(trainer: Trainer) -> list[tuple[Any, type[_LookaheadMixin]]]:
    evaluations = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    return [*((loop, _EvaluationLoopMixin) for loop in evaluations), (trainer.predict_loop, _PredictionLoopMixin)]


def install(trainer: Trainer, make_executor: ExecutorFactory) -> None:
    """Give the trainer's live evaluation loops the lookahead."""
    for loop, mixin in _loops(trainer):
        mix_in(loop, mixin)
        loop._make_executor = make_executor


def uninstall(trainer: Trainer) -> None:
    """Give the loops their own classes back."""
    for loop, mixin in _loops(trainer):
        if isinstance(loop, mixin):
            del loop._make_executor
            take_out(loop)
