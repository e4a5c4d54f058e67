"""Lightning's private names. The loops here have public methods where Lightning's loops call private ones."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from typing_extensions import override

_OF_BOTH = ["_build_kwargs", "_build_step_args_from_hook_kwargs", "_data_fetcher", "_verify_dataloader_idx_requirement"]
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "lightning.pytorch.trainer.call": ("_call_strategy_hook",),
    "_CheckpointConnector": ("_parse_ckpt_path", "resume_start"),
    "_DataLoaderIterDataFetcher": ("_batch", "_batch_idx", "_dataloader_idx", "_start_profiler", "_stop_profiler"),
    "_EvaluationLoop": (
        *(*_OF_BOTH, "_evaluation_step", "_is_sequential", "_last_val_dl_reload_epoch", "_on_evaluation_end"),
        *("_should_reload_val_dl", "setup_data"),
    ),
    "_FitLoop": (
        *(
            "_combined_loader",
            "_data_fetcher",
            "_last_train_dl_reload_epoch",
            "_load_combined_loader_states",
            "_results",
        ),
        *("_should_reload_train_dl", "setup_data"),
    ),
    "_LoggerConnector": ("_callback_metrics", "_first_loop_iter"),
    "_MultiProcessingLauncher": ("_collect_rank_zero_results", "_start_method", "_strategy", "_wrapping_function"),
    "_PredictionLoop": (
        *(*_OF_BOTH, "_on_predict_end", "_predict_step", "_return_predictions", "_store_data_for_prediction_writer"),
    ),
    "_SignalConnector": ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "_TrainingEpochLoop": (
        *("_batches_that_stepped", "_broadcast_sigterm_tensor", "_build_kwargs", "_results", "_should_accumulate"),
        *("_is_training_done", "_num_ready_batches_reached", "_should_check_val_fx", "advance", "on_advance_end"),
    ),
    "CombinedLoader": ("_iterator", "_mode", "_state_dicts"),
    "DDPStrategy": (
        *("_configure_launcher", "_ddp_comm_hook", "_ddp_kwargs", "_launcher", "_lightning_module", "_model"),
        *("_optimizers", "_start_method"),
    ),
    "LightningModule": ("_on_before_batch_transfer",),
    "MLFlowLogger": ("_log_model",),
    "ModelCheckpoint": ("_ModelCheckpoint__resolve_ckpt_dir", "_find_last_checkpoints", "_link_checkpoint"),
    "ModelPruning": ("_parameters_to_prune",),
    "Strategy": ("_layer_sync",),
    "Trainer": ("_checkpoint_connector", "_logger_connector", "_signal_connector", "_teardown"),
    "WandbLogger": ("_log_model",),
}
"""By the module or class that has them. A name that this file imports is not listed: the import itself fails."""


def owners(trainer: Trainer) -> dict[str, object]:
    """Return what a run of this trainer takes private names from, by the names in `PRIVATE_NAMES`."""
    return {
        "lightning.pytorch.trainer.call": call,
        "_CheckpointConnector": trainer._checkpoint_connector,
        "_EvaluationLoop": trainer.validate_loop,
        "_FitLoop": trainer.fit_loop,
        "_LoggerConnector": trainer._logger_connector,
        "_PredictionLoop": trainer.predict_loop,
        "_SignalConnector": trainer._signal_connector,
        "_TrainingEpochLoop": trainer.fit_loop.epoch_loop,
        "LightningModule": trainer.lightning_module,
        "ModelCheckpoint": ModelCheckpoint,
        "Strategy": trainer.strategy,
    }


# -- fetchers: a loop takes its batches from one ---------------------------------------------------------------------

DataFetcher = _DataFetcher


def gives_batches(fetcher: DataFetcher | None) -> bool:
    """Whether a loop takes batches from it; with `dataloader_iter` the module does its own fetching."""
    return type(fetcher) in (_PrefetchDataFetcher, _Fetcher)


def takes_iterator(fetcher: DataFetcher | None) -> bool:
    """Whether Lightning made it for a module whose step takes `dataloader_iter`."""
    return type(fetcher) is _DataLoaderIterDataFetcher


def batches_held(fetcher: DataFetcher) -> list[tuple[Any, int, int]]:
    """Return the list of (batch, batch_idx, dataloader_idx) that a fetcher has taken ahead, to know the last batch."""
    held: list[tuple[Any, int, int]] = getattr(fetcher, "batches", [])
    return held


def loader_states(fetcher: DataFetcher) -> list[Any]:
    """Return the states of a fetcher's data loaders now; empty if no loader has a state."""
    return fetcher.combined_loader._state_dicts()


