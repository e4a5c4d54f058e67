"""Skip work of Lightning that has no effect on a step: repeated checks of logged values, and hooks that do nothing."""

import logging
from contextlib import ExitStack
from types import FunctionType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from .private_names import PRIVATE_NAMES

_OWN = {"log": LightningModule.log, **{name: getattr(call, name) for name in PRIVATE_NAMES[call.__name__]}}
"""Lightning's methods and functions that are replaced, by name."""


class _Logged(NamedTuple):
    """A value that a module has logged in a step, as Lightning has checked it."""

    options: dict[str, Any]  # the arguments of `log`, without the name, the value and the batch size
    hook: str  # in which the module logged it
    results: _ResultCollection
    metric: _ResultMetric


def _log(module: LightningModule, name: str, value: Any, *args: Any, batch_size: Any = None, **options: Any) -> None:
    """Log a value. If a module logs as in the step before, only update the metric: the checks take 0.4 ms."""
    own, trainer = _OWN["log"], module._trainer
    if args or not isinstance(value, (Tensor, Metric)) or trainer is None or torch.compiler.is_compiling():
        own(module, name, value, *args, batch_size=batch_size, **options)
        return
    known, connector, hook = _logged.get((id(module), name)), trainer._logger_connector, module._current_fx_name
    results = trainer._results
    if (
        known is not None
        and known.results is results
        and known.hook == hook
        and known.options == options
        and connector._first_loop_iter is False  # before, the results of the last epoch are reset
        and results.dataloader_idx is None
        and (value.ndim == 0 if isinstance(value, Tensor) else value is known.metric.value)
        and value.device == known.metric.value.device  # else the metric moves
    ):
        value = value.clone().detach() if isinstance(value, Tensor) else value
        known.metric.forward(value, results._extract_batch_size(known.metric, batch_size, known.metric.meta))
        known.metric.has_reset = False
        connector._current_fx = hook
        return
    own(module, name, value, batch_size=batch_size, **options)
    if results is not None and hook is not None and id(trainer) in _running:
        metric = results.get(f"{hook}.{name}")
        if metric is not None and metric.is_tensor is isinstance(value, Tensor) and not metric.meta.enable_graph:
            _logged[id(module), name] = _Logged(options, hook, results, metric)


_IN_EACH_STEP = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start"),
    *("on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end"),
)
_EMPTY_HOOKS = frozenset(
    getattr(cls, name) for cls in (Callback, LightningModule, Strategy) for name in _IN_EACH_STEP if hasattr(cls, name)
)
"""The hooks of a step in Lightning's base classes: they do nothing and return None."""

_NAMES_OF_PROFILING = frozenset(("start", "stop", "profile"))


def _call_callback_hooks(
    trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    module, profiler = _running.get(id(trainer)), trainer.profiler  # type: ignore[attr-defined]
    is_silent = type(profiler) is PassThroughProfiler and _NAMES_OF_PROFILING.isdisjoint(vars(profiler))
    if not is_silent or call.log.isEnabledFor(logging.DEBUG):
        module = None
    _silent[id(trainer)] = module  # also for the hooks of module and strategy, which Lightning calls next
    if module is None or monitoring_callbacks is not None:
        _OWN["_call_callback_hooks"](trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    before = module._current_fx_name
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook = getattr(callback, hook_name)  # at each call: a run may add callbacks and methods
        if getattr(hook, "__func__", None) not in _EMPTY_HOOKS and callable(hook):
            vars(module)["_current_fx_name"] = hook_name
            hook(trainer, module, *args, **kwargs)
    vars(module)["_current_fx_name"] = before


def _call_lightning_module_hook(
    trainer: Trainer, hook_name: str, *args: Any, pl_module: LightningModule | None = None, **kwargs: Any
) -> Any:
    module = _silent.get(id(trainer))
    hook = getattr(pl_module or module, hook_name, None)
    if hook is None or module is None:
        return _OWN["_call_lightning_module_hook"](trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    return _call(pl_module or module, hook_name, hook, args, kwargs)


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    module, hook = _silent.get(id(trainer)), getattr(trainer.strategy, hook_name, None)
    if hook is None or module is None:
        return _OWN["_call_strategy_hook"](trainer, hook_name, *args, **kwargs)
    return _call(module, hook_name, hook, args, kwargs)


def _call(module: LightningModule, hook_name: str, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(hook, "__func__", None) in _EMPTY_HOOKS or not callable(hook):
        return None
    # Set in the instance's dict: nn.Module.__setattr__ would look whether the value is a parameter or module.
    attributes = vars(module)
    before = attributes["_current_fx_name"]
    attributes["_current_fx_name"] = hook_name
    output = hook(*args, **kwargs)
    attributes["_current_fx_name"] = before
    return output


_REPLACEMENTS = (
    *((call, own.__name__, own) for own in (_call_callback_hooks, _call_lightning_module_hook, _call_strategy_hook)),
    (LightningModule, "log", _log),
)
"""(module or class of Lightning, name of its attribute, replacement while any run goes on)."""
_running: dict[int, LightningModule] = {}  # the modules of the trainers that run, by the trainer's id
_logged: dict[tuple[int, str], _Logged] = {}  # by the module's id and the value's name
_silent: dict[int, LightningModule | None] = {}  # None: a profiler or a log at level DEBUG records the hooks


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Take the shortcuts in the run of a trainer; Lightning gets everything back after the last run."""
    for place, name, mine in _REPLACEMENTS if not _running else ():
        own = getattr(place, name)
        if type(own) is FunctionType and own.__module__.startswith("lightning."):  # not another replacement
            _OWN[name] = own  # a library may have wrapped Lightning's
            setattr(place, name, mine)
    _running[id(trainer)] = trainer.lightning_module
    undo.callback(_restore, trainer)


def _restore(trainer: Trainer) -> None:
    _running.pop(id(trainer), None)
    _silent.clear()  # also of trainers with another strategy; a run that goes on asks again at its next callback hook
    _logged.clear()  # another run that goes on checks its values once more
    for place, name, mine in _REPLACEMENTS if not _running else ():
        if getattr(place, name) is mine:
            setattr(place, name, _OWN[name])
