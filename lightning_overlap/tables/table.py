"""The tables of a model before it is sharded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed.optim import apply_optimizer_in_backward as in_backward
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ParameterSharding, QuantizedCommCodecs, ShardingPlan
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from .supported_modules import outermost, sharded_modules

KERNEL_ARGUMENTS = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
KERNEL_RATE, KERNEL_EPS = (float(KERNEL_ARGUMENTS[name].default) for name in ("learning_rate", "eps"))

AppliedOptimizer: TypeAlias = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
"""An optimizer that is applied in backward: class and arguments."""


class Rule(NamedTuple):
    """The fused optimizer of a table."""

    name: str
    """Name of the optimizer's class."""
    kind: EmbOptimType | None
    """What FBGEMM calls it."""
    rate: float
    """The learning rate at first."""
    eps: float
    """What the update adds to the square root of the state."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the unsharded model."""

    name: str
    """Its name in the collection's configs."""
    module: str
    """Name of its collection in the model."""
    parameter: nn.Parameter
    """Its weight, `(num_embeddings, embedding_dim)`."""
    sharder: ModuleSharder[nn.Module]
    """TorchRec's sharder of its collection."""

    @property
    def path(self) -> str:
        """Its full name in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    @property
    def fused_optimizer(self) -> AppliedOptimizer | None:
        """The optimizer that was applied in backward, or None; the first of several, which TorchRec refuses."""
        classes, kwargs = (getattr(self.parameter, f"_optimizer_{what}", ()) for what in ("classes", "kwargs"))
        return next(zip(classes, kwargs, strict=True), None)

    @property
    def rule(self) -> Rule:
        """Its fused optimizer's rule; to be read before TorchRec shards the table and renames the arguments."""
        assert self.fused_optimizer is not None
        optimizer_class, kwargs = self.fused_optimizer
        kind = optimizer_type_to_emb_opt_type(optimizer_class)
        rate = kwargs.get("lr", kwargs.get("learning_rate", KERNEL_RATE))
        return Rule(optimizer_class.__name__, kind, float(rate), float(kwargs.get("eps", KERNEL_EPS)))

    def planned(self, plan: ShardingPlan) -> ParameterSharding | None:
        """Return how a plan shards it, or None."""
        of_module: dict[str, ParameterSharding] = plan.get_plan_for_module(self.module) or {}
        return of_module.get(self.name)

    def apply_fused_optimizer(self, optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        """Say for TorchRec that an optimizer is applied in backward, if there is none yet.

        torch's own function would also make the optimizer, whose state may be as large as the table.
        """
        if self.fused_optimizer is None:
            applied = {"_optimizer_classes": [optimizer_class], "_optimizer_kwargs": [dict(kwargs)]}
            vars(self.parameter).update(applied, _in_backward_optimizers=[])

    def update_in_backward(self, optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        """Let torch make the optimizer and apply it in the backward of the unsharded table, if there is none yet."""
        if self.fused_optimizer is None:
            in_backward._apply_optimizer_in_backward(optimizer_class, [self.parameter], dict(kwargs))

    def let_go(self) -> None:
        """Take its weight out of torch's maps of optimizers in backward, once the table is sharded.

        They hold the whole weight, its optimizer and its hook for as long as the process lives.
        """
        for hook in in_backward.param_to_optim_hook_handle_map.pop(self.parameter, ()):
            hook.remove()
        in_backward.param_to_acc_grad_map.pop(self.parameter, None)
        vars(self.parameter).pop("_in_backward_optimizers", None)

    def own_arguments(self) -> None:
        """Give it arguments of its own for its optimizer.

        The user's dict may be that of other tables, or of a module made later: TorchRec writes the kind of optimizer
        into it, and takes the kind that it finds there in the place of the class.
        """
        if self.fused_optimizer is not None:
            vars(self.parameter)["_optimizer_kwargs"] = list(map(dict, vars(self.parameter)["_optimizer_kwargs"]))


def training_sharders(codecs: Mapping[str, QuantizedCommCodecs] | None = None) -> list[ModuleSharder[nn.Module]]:
    """Return TorchRec's default sharders but those of quantized modules, which have nothing to train and stay whole."""
    sharders = [sharder for sharder in get_default_sharders() if not isinstance(sharder, BaseQuantEmbeddingSharder)]
    return sharders if codecs is None else [type(sharder)(qcomm_codecs_registry=codecs) for sharder in sharders]


def find_tables(model: nn.Module) -> list[Table]:
    """Return every table of the model's unsharded TorchRec collections."""
    sharders = {sharder.module_type: sharder for sharder in training_sharders()}
    collections = outermost(model, lambda module: type(module) in sharders)
    return [
        Table(table, name, parameter, sharders[type(module)])
        for name, module in collections.items()
        for table, parameter in sharders[type(module)].shardable_parameters(module).items()
    ]


def has_tables(model: nn.Module) -> bool:
    """Whether a model has tables, sharded already or not."""
    return bool(find_tables(model) or sharded_modules(model))


def table_optimizers(model: nn.Module) -> dict[str, AppliedOptimizer]:
    """Return the optimizers that are applied in backward to the tables of an unsharded model, by the tables' paths.

    A parameter has it in attributes that neither `copy.deepcopy` nor the pickler of `torch.multiprocessing` copies.
    """
    return {table.path: table.fused_optimizer for table in find_tables(model) if table.fused_optimizer}


def apply_table_optimizers(model: nn.Module, recorded: Mapping[str, AppliedOptimizer]) -> None:
    """Apply the optimizers of `table_optimizers` in the backward of a copied model's tables that have none."""
    for table in find_tables(model):
        if table.path in recorded:
            table.update_in_backward(*recorded[table.path])