def end_shorter_loaders(fetcher: DataFetcher, num_taken: int) -> None:
    """Let a `CombinedLoader("max_size")` take nothing more from loaders that had ended after `num_taken` batches.

    Called once the fetcher has its iterator. The state of an iterator that has ended may begin the loader anew.
    """
    combined = fetcher.combined_loader
    if combined._mode != "max_size" or combined._iterator is None:
        return
    for number, loader in enumerate(combined.flattened):
        length = sized_len(loader)
        if length is not None and length <= num_taken:
            combined._iterator.iterators[number] = iter(())


class _Fetcher(_PrefetchDataFetcher):
    """Lightning's fetcher; it makes an iterator of its loaders within a context."""

    def __init__(self, making_iterator: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._making_iterator = making_iterator

    @override
    def __iter__(self) -> _PrefetchDataFetcher:
        with self._making_iterator():
            return super().__iter__()


def _of_inner(name: str) -> Any:
    """Return a property of a fetcher that reads and writes the attribute `name` of the inner one."""
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


def _own(name: str, what: str) -> Any:
    """Return a property that reads and writes a fetcher's own attribute `name`."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value), doc=what)


class StagedFetcher(_DataLoaderIterDataFetcher):
    """Gives a loop batches that are on the device already: Lightning's loops transfer none of them.

    `next` returns what the strategy's step gets, in the place of the batch. The user's other hooks get `batch`.
    """

    # Lightning's loops do no batch transfer for this base class, their fetcher for `dataloader_iter`.
    def __init__(self, inner: DataFetcher) -> None:
        # Not `super().__init__()`: it would reset the inner fetcher through the properties below.
        self.inner, self.iterator, self.done = inner, None, inner.done
        self.batch, self.batch_idx, self.dataloader_idx = None, 0, 0

    fetched = _of_inner("fetched")
    length = _of_inner("length")
    combined_loader = _of_inner("combined_loader")
    _start_profiler = _of_inner("_start_profiler")
    _stop_profiler = _of_inner("_stop_profiler")

    batch = _own("_batch", "The batch that hooks such as `on_train_batch_start` get.")
    batch_idx = _own("_batch_idx", "The number that hooks get with `batch`.")
    dataloader_idx = _own("_dataloader_idx", "The number of the batch's data loader in an evaluation.")

    @override
    def teardown(self) -> None:
        self.inner.teardown()


# -- loops -----------------------------------------------------------------------------------------------------------


Loop = _Loop


class MakesLoaders(Protocol):
    """A loop that makes its data loaders, and with `reload_dataloaders_every_n_epochs` makes others in later epochs."""

    loaders_epoch: float
    """The epoch in which the loaders were made, from which Lightning counts; -inf before."""

    @property
    def makes_loaders_anew(self) -> bool:
        """Whether the next `setup_data` makes loaders even if there are some."""


class AutomaticOptimization(_AutomaticOptimization):
    """Lightning's loop around the optimizer's step of one batch; `run` is called for each batch."""


class FitLoop(_FitLoop):
    """Lightning's loop over epochs."""

    @property
    def fetcher(self) -> DataFetcher | None:
        """What the epochs take batches from; `setup_data` makes it."""
        return self._data_fetcher

    @fetcher.setter
    def fetcher(self, fetcher: DataFetcher | None) -> None:
        self._data_fetcher = fetcher

    def making_iterator(self) -> AbstractContextManager[None]:
        """Return a context: within it the loaders' iterator is made, and of loaders without a length a batch taken."""
        return nullcontext()

    @property
    def _data_fetcher(self) -> DataFetcher | None:
        fetcher: DataFetcher | None = vars(self).get("_data_fetcher")
        return fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: DataFetcher | None) -> None:
        # `setup_data` makes a fetcher, and then lets it make its iterator.
        own = type(fetcher) is _PrefetchDataFetcher
        vars(self)["_data_fetcher"] = _Fetcher(self.making_iterator) if own else fetcher

    @property
    def loaders(self) -> list[Any]:
        """The training data loaders, which `setup_data` makes."""
        assert self._combined_loader is not None
        return self._combined_loader.flattened

    def forget_loaders(self) -> None:
        """Let the next `setup_data` make loaders and fetcher anew."""
        self._combined_loader = None

    @property
    def makes_loaders_anew(self) -> bool:
        """Whether the next `setup_data` makes loaders anew though it has some (`reload_dataloaders_every_n_epochs`)."""
        return bool(self._should_reload_train_dl)

    @property
    def loaders_epoch(self) -> float:
        """The epoch in which the loaders were made; -inf before."""
        return self._last_train_dl_reload_epoch

    @loaders_epoch.setter
    def loaders_epoch(self, epoch: float) -> None:
        self._last_train_dl_reload_epoch = epoch

    def load_loader_states(self) -> None:
        """Give the loaders their states of a checkpoint; called before the first iterator of the fit is made."""
        super()._load_combined_loader_states()

    @override
    def _load_combined_loader_states(self) -> None:
        self.load_loader_states()

    @property
    def _results(self) -> Any:  # asked seven times in a step; Lightning compares the state's name each time
        return self.epoch_loop._results if self.trainer.state.stage is RunningStage.TRAINING else super()._results


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch."""

    @property
    def num_stepped(self) -> int:
        """Batches, or accumulations of several, whose step loggers count (`logged_step`)."""
        return self._batches_that_stepped

    @num_stepped.setter
    def num_stepped(self, number: int) -> None:
        self._batches_that_stepped = number

    def log_in_place(self) -> None:
        """Let steps log without a walk of what they log; called before a fit's first step."""
        self._results = FitResults()

    @property
    def epoch_is_over(self) -> bool:
        """Whether the latest batch was the last one of its epoch, so that schedulers of epochs make a step."""
        return self._num_ready_batches_reached()

    @property
    def ends(self) -> bool:
        """Whether no further batch is trained in this epoch."""
        return self._is_training_done or self.done

    def num_step_arguments(self, batch: Any, batch_idx: int) -> int:
        """Return how many of (batch, batch_idx) the user's `training_step` takes."""
        return len(self._build_kwargs(OrderedDict(), batch, batch_idx))

    def share_sigterm(self) -> None:
        """Tell the other ranks of a SIGTERM; called before each batch if there are several ranks."""
        super()._broadcast_sigterm_tensor()

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        self.share_sigterm()

    def validates_after(self, fetcher: DataFetcher) -> bool:
        """Return whether a validation follows the current batch; called once a batch, and once when a fit resumes."""
        return super()._should_check_val_fx(fetcher)

    @override
    def _should_check_val_fx(self, data_fetcher: DataFetcher) -> bool:
        return self.validates_after(data_fetcher)

    @override
    def _should_accumulate(self) -> bool:  # asked six times in a step
        return self.trainer.accumulate_grad_batches != 1 and super()._should_accumulate()


