"""Refuse setups that would silently train wrongly with sharded tables, before training starts, with a way out."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from ..compat.lightning import pruned_parameters
from ..schedules import Mode
from ..tables import clips_in_backward, find_tables, sharded_modules, tables_in_dense_shards
from ..text import SCALES_LOSS, some, unknown_name_message

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
"""Lightning's name of a precision -> why it is refused. On a CPU Lightning turns 16-mixed into bf16-mixed first."""

_AVERAGING = (
    callbacks.StochasticWeightAveraging,
    getattr(callbacks, "WeightAveraging", callbacks.StochasticWeightAveraging),  # 2.6 has it
)
_CALLED_OTHERWISE = {"mode": "pipeline", "schedule": "pipeline", "optimizer": "fused_optimizer", "plan": "sharding"}


def check_arguments(kind: type[DDPStrategy], given: Iterable[str], pipeline: object) -> None:
    """Refuse an argument that neither strategy nor DistributedDataParallel has: Lightning would notice it late."""
    mode = pipeline if isinstance(pipeline, str) else getattr(pipeline, "name", "...")
    owners: list[Any] = [owner for owner in kind.__mro__ if issubclass(owner, DDPStrategy)]
    parameters = [one for owner in (*owners, DistributedDataParallel) for one in signature(owner).parameters.values()]
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [name for name in dict.fromkeys(named) if name not in ("module", "device_ids")]
    of_mode = [field.name for field in fields(Mode)]
    for name in given:
        if name in of_mode:
            raise TypeError(f"{kind.__name__}: {name} is an option of a mode: pipeline=Mode({mode!r}, {name}=...).")
        if name in _CALLED_OTHERWISE:
            meant = f"Did you mean {_CALLED_OTHERWISE[name]!r}? Known: {', '.join(known)}."
            raise TypeError(f"{kind.__name__}: unknown argument {name!r}. {meant}")
        if name not in known:
            raise TypeError(f"{kind.__name__}: {unknown_name_message('argument', name, known)}")


def refuse_precision(precision: Any) -> None:
    """Refuse the `PRECISIONS`."""
    if str(precision) in PRECISIONS:
        raise ValueError(f"precision={precision!r} {PRECISIONS[str(precision)]}.")


def refuse_device(device: torch.device) -> None:
    """Refuse devices that TorchRec has no kernels for; Lightning's "auto" takes Apple's GPU on a Mac."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"sharded tables cannot be on {device.type!r}: TorchRec and FBGEMM have kernels for CPUs and CUDA. Pass "
            "accelerator='cpu' to the Trainer."
        )


def refuse_fit(trainer: Trainer, model: nn.Module, *, on_cpu: bool, static_graph: bool) -> None:
    """Refuse what a fit cannot do with tables, before they are sharded."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if reason := _why_refused(callback, model):
            raise ValueError(f"{type(callback).__name__} cannot be used with sharded tables: {reason}.")
    modules = model.named_modules() if on_cpu else ()
    if hashing := [name for name, module in modules if isinstance(module, HashZchManagedCollisionModule)]:
        raise ValueError(
            f"{some(hashing)}: HashZchManagedCollisionModule (MPZCH) cannot be trained on a CPU, where FBGEMM's "
            "zero_collision_hash gives no rows to new ids. Train on CUDA, or use MCHManagedCollisionModule."
        )
    if static_graph and (accumulates := _accumulates(trainer)):
        raise ValueError(
            f"static_graph=True and {accumulates}: DistributedDataParallel fails if its first batch with static_graph "
            "does not end in an optimizer step. Use find_unused_parameters=True, or do not accumulate gradients."
        )


