"""Deterministic use of TorchRec's planner, and the plan of a sharded model."""

import gc
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typing_extensions import override

from ..text import some
from .kernel_checks import MANAGED, ROW_WISE_PLAN
from .quantized_comms import Codecs
from .supported_modules import DENSE, sharded_modules
from .table import training_sharders


@dataclass
class KeptPlan(ShardingPlan):  # type: ignore[misc]
    """The plan of a sharded model. As `sharding=` of a strategy it shards a model in the same way."""

    replicated: tuple[str, ...] = ()  # names of the replicated tables; used if `replicate_tables` is not set


def plan_of(model: nn.Module) -> KeptPlan:
    """Return the plan of a sharded model, for `torch.save`; raise a RuntimeError if no collection is sharded."""
    modules: dict[str, Any] = sharded_modules(model)
    if not modules:
        raise RuntimeError("no table is sharded yet: read the plan during fit (for example in on_fit_start) or later.")
    kept = {name: getattr(module, "kept_plan", None) for name, module in modules.items()}
    # Modules that the user sharded lack this attribute; TorchRec's collections know their plan.
    plans = {name: each[0] if each else modules[name].module_sharding_plan for name, each in kept.items()}
    return KeptPlan(plans, tuple(name for each in kept.values() if each for name in each[1]))


def sharding_types(sharder: ModuleSharder[nn.Module], device: str) -> list[str]:
    """Return the sharding types of a sharder, and row-wise, which works on a CPU but is not offered there."""
    return list(dict.fromkeys([*sharder.sharding_types(device), ShardingType.ROW_WISE.value]))


def make_planner(
    topology: Topology, constraints: dict[str, ParameterConstraints], codecs: Codecs | None
) -> tuple[EmbeddingShardingPlanner, list[ModuleSharder[nn.Module]]]:
    """Return TorchRec's planner, made deterministic, and its sharders with the types of `sharding_types`."""
    sharders = training_sharders(codecs)
    for sharder in sharders:
        possible = sharding_types(sharder, topology.compute_device)
        vars(sharder)["sharding_types"] = lambda compute_device_type, possible=possible: possible
    enumerator = _InOneOrder(topology, BATCH_SIZE, constraints=constraints)
    planner = EmbeddingShardingPlanner(topology=topology, enumerator=enumerator, constraints=constraints, debug=False)
    return planner, sharders


def plan_on_rank_zero(
    planner: Any, model: nn.Module, group: dist.ProcessGroup, sharders: list[ModuleSharder[nn.Module]]
) -> ShardingPlan:
    """Plan on rank 0 and broadcast the plan or the error (TorchRec's `collective_plan` hangs after an error)."""
    outcome: list[Any] = [None]
    if group.rank() == 0:
        try:
            outcome = [planner.plan(model, sharders)]
        except Exception as err:  # the other ranks are waiting
            outcome = [f"{type(err).__name__}: {err}"]
        gc.collect()  # TorchRec's planner leaves a reference cycle with the modules and their unsharded tables
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if not isinstance(outcome[0], ShardingPlan):
        managed = [name for name, module in model.named_modules() if isinstance(module, MANAGED)]
        way_out = f" TorchRec's planner rejects most modules like {some(managed)}: pass {ROW_WISE_PLAN}."
        raise ValueError(
            f"no sharding plan for this model on {group.size()} ranks.{way_out if managed else ''} The planner said: "
            f"{outcome[0]}"
        )
    return outcome[0]


def divide_in_two(plan: ShardingPlan, model: nn.Module) -> dict[str, list[str]]:
    """Divide table-wise tables into two parts of about equal traffic; return module -> tables of its second part.

    TorchRec has one lookup and one all-to-all for each sharding type of a module. So the tables of the second part
    become column-wise with one shard: the same shard at the same place.
    """
    second: dict[str, list[str]] = {}
    for name, of_module in plan.plan.items():
        module: Any = model.get_submodule(name)
        if type(module) is not EmbeddingBagCollection:
            continue
        sent: dict[int, list[int]] = {}  # rank -> columns that it sends of each part for a sample
        columns = {one.name: one.embedding_dim * len(one.feature_names) for one in module.embedding_bag_configs()}
        for table in sorted(of_module, key=lambda table: -columns[table]):
            how = of_module[table]
            if how.sharding_type == ShardingType.TABLE_WISE.value and how.compute_kernel != DENSE:
                of_parts = sent.setdefault(how.ranks[0], [0, 0])
                part = int(of_parts[1] < of_parts[0])
                of_parts[part] += columns[table]
                if part == 1:
                    how.sharding_type = ShardingType.COLUMN_WISE.value
                    second.setdefault(name, []).append(table)
    return second


class _InOneOrder(EmbeddingEnumerator):  # type: ignore[misc]
    """Lists options in a fixed order, since the planner takes the first best; TorchRec's depends on the hash seed."""

    @override
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        place: dict[str, int] = {}
        for option in options:
            place.setdefault(option.fqn, len(place))
        order = [kind.value for kind in ShardingType]
        return sorted(options, key=lambda each: (place[each.fqn], order.index(each.sharding_type), each.compute_kernel))