class _Evaluates:
    """What the two loops below have in common."""

    _data_fetcher: DataFetcher | None
    num_dataloaders: int
    trainer: Any

    @property
    def fetcher(self) -> DataFetcher | None:
        """What the loop takes batches from; `reset` makes it."""
        return self._data_fetcher

    @fetcher.setter
    def fetcher(self, fetcher: DataFetcher | None) -> None:
        self._data_fetcher = fetcher

    @property
    def step(self) -> str:
        """Name of the user's method for a batch."""
        raise NotImplementedError

    @property
    def takes_loaders_in_turn(self) -> bool:
        """Whether each batch comes from one loader, so that steps get its number if there are several."""
        raise NotImplementedError

    def step_arguments(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Any, ...]:
        """Return what the user's step takes of (batch, batch_idx, dataloader_idx)."""
        several = self.takes_loaders_in_turn and self.num_dataloaders > 1
        kwargs = self._build_kwargs(batch, batch_idx, dataloader_idx if several else None)  # type: ignore[attr-defined]
        return self._build_step_args_from_hook_kwargs(kwargs, self.step)  # type: ignore[attr-defined, no-any-return]

    def check_signatures(self) -> None:
        """Check that the user's step and hooks take `dataloader_idx` if they have to; called before the first batch."""
        super()._verify_dataloader_idx_requirement()  # type: ignore[misc]

    def _verify_dataloader_idx_requirement(self) -> None:
        self.check_signatures()

    def after_step(self) -> None:
        """Called after each batch, when its hooks have run."""

    def before_end_hooks(self) -> None:
        """Called when all that is left are the hooks `on_validation_end`, `on_test_end` or `on_predict_end`."""


