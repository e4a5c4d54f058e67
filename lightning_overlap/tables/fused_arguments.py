"""The keywords of a fused optimizer: what its class takes for those that are left out, and what FBGEMM is told.

FBGEMM's kernels have the same defaults for every optimizer, such as a rate of 0.01 and an `eps` of 1e-8, and take
arguments that they do not read without a word. So the class that the user names decides: its signature completes the
keywords, and a keyword that the kernel cannot be told with the same meaning is refused.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

KERNEL_ARGUMENTS = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
KERNEL_RATE, KERNEL_EPS = (float(KERNEL_ARGUMENTS[name].default) for name in ("learning_rate", "eps"))

_MOMENTS = ("eps", "beta1", "beta2", "weight_decay")
_REGULARIZATIONS = ("counter_based_regularization", "cowclip_regularization", "global_weight_decay")
READ_BY_KERNEL: Mapping[EmbOptimType, tuple[str, ...]] = {
    EmbOptimType.EXACT_SGD: ("extra_optimizer_config",),
    EmbOptimType.EXACT_ADAGRAD: ("eps",),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("eps", "weight_decay", "weight_decay_mode", "max_norm", *_REGULARIZATIONS),
    EmbOptimType.ADAM: (*_MOMENTS, "extra_optimizer_config"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (*_MOMENTS, "optimizer_state_dtypes"),
    EmbOptimType.LAMB: _MOMENTS,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _MOMENTS,
    EmbOptimType.LARS_SGD: ("momentum", "weight_decay", "eta"),
}
"""Arguments of an update that each kernel of FBGEMM 1.8 reads on CUDA (`split_embedding_codegen_lookup_invokers`), in
addition to those that all read."""
READ_BY_ALL = ("lr", "learning_rate", "gradient_clipping", "max_gradient", "stochastic_rounding")
_READ_ON_CPU = ("eps", "cowclip_regularization")  # of `READ_BY_KERNEL`, the kernels for a CPU
_OF_UPDATES = {*("ensemble_mode", "emainplace_mode"), *(name for names in READ_BY_KERNEL.values() for name in names)}

_NAMES_OF_KERNEL: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "eps": (),
    "betas": ("beta1", "beta2"),
}
"""Keywords of classes whose default is no zero -> FBGEMM's other names for them."""

ONLY_BY_GRADIENTS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""Optimizers that, without weight decay and momentum, change nothing where the gradient is zero."""


def kind_of(optimizer_class: type[torch.optim.Optimizer]) -> EmbOptimType | None:
    """Return FBGEMM's kind of an optimizer; None if FBGEMM cannot fuse it."""
    try:
        return optimizer_type_to_emb_opt_type(optimizer_class)
    except ValueError:
        return None


def keywords_of(optimizer_class: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    """Return the keywords in a class's signature; the classes of torchrec.optim that stand for a kernel have none."""
    _, *keywords = inspect.signature(optimizer_class).parameters.values()
    return {one.name: one for one in keywords if one.kind is not inspect.Parameter.VAR_KEYWORD}


def with_defaults(optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of a fused optimizer with what its class takes for those that are left out.

    FBGEMM's own defaults remain where the class has none in its signature. They are zeros where the class's are.
    """
    defaults = {
        name: one.default
        for name, one in keywords_of(optimizer_class).items()
        if name in _NAMES_OF_KERNEL
        and one.default is not one.empty
        and kwargs.keys().isdisjoint(_NAMES_OF_KERNEL[name])
    }
    return {**defaults, **kwargs}


def kernel_arguments(optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what FBGEMM is told of the keywords of a fused optimizer, of which `refused_keywords` refuses none.

    "lr" keeps its name, as TorchRec renames it.
    """
    own = keywords_of(optimizer_class)
    told: dict[str, Any] = {}
    for name, value in with_defaults(optimizer_class, kwargs).items():
        if name == "betas":
            told |= {"beta1": _number(value[0]), "beta2": _number(value[1])}
        elif name == "lr" or (name in KERNEL_ARGUMENTS and (name not in own or _is_read(optimizer_class, name))):
            told[name] = _number(value)
    return told


def refused_keywords(
    optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], *, on_cpu: bool
) -> dict[str, str]:
    """Return the keywords that a fused optimizer cannot have -> what to do, or ""; zeros, False and None are fine."""
    own = keywords_of(optimizer_class)
    refused: dict[str, str] = {}
    for name, value in kwargs.items():
        is_read = _is_read(optimizer_class, name, on_cpu=on_cpu)
        if name == "optimizer" and value != kind_of(optimizer_class):
            refused[name] = "Name the class instead."
        elif name == "learning_rate" and "lr" in kwargs and kwargs["lr"] != value:
            refused[name] = "It has lr as well: give one of them."
        elif not value:
            continue
        elif optimizer_class is torch.optim.Adam and name in ("weight_decay", "decoupled_weight_decay"):
            refused[name] = (
                "FBGEMM's Adam decays the rows of each batch alone, decoupled: if you want this, take "
                "(torchrec.optim.Adam, {..., 'weight_decay': ...})."
            )
        elif name == "weight_decay" and is_read and "weight_decay_mode" in _reads(optimizer_class):
            if not kwargs.get("weight_decay_mode"):
                refused[name] = "With weight_decay_mode=WeightDecayMode.L2 as well it decays the rows of each batch."
        elif name == "max_gradient" and not kwargs.get("gradient_clipping"):
            refused[name] = "It needs gradient_clipping=True."
        elif not is_read and (name in own or name in _OF_UPDATES):
            refused[name] = ""
    return refused


def _reads(optimizer_class: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    kind = kind_of(optimizer_class)
    return () if kind is None else READ_BY_KERNEL.get(kind, ())


def _is_read(optimizer_class: type[torch.optim.Optimizer], name: str, *, on_cpu: bool = False) -> bool:
    """Whether the kernel of a class reads one of the class's keywords, or of FBGEMM's."""
    of_kernel = [one for one in _reads(optimizer_class) if one in _READ_ON_CPU or not on_cpu]
    return name in READ_BY_ALL or name in of_kernel or (name == "betas" and "beta1" in of_kernel)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
