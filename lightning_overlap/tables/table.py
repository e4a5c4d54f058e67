"""The tables of a model before it is sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ParameterSharding, QuantizedCommCodecs, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection

from ..compat.torch import AppliedOptimizer, applied_in_backward, apply_in_backward, note_in_backward, tell_in_backward
from .fused_arguments import KERNEL_EPS, KERNEL_RATE, ONLY_BY_GRADIENTS, kind_of, with_defaults
from .supported_modules import outermost, sharded_modules

NAME_BEFORE = "name_before_sharding"  # attribute of a parameter that sharding has replaced: its name in the model


class Rule(NamedTuple):
    """The fused optimizer of a table."""

    name: str  # name of the optimizer's class
    kind: EmbOptimType | None  # FBGEMM's kind of optimizer
    rate: float  # the initial learning rate
    eps: float  # the number that the update adds to the square root of the state
    clips: bool  # whether the kernel clips gradients
    moves_on_zeros: bool = False  # whether an update changes rows or state of ids whose gradient is zero


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the unsharded model."""

    name: str  # the table's name in the collection's configs
    module: str  # name of its collection in the model
    parameter: nn.Parameter  # the weight, `(num_embeddings, embedding_dim)`
    sharder: ModuleSharder[nn.Module]  # TorchRec's sharder of the collection

    @property
    def path(self) -> str:
        """The table's full name in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def is_pooled_if_whole(self, device: torch.device) -> bool:
        """Whether TorchRec would pool its sequences if every rank had it whole (an EmbeddingCollection on a CPU)."""
        return device.type == "cpu" and self.sharder.module_type is EmbeddingCollection

    @property
    def trains_itself(self) -> bool:
        """Whether the collection was made with a fused optimizer, which also trains it unsharded."""
        return issubclass(self.sharder.module_type, (FusedEmbeddingBagCollection, FusedEmbeddingCollection))

    @property
    def fused_optimizer(self) -> AppliedOptimizer | None:
        """The optimizer applied in backward, with its class's defaults, or None; the first of several.

        TorchRec rejects several.
        """
        applied = applied_in_backward(self.parameter)
        return None if applied is None else (applied[0], with_defaults(*applied))

    @property
    def rule(self) -> Rule:
        """The fused optimizer's rule; read it before TorchRec shards the table and renames the arguments."""
        assert self.fused_optimizer is not None
        optimizer_class, kwargs = self.fused_optimizer
        rate = kwargs.get("lr", kwargs.get("learning_rate", KERNEL_RATE))
        eps, clips = float(kwargs.get("eps", KERNEL_EPS)), bool(kwargs.get("gradient_clipping"))
        kind = kind_of(optimizer_class)
        moves = kind not in ONLY_BY_GRADIENTS or bool(kwargs.get("weight_decay") or kwargs.get("momentum"))
        return Rule(optimizer_class.__name__, kind, float(rate), eps, clips, moves)

    def planned(self, plan: ShardingPlan) -> ParameterSharding | None:
        """Return the table's sharding in a plan, or None."""
        of_module: dict[str, ParameterSharding] = plan.get_plan_for_module(self.module) or {}
        return of_module.get(self.name)

    def apply_fused_optimizer(self, optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        """Let TorchRec apply an optimizer in backward, if none is set; torch's function would also make its state."""
        if self.fused_optimizer is None:
            note_in_backward(self.parameter, (optimizer_class, kwargs))

    def fuse(self, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        """The same with the arguments of FBGEMM's kernel (`kernel_arguments`), also in the place of the class's."""
        self.apply_fused_optimizer(optimizer_class, arguments)
        tell_in_backward(self.parameter, arguments)

    def update_in_backward(self, optimizer_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        """Let torch make the optimizer and apply it in the backward of the unsharded table, if none is set."""
        if self.fused_optimizer is None:
            apply_in_backward(self.parameter, (optimizer_class, kwargs))


def training_sharders(codecs: Mapping[str, QuantizedCommCodecs] | None = None) -> list[ModuleSharder[nn.Module]]:
    """Return TorchRec's default sharders, without sharders of quantized modules, which are not trained."""
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
    """Return whether a model has tables, sharded or not."""
    return bool(find_tables(model) or sharded_modules(model))


def table_optimizers(model: nn.Module) -> dict[str, AppliedOptimizer]:
    """Return table path -> optimizer applied in backward, for an unsharded model; copies of a model lack them."""
    return {table.path: table.fused_optimizer for table in find_tables(model) if table.fused_optimizer}


def apply_table_optimizers(model: nn.Module, recorded: Mapping[str, AppliedOptimizer]) -> None:
    """Apply the optimizers of `table_optimizers` to a copied model's tables without an optimizer."""
    for table in find_tables(model):
        if table.path in recorded:
            table.update_in_backward(*recorded[table.path])