class EvaluationLoop(_Evaluates, _EvaluationLoop):
    """Lightning's loop of a validation or a test."""

    @property
    @override
    def step(self) -> str:
        return "test_step" if self.trainer.testing else "validation_step"

    @property
    @override
    def takes_loaders_in_turn(self) -> bool:
        return self._is_sequential

    @override
    def _evaluation_step(self, *args: Any) -> None:
        super()._evaluation_step(*args)
        self.after_step()

    @property
    def makes_loaders_anew(self) -> bool:
        """Whether the next validation of a fit makes loaders anew (`reload_dataloaders_every_n_epochs`)."""
        return bool(self._should_reload_val_dl)

    @property
    def loaders_epoch(self) -> float:
        """The epoch in which a fit's validation loaders were made; -inf before."""
        return self._last_val_dl_reload_epoch

    @loaders_epoch.setter
    def loaders_epoch(self, epoch: float) -> None:
        self._last_val_dl_reload_epoch = epoch

    @override
    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        self.before_end_hooks()
        super()._on_evaluation_end(*args, **kwargs)


class PredictionLoop(_Evaluates, _PredictionLoop):
    """Lightning's loop of predictions. Prediction writers get those of staged batches too."""

    @property
    @override
    def step(self) -> str:
        return "predict_step"

    @property
    @override
    def takes_loaders_in_turn(self) -> bool:
        return True

    @override
    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        returned = self._return_predictions
        if isinstance(self._data_fetcher, StagedFetcher):
            # Lightning's loop passes nothing to prediction writers if it has not transferred the batch itself.
            wanted = self._store_data_for_prediction_writer(batch_idx, dataloader_idx)
            self._return_predictions = returned or wanted
        try:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        finally:
            self._return_predictions = returned
        self.after_step()

    @override
    def _on_predict_end(self) -> None:
        self.before_end_hooks()
        super()._on_predict_end()


def set_restarting(loop: Loop, restarting: bool) -> None:
    """Tell a loop and its inner loops whether they continue from a checkpoint (`restarting`).

    The fit loop's own setter lets a fit with `max_steps` always continue.
    """
    Loop.restarting.fset(loop, restarting)  # type: ignore[attr-defined]


def fit_loop_state(*, epochs: int, batches: int, steps: int, is_automatic: bool) -> dict[str, Any]:
    """Return a fit loop's state of a checkpoint, between two epochs: `epochs` and `batches` are over.

    `steps` is the trainer's global step; `is_automatic` says whether Lightning makes the optimizer's steps.
    """

    def count(number: int, *more: str) -> dict[str, Any]:
        return dict.fromkeys(("ready", "completed", *more), number)

    def progress(total: int, current: int, *more: str) -> dict[str, Any]:
        return {"total": count(total, *more), "current": count(current, *more)}

    stepped = progress(steps, 0)
    zeroed = progress(steps, 0, "started")
    return {
        "state_dict": {},
        "epoch_progress": progress(epochs, epochs, "started", "processed"),
        "epoch_loop.state_dict": {"_batches_that_stepped": steps if is_automatic else batches},
        # As at the end of an epoch, so that the next batch is the first one of the data.
        "epoch_loop.batch_progress": {**progress(batches, 0, "started", "processed"), "is_last_batch": True},
        **(
            {"epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": stepped, "zero_grad": zeroed}}}
            if is_automatic
            else {"epoch_loop.manual_optimization.optim_step_progress": stepped}
        ),
    }


# -- metrics: what `self.log` has collected ----------------------------------------------------------------------------


