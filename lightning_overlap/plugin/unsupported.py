"""What would train wrongly with sharded tables and say nothing: refused before training starts, with a way out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..tables import find_tables, sharded_modules, why_never_held
from ..text import SCALES_LOSS, unknown_name_message

_TRUE = (
    "converts the module's weights, but sharded tables keep the data_type of their configs: rows and dense weights "
    "would differ in type"
)
PRECISIONS: Mapping[str, str] = {
    "16-mixed": SCALES_LOSS.format(instead="precision='bf16-mixed'"),
    "16-true": f"{_TRUE}. Use precision='bf16-mixed'",
    "bf16-true": f"{_TRUE}. Use precision='bf16-mixed'",
    "64-true": f"{_TRUE}. Use precision='32-true', and .double() on the dense modules that need it",
}
"""Lightning's name of a precision -> why not. On a CPU Lightning turns 16-mixed into bf16-mixed before it gets here."""


def _prunes_tables(callback: callbacks.ModelPruning, model: nn.Module) -> bool:
    weights = {id(table.parameter) for table in find_tables(model)}
    weights |= {id(weight) for module in sharded_modules(model).values() for weight in module.parameters()}
    return any(id(getattr(module, name)) in weights for module, name in callback._parameters_to_prune)


_AVERAGES = (
    "it has copied the module with its whole tables and pairs the copy's parameters with those of the sharded module. "
    "Average the dense modules alone: in a callback of your own, make torch.optim.swa_utils.AveragedModel(module.top) "
    "in on_fit_start and call its update_parameters(module.top) in on_train_batch_end"
)
_AVERAGING = (
    callbacks.StochasticWeightAveraging,
    getattr(callbacks, "WeightAveraging", callbacks.StochasticWeightAveraging),
)  # 2.6 has it
CALLBACKS: tuple[tuple[type[Callback], Callable[[Any, nn.Module], bool], str], ...] = (
    *((kind, lambda *_: True, _AVERAGES) for kind in _AVERAGING),
    (
        callbacks.BaseFinetuning,
        lambda _, model: any(not table.parameter.requires_grad for table in find_tables(model)),
        "it has frozen tables, and once they are sharded it cannot unfreeze them: a fused update does not look at "
        "requires_grad. Leave the tables out of what it freezes; to hold them still for a while, schedule their "
        "learning rate with combined_optimizer",
    ),
    (
        callbacks.ModelPruning,
        _prunes_tables,
        "it would prune the weights that the tables had before they were sharded. Name the dense weights: "
        "ModelPruning(..., parameters_to_prune=[(module.top[0], 'weight'), ...])",
    ),
)
"""Callback, whether it would go wrong with a model, and why."""


def check_arguments(kind: type[DDPStrategy], given: Iterable[str]) -> None:
    """Check the names of arguments that a strategy hands on to `DDPStrategy`, and that to DistributedDataParallel.

    Raises:
        TypeError: Nobody has an argument of this name: Lightning alone says so in the middle of `fit`.
    """
    known: dict[str, None] = {}
    for owner in (*kind.__mro__, DistributedDataParallel):
        if owner is DistributedDataParallel or issubclass(owner, DDPStrategy):
            parameters = inspect.signature(owner.__init__).parameters.values()
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            known |= dict.fromkeys(one.name for one in parameters if one.kind in named)
    for name in ("self", "module", "device_ids"):
        known.pop(name, None)
    for name in given:
        if name not in known:
            raise TypeError(f"{kind.__name__}: {unknown_name_message('argument', name, known)}")


def refuse_precision(precision: Any) -> None:
    """Refuse a precision that fused tables cannot honour.

    Raises:
        ValueError: It is one of `PRECISIONS`.
    """
    reason = PRECISIONS.get(str(precision))
    if reason is not None:
        raise ValueError(f"precision={precision!r} {reason}.")


def refuse_callbacks(given: Iterable[Callback], model: nn.Module) -> None:
    """Refuse callbacks that would do something else to sharded tables than they say.

    Raises:
        ValueError: One of `CALLBACKS` would.
    """
    for callback in given:
        for kind, applies, reason in CALLBACKS:
            if isinstance(callback, kind) and applies(callback, model):
                raise ValueError(f"{type(callback).__name__} cannot be used with sharded tables: {reason}.")


def refuse_held_updates(module: LightningModule) -> None:
    """Refuse a module whose tables cannot be updated with the optimizer step.

    Raises:
        ValueError: It steps its optimizers itself, or one of its sharded modules updates tables in their backward.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "frozen_window=True: with manual optimization nobody says which backwards share an optimizer step. Use "
            "automatic optimization with Trainer(accumulate_grad_batches=...)."
        )
    for name, sharded in sharded_modules(module).items():
        reason = why_never_held(sharded)
        if reason is not None:
            raise ValueError(
                f"frozen_window=True: the tables of {name!r} cannot wait for the optimizer step: {reason}."
            )


def warn_of_ignored_options(trainer: Trainer, *, holds_updates: bool) -> None:
    """Say which of the trainer's options leave the tables out."""
    schedulers = [c for c in trainer.callbacks if isinstance(c, callbacks.GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    accumulates = trainer.accumulate_grad_batches != 1 or any(s.going_to_accumulate_grad_batches() for s in schedulers)
    if accumulates and not holds_updates:
        number = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        warnings.warn(
            f"{type(schedulers[0]).__name__ if schedulers else number} accumulates dense gradients only: "
            "fused tables are updated inside the backward of every batch. With frozen_window=True they are updated "
            "with the optimizer step.",
            UserWarning,
            stacklevel=2,
        )
    if trainer.gradient_clip_val:
        warnings.warn(
            f"gradient_clip_val={trainer.gradient_clip_val} clips dense gradients only: those of fused tables "
            "never leave the backward kernel (FBGEMM clips them by its own fused_params).",
            UserWarning,
            stacklevel=2,
        )
