"""Leave out what Lightning does in a step without effect; whatever has an effect stays.

- Lightning's `self.log` moves a logged value to the device each time: a value that is there already stays.
- Hooks that nobody has overridden are not called, nor is a profiler that records nothing.
- What Lightning reads of a hook's signature is cached.

Each hook is looked up anew at each call, so callbacks and methods that are added during a run are seen.
`docs/lightning.md` says what Lightning itself could do about it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core import module as core_module
from lightning.pytorch.loops import evaluation_loop, prediction_loop, training_epoch_loop
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from .private_names import PRIVATE_NAMES

# -- logged values --------------------------------------------------------------------------------------------------


_OWN_TO = _ResultMetric.to


def _to(result: _ResultMetric, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and _is_on(result, args[0]):
        return result
    return _OWN_TO(result, *args, **kwargs)


def _is_on(result: _ResultMetric, device: torch.device) -> bool:
    """Whether all that moves with a logged value is on a device already."""
    if not _states_are_on(result, device):
        return False
    if result.is_tensor:
        return True
    metric = vars(result).get("value")
    # A metric that is made of others, or moves in its own way, may move more than its states.
    return (
        isinstance(metric, Metric)
        and (type(metric).to, type(metric)._apply) == (nn.Module.to, Metric._apply)
        and metric.device == device
        and _states_are_on(metric, device)
        and not any(True for _ in (*metric.children(), *metric.parameters(), *metric.buffers()))
    )


def _states_are_on(metric: Metric, device: torch.device) -> bool:
    states: list[Any] = [one for one in (metric._computed, metric._forward_cache) if one is not None]
    for state in (*states, *(getattr(metric, name) for name in metric._defaults)):
        for part in state if isinstance(state, list) else (state,):
            if not (isinstance(part, Tensor) and part.device == device):
                return False
    return True


# -- the profiler that records nothing ------------------------------------------------------------------------------

_START, _STOP, _PROFILE = PassThroughProfiler.start, PassThroughProfiler.stop, PassThroughProfiler.profile


def _profile(profiler: PassThroughProfiler, action_name: str) -> Any:
    return nullcontext(action_name) if _records_nothing(profiler) else _PROFILE(profiler, action_name)


def _records_nothing(profiler: Profiler | None) -> bool:
    cls: Any = type(profiler)
    if cls is not PassThroughProfiler:
        return False
    own = vars(profiler)
    return cls.start is _START and cls.stop is _STOP and "start" not in own and "stop" not in own


# -- which stage a trainer is in ------------------------------------------------------------------------------------

_TRAINING = cast(property, Trainer.training)


def _training(trainer: Trainer) -> bool:
    """Return `Trainer.training`, asked 16 times a step: Lightning's enums compare lower-case strings, which is slow."""
    return trainer.state.stage is RunningStage.TRAINING or _TRAINING.fget(trainer)  # type: ignore[misc]


# -- hooks ----------------------------------------------------------------------------------------------------------


@functools.cache
def _empty_hooks() -> frozenset[Callable[..., Any]]:
    """Return the hooks of Lightning's base classes that do nothing and return None."""
    methods = [
        method for cls in (LightningModule, Callback, Strategy) for _, method in inspect.getmembers(cls, callable)
    ]
    return frozenset(method for method in methods if isinstance(method, FunctionType) and _does_nothing(method))


_IDLE = frozenset({"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"})


def _does_nothing(function: FunctionType) -> bool:
    code = function.__code__
    returns_none = set(code.co_consts) <= {None, function.__doc__}
    return returns_none and all(instruction.opname in _IDLE for instruction in dis.get_instructions(code))


_LOG: logging.Logger = call.log