def callback_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Return `trainer.callback_metrics` on the CPU; all ranks call this, unless an error is handled."""
    metrics = trainer._logger_connector._callback_metrics if trainer.interrupted else trainer.callback_metrics
    return {name: value.detach().cpu() for name, value in metrics.items()}


def restore_callback_metrics(trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
    """Let callbacks and ReduceLROnPlateau see these metrics until they are logged again."""
    device = trainer.strategy.root_device
    trainer._logger_connector._callback_metrics.update({name: value.to(device) for name, value in metrics.items()})


_PLAIN = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def _options(meta: _Metadata) -> dict[str, Any]:
    """Return how a value was logged, as plain values."""
    options: dict[str, Any] = {name: getattr(meta, name) for name in _PLAIN}
    return {**options, "reduce_fx": meta.reduce_fx.__name__, "sync_dist": meta.sync.should}


def epoch_results(loop: _TrainingEpochLoop) -> list[dict[str, Any]]:
    """Return the sums of what training steps have logged in this epoch, on the CPU: plain values and tensors.

    Left out are torchmetrics' objects, which have their own state, and values logged with `sync_dist_group`,
    `rank_zero_only` or a reduction that is not torch's.
    """
    return [
        {**_options(meta), "value": one.value.cpu(), "num": getattr(one, "cumulated_batch_size", torch.zeros(())).cpu()}
        for one in loop._results.values()
        if one.is_tensor and not one.has_reset and (meta := one.meta).on_epoch
        if getattr(torch, meta.reduce_fx.__name__, None) is meta.reduce_fx
        if meta.sync.group is None and not meta.sync.rank_zero_only and meta.dataloader_idx is None
    ]


class _PlacedMetric(_ResultMetric):
    """What a step logs under one name; it moves only if the logged value is on another device than before.

    Lightning walks all attributes at each `self.log`, half as many Python calls as a small step has.
    """

    @override
    def to(self, *args: Any, **kwargs: Any) -> _ResultMetric:  # type: ignore[override]  # as in Lightning
        if self.is_tensor and not kwargs and args == (self.value.device,):
            return self
        return super().to(*args, **kwargs)


class FitResults(_ResultCollection):
    """What the steps of a fit log."""

    def __init__(self) -> None:
        super().__init__(training=True)

    @override
    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        is_new = type(metric) is _ResultMetric
        super().__setitem__(key, _PlacedMetric(metric.meta, metric.is_tensor) if is_new else metric)


class _ResumedResults(FitResults):
    """Results of an epoch that began in another run."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: dict[str, dict[str, Any]] = {}  # what that run has logged and this one not yet

    @override
    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        key = f"{fx}.{name}"
        earlier = self.earlier.pop(key, None)
        before = None if earlier is None else self.pop(key)  # the user may log it differently now
        super().log(fx, name, *args, **kwargs)
        new = self[key]
        if before is None or not new.is_tensor or _options(new.meta) != _options(before.meta):
            return
        if new.meta.is_mean_reduction:
            new.cumulated_batch_size = before.cumulated_batch_size + new.cumulated_batch_size
        joins = new.meta.reduce_fx if new.meta.is_max_reduction or new.meta.is_min_reduction else torch.add
        new.value = joins(before.value, new.value)

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        self.earlier = {}