def _why_refused(callback: Callback, model: nn.Module) -> str | None:
    tables = find_tables(model)
    if isinstance(callback, _AVERAGING):
        return (
            "it has copied the module with its whole tables and pairs the copy's parameters with the sharded module's. "
            "Use lightning_overlap.ExponentialMovingAverage(decay=0.999), which averages the dense part and, with "
            "tables=True, the tables (docs/optimizers.md, 'Averages of weights'). For an average of another kind, make "
            "torch.optim.swa_utils.AveragedModel(module.top) of the dense modules in a callback of your own"
        )
    if isinstance(callback, callbacks.BaseFinetuning) and not all(one.parameter.requires_grad for one in tables):
        return (
            "it has frozen tables, and once they are sharded it cannot unfreeze them: a fused update ignores "
            "requires_grad. Let it freeze other modules only; to keep tables constant for a while, schedule their "
            "learning rate with combined_optimizer (docs/optimizers.md, 'Tables that train later')"
        )
    if isinstance(callback, callbacks.ModelPruning):
        weights = {id(table.parameter) for table in tables}
        weights |= {id(weight) for module in sharded_modules(model).values() for weight in module.parameters()}
        if any(id(getattr(module, name)) in weights for module, name in pruned_parameters(callback)):
            return (
                "it would prune the weights that the tables had before they were sharded. Name the dense weights: "
                "ModelPruning(..., parameters_to_prune=[(module.top[0], 'weight'), ...])"
            )
    return None


def refuse_clipping(trainer: Trainer, module: LightningModule, undo: ExitStack) -> None:
    """Refuse, until `undo` is closed, to clip by a norm of shards with a dense kernel: it differs between ranks."""
    names = tables_in_dense_shards(module) if trainer.world_size > 1 else []
    if not names:
        return
    paths = {id(weight): path.split(".") for path, weight in module.named_parameters()}
    shards = {key for key, path in paths.items() if ".".join((*path[:-3], *path[-2:-1])) in names}
    plugin = trainer.precision_plugin
    clip = plugin.clip_grad_by_norm

    def refuse(value: float) -> None:
        raise ValueError(
            f"gradient_clip_val={value}: {some(names)} have a dense kernel and are sharded, so the norm of gradients "
            "would differ between ranks, and so would the dense weights. Use gradient_clip_algorithm='value', or make "
            "them data-parallel."
        )

    def clip_or_refuse(optimizer: Optimizer, clip_val: float) -> None:
        if any(id(weight) in shards for group in optimizer.param_groups for weight in group["params"]):
            refuse(clip_val)
        clip(optimizer, clip_val)

    algorithm = trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
    if trainer.gradient_clip_val and algorithm == GradClipAlgorithmType.NORM:
        refuse(trainer.gradient_clip_val)
    plugin.clip_grad_by_norm = clip_or_refuse  # type: ignore[method-assign]
    undo.callback(vars(plugin).pop, "clip_grad_by_norm", None)


def warn_of_ignored_options(trainer: Trainer, model: nn.Module) -> None:
    """Warn of the trainer's options that have no effect on fused tables: accumulation and clipping of gradients."""
    if accumulates := _accumulates(trainer):
        warnings.warn(
            f"{accumulates} accumulates dense gradients only: fused tables are updated inside the backward of every "
            "batch.",
            stacklevel=2,
        )
    if trainer.gradient_clip_val and not all(map(clips_in_backward, sharded_modules(model).values())):
        warnings.warn(
            f"gradient_clip_val={trainer.gradient_clip_val} clips dense gradients only: gradients of fused tables "
            "never leave the backward kernel (FBGEMM clips them by its own fused_params: gradient_clipping=True "
            "and max_gradient, also as arguments of a fused optimizer of torchrec.optim).",
            stacklevel=2,
        )


def _accumulates(trainer: Trainer) -> str | None:
    """Return the option or callback that makes a trainer accumulate gradients, now or later; else None."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        schedules = isinstance(callback, callbacks.GradientAccumulationScheduler)
        if schedules and callback.going_to_accumulate_grad_batches():
            return type(callback).__name__
    number = trainer.accumulate_grad_batches
    return f"accumulate_grad_batches={number}" if number != 1 else None