def _is_silent(trainer: Trainer) -> bool:
    """Whether calls of hooks are not recorded: no profiler runs, and Lightning's logger is not at level DEBUG."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return id(trainer) in _running and _records_nothing(profiler) and not _LOG.isEnabledFor(logging.DEBUG)


_own_hooks = {name: getattr(call, name) for name in PRIVATE_NAMES[call.__name__]}


def _call_callback_hooks(
    trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    module = trainer.lightning_module
    if monitoring_callbacks is not None or module is None or not _is_silent(trainer):
        own = _own_hooks["_call_callback_hooks"]
        own(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    empty, before = _empty_hooks(), module._current_fx_name
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook = getattr(callback, hook_name)
        if getattr(hook, "__func__", None) not in empty and callable(hook):
            vars(module)["_current_fx_name"] = hook_name
            hook(trainer, module, *args, **kwargs)
    vars(module)["_current_fx_name"] = before


def _call_lightning_module_hook(
    trainer: Trainer, hook_name: str, *args: Any, pl_module: LightningModule | None = None, **kwargs: Any
) -> Any:
    module = pl_module or trainer.lightning_module
    hook = getattr(module, hook_name, None)
    if hook is None or not _is_silent(trainer):
        own = _own_hooks["_call_lightning_module_hook"]
        return own(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    return _call(module, hook_name, hook, args, kwargs)


def _call_strategy_hook(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    module, hook = trainer.lightning_module, getattr(trainer.strategy, hook_name, None)
    if hook is None or module is None or not _is_silent(trainer):
        return _own_hooks["_call_strategy_hook"](trainer, hook_name, *args, **kwargs)
    return _call(module, hook_name, hook, args, kwargs)


def _call(module: LightningModule, hook_name: str, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(hook, "__func__", None) in _empty_hooks() or not callable(hook):
        return None
    # Set in the instance's dict: nn.Module.__setattr__ would look whether the value is a parameter or module.
    attributes = vars(module)
    before = attributes["_current_fx_name"]
    attributes["_current_fx_name"] = hook_name
    output = hook(*args, **kwargs)
    attributes["_current_fx_name"] = before
    return output


# -- signatures -----------------------------------------------------------------------------------------------------

_known_signatures: dict[tuple[Any, ...], tuple[CodeType, bool]] = {}


def _has_parameter(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Answer as Lightning's `is_param_in_hook_signature` does, about each function once."""
    function = getattr(hook_fx, "__func__", hook_fx)
    if type(function) is not FunctionType or vars(function):  # a decorator says there what it wraps
        return is_param_in_hook_signature(hook_fx, param, explicit, min_args)
    key = function, param, explicit, min_args
    code, answer = _known_signatures.get(key, (None, False))
    if code is not function.__code__:
        answer = is_param_in_hook_signature(hook_fx, param, explicit, min_args)
        _known_signatures[key] = function.__code__, answer
    return answer


# -- all of it ------------------------------------------------------------------------------------------------------

_REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    *((call, own.__name__, own) for own in (_call_callback_hooks, _call_lightning_module_hook, _call_strategy_hook)),
    *(
        (place, is_param_in_hook_signature.__name__, _has_parameter)
        for place in (core_module, training_epoch_loop, evaluation_loop, prediction_loop)
    ),
    (_ResultMetric, "to", _to),
    (PassThroughProfiler, "profile", _profile),
    (Trainer, "training", _TRAINING.getter(_training)),
)
"""The module or class that has something of Lightning's, its name there, what takes its place while any run is on."""
_replaced: list[tuple[Any, str, Any, Any]] = []
"""Where that has been done: the place, the name, what was there itself (None: inherited), what is there now."""
_running: set[int] = set()
"""The ids of the trainers that run."""


@contextmanager
def installed(trainer: Trainer) -> Iterator[None]:
    """Take the shortcuts in the run of a trainer; Lightning gets everything back after the last run."""
    for place, name, mine in _REPLACEMENTS if not _running else ():
        own = getattr(place, name, None)
        function = getattr(own, "fget", own)
        if type(function) is FunctionType and function.__module__.startswith("lightning."):  # not what a test put there
            _replaced.append((place, name, vars(place).get(name), mine))
            setattr(place, name, mine)
    _running.add(id(trainer))
    yield
    _running.discard(id(trainer))
    if not _running:
        _known_signatures.clear()
    while _replaced and not _running:
        place, name, own, mine = _replaced.pop()
        if vars(place).get(name) is mine:
            setattr(place, name, own) if own is not None else delattr(place, name)