def restore_epoch_results(trainer: Trainer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Let the epoch that the fit is in go on from what `epoch_results` has returned: called before its next batch."""
    results = _ResumedResults()
    for one in saved:
        options = {name: one[name] for name in _PLAIN}
        meta = _Metadata(**options, reduce_fx=getattr(torch, one["reduce_fx"]))
        meta.sync = _Sync(_should=one["sync_dist"], fn=trainer.strategy.reduce)
        metric = _PlacedMetric(meta, is_tensor=True)
        meta.on_step = False  # an update would exchange the value of a step
        metric.update(one["value"], 0)
        meta.on_step = one["on_step"]
        metric.value = one["value"]
        if meta.is_mean_reduction:
            metric.cumulated_batch_size = one["num"]
        key = f"{meta.fx}.{meta.name}"
        results[key] = metric.to(trainer.strategy.root_device)
        results.earlier[key] = dict(one)
    trainer.fit_loop.epoch_loop._results = results
    trainer._logger_connector._first_loop_iter = False  # in an epoch's first batch Lightning resets the results


# -- the trainer and its parts ---------------------------------------------------------------------------------------

AFTER_SAVE = "Trainer.save_checkpoint"
"""The name of the barrier with which `Trainer.save_checkpoint` ends."""


def logged_step(trainer: Trainer) -> int:
    """Return the step number that Lightning gives to loggers now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulates(trainer: Trainer) -> bool:
    """Whether the current batch only adds its gradients to those of others, without an optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def tell_sampler_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a data loader's samplers, which shuffle by it."""
    _set_sampler_epoch(loader, epoch)


def transfer_batch(trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
    """Prepare a batch as Lightning's loops do before its step: convert, transfer hooks, copy to the device."""
    module: LightningModule = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


def tear_down(trainer: Trainer) -> None:
    """End a run as Lightning does after the callbacks' `on_exception`."""
    trainer._teardown()


def wrap_resume_start(trainer: Trainer, around: Callable[..., None], undo: ExitStack) -> None:
    """Let `around(own, path)` be called in the place of `own(path)`, which reads a run's checkpoint, until undone.

    `path` is what Lightning has found for the user's `ckpt_path`; None if there is nothing to load.
    """
    connector = trainer._checkpoint_connector
    connector.resume_start = partial(around, connector.resume_start)  # type: ignore[method-assign]
    undo.callback(vars(connector).pop, "resume_start")


def wrap_checkpoint_search(trainer: Trainer, around: Callable[..., Any], undo: ExitStack) -> None:
    """Let `around(own, fn, ckpt_path, **kwargs)` be called in the place of `own`, which finds what `ckpt_path` means.

    `fn` is a `TrainerFn`. The result is a path, or None if there is nothing to load.
    """
    connector = trainer._checkpoint_connector
    connector._parse_ckpt_path = partial(around, connector._parse_ckpt_path)  # type: ignore[method-assign]
    undo.callback(vars(connector).pop, "_parse_ckpt_path")


def checkpoint_folder(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """Return the folder or address in which a callback saves, also before its set-up."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def last_checkpoints(callback: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Return the paths of a callback's last checkpoints, if its folder is local."""
    return callback._find_last_checkpoints(trainer)


def uploads_checkpoints(logger: Logger) -> bool:
    """Return whether a logger uploads the checkpoints of callbacks, `log_model=True` or "all"; it takes files only."""
    return bool(getattr(logger, "_log_model", False))  # of those for W&B, MLflow and Lightning's platform


def pruned_parameters(callback: ModelPruning) -> list[tuple[nn.Module, str]]:
    """Return (module, name of its parameter) of each parameter that a callback prunes; known after its set-up."""
    return list(callback._parameters_to_prune)


def replace_link(callback: ModelCheckpoint, link: Callable[[Trainer, Any, Any], None], undo: ExitStack) -> None:
    """Let a callback link "last" to a checkpoint by `link(trainer, filepath, linkpath)`, until `undo` is closed.

    A subclass keeps a link method of its own.
    """
    if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
        callback._link_checkpoint = link  # type: ignore[method-assign, assignment]
        undo.callback(vars(callback).pop, "_link_checkpoint", None)


# -- signals: Lightning registers the handlers once a run is set up, and gives the former ones back at its end ---------

Handler = Callable[[int, Any], None]  # called with (signal number, frame)


def replace_sigterm_handler(trainer: Trainer, handler: Handler, undo: ExitStack) -> None:
    """Let the coming run handle SIGTERM by `handler`, until `undo` is closed."""
    connector = trainer._signal_connector
    connector._sigterm_notifier_fn = handler  # type: ignore[method-assign, assignment]
    undo.callback(vars(connector).pop, "_sigterm_notifier_fn")


def replaced_sigterm_handler(trainer: Trainer) -> Handler | None:
    """Return the handler that stands in for Lightning's, if any."""
    return vars(trainer._signal_connector).get("_sigterm_notifier_fn")


def note_sigterm(trainer: Trainer) -> None:
    """Let Lightning end the run as if this process had received SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def requeue_handler(trainer: Trainer) -> Handler:
    """Return the handler of Slurm's signal: Lightning's finalizes loggers, saves, and requeues the job on rank 0."""
    return trainer._signal_connector._slurm_sigusr_handler_fn


def replace_requeue_handler(trainer: Trainer, handler: Handler, undo: ExitStack) -> None:
    """Let the coming run handle Slurm's signal by `handler`, until `undo` is closed."""
    connector = trainer._signal_connector
    connector._slurm_sigusr_handler_fn = handler  # type: ignore[method-assign, assignment]
    undo.callback(vars(connector).pop, "_slurm_sigusr_handler_fn")


# -- strategies and the processes that they start --------------------------------------------------------------------


class Strategy(DDPStrategy):
    """Lightning's DDPStrategy, with a hook where it makes the launcher of its processes."""

    def _make_launcher(self) -> None:
        """Set the launcher, if the strategy needs one: `set_launcher`, `launcher`."""
        super()._configure_launcher()

    @override
    def _configure_launcher(self) -> None:
        self._make_launcher()


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments of DistributedDataParallel that the user has given to the strategy."""
    return strategy._ddp_kwargs


def comm_hook(strategy: DDPStrategy) -> Any:
    """Return the user's hook for the all-reduce of gradients (`ddp_comm_hook`); None without one."""
    return strategy._ddp_comm_hook


def start_method(strategy: DDPStrategy) -> str:
    """Return how the strategy starts processes: "popen", "spawn", "fork" or "forkserver"."""
    return strategy._start_method


def set_launcher(strategy: DDPStrategy, launcher: Any) -> None:
    """Set what starts the strategy's processes; None: the run is in this process."""
    strategy._launcher = launcher


def without_layer_sync(strategy: DDPStrategy, model: nn.Module) -> nn.Module:
    """Return the model without the layers that `sync_batchnorm=True` has put into it."""
    return model if strategy._layer_sync is None else strategy._layer_sync.revert(model)


def without_module(state: dict[str, Any]) -> dict[str, Any]:
    """Return a strategy's state (`__getstate__`) without its module and optimizers: the copy has none."""
    return state | {"_lightning_module": None, "_model": None, "_optimizers": [], "lr_scheduler_configs": []}


Call = Callable[[Trainer | None, Callable[..., Any]], Callable[..., Any]]
"""Returns what is called in each rank's process in the place of the trainer's function."""


class DirectLauncher(_Launcher):
    """Stands for no launcher: the trainer's function runs in this process, as `around` wants it."""

    def __init__(self, around: Call) -> None:
        self._around = around

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return self._around(trainer, function)(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: it has started no process."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher that runs the script once more for each rank; each runs the function as `around` wants it.

    It takes the place of `launcher`, which has started nothing yet.
    """

    def __init__(self, launcher: _SubprocessScriptLauncher, around: Call) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self._around = around

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(self._around(trainer, function), *args, trainer=trainer, **kwargs)


def wrap_launcher(strategy: DDPStrategy, around: Call) -> None:
    """Let the trainer's function run as `around` wants it, in every process that runs it without a launcher of Python.

    `around` is a function of a module, because a strategy can be pickled.
    """
    launcher = strategy.launcher
    if launcher is None:
        strategy._launcher = DirectLauncher(around)
    elif type(launcher) is _SubprocessScriptLauncher:
        strategy._launcher = ScriptLauncher(launcher, around)


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher by `spawn`, `fork` or `forkserver`."""

    @property
    def strategy(self) -> Any:
        """The strategy whose processes it starts."""
        return self._strategy

    def run_in_process(self, number: int, trainer: Any, function: Callable[..., Any], *args: Any) -> None:
        """Run the trainer's function in a started process, the one of this number."""
        super()._wrapping_function(number, trainer, function, *args)

    @override
    def _wrapping_function(self, process_idx: int, trainer: Any, function: Callable[..., Any], *args: Any) -> None:
        self.run_in_process(process_idx, trainer, function, *args)

    def collect_results(self, trainer: Trainer, results: Any) -> Any:
        """Return what the parent gets of a rank: the module's state is taken on every rank, and saved on rank 0."""
        return super()._collect_rank_zero_results(trainer, results)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        return self.collect_results(trainer, results)


def starts_python_processes(launcher: Any) -> bool:
    """Whether a launcher starts processes by `multiprocessing`; others run the script again, or none."""
    return isinstance(launcher, _MultiProcessingLauncher)
