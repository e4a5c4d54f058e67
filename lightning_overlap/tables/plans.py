"""What TorchRec's planner is offered, in one order, and the plan that a model was sharded by, to be kept."""

from __future__ import annotations

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
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from typing_extensions import override

from ..text import some
from .comms import Codecs
from .supported_modules import sharded_modules
from .table import training_sharders

_MANAGED = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
_ROW_WISE = ShardingType.ROW_WISE.value


@dataclass
class KeptPlan(ShardingPlan):  # type: ignore[misc]
    """A plan that a model was sharded by. As `sharding=` of a strategy it shards the model in the same way again."""

    replicated: tuple[str, ...] = ()
    """Names of the tables that are replicated; where `replicate_tables` says nothing, they are again."""


def plan_of(model: nn.Module) -> KeptPlan:
    """Return the plan that the collections of a model were sharded by, which `torch.save` can write.

    Raises:
        RuntimeError: No collection is sharded.
    """
    modules: dict[str, Any] = sharded_modules(model)
    if not modules:
        raise RuntimeError("no table is sharded yet: read the plan in fit (in on_fit_start, say) or after it.")
    kept = {name: getattr(module, "kept_plan", None) for name, module in modules.items()}
    # What the user has sharded has no such attribute; TorchRec's own collections know their plan.
    plans = {name: each[0] if each else modules[name].module_sharding_plan for name, each in kept.items()}
    return KeptPlan(plans, tuple(name for each in kept.values() if each for name in each[1]))


def sharding_types(sharder: ModuleSharder[nn.Module], device: str) -> list[str]:
    """Return the types that tables of a collection can have: its sharder's, and row-wise.

    On a CPU the sharders of bags do not offer row-wise, which trains there all the same.
    """
    own = sharder.sharding_types(device)
    return own if _ROW_WISE in own else [*own, _ROW_WISE]


def planned_sharders(codecs: Codecs | None, device: str) -> list[ModuleSharder[nn.Module]]:
    """Return TorchRec's sharders for a planner, which offer it `sharding_types`."""
    sharders = training_sharders(codecs)
    for sharder in sharders:
        possible = sharding_types(sharder, device)
        vars(sharder)["sharding_types"] = lambda compute_device_type, possible=possible: possible
    return sharders


def make_planner(topology: Topology, constraints: dict[str, ParameterConstraints]) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner, which makes the same plan in every process."""
    enumerator = _InOneOrder(topology, BATCH_SIZE, constraints=constraints)
    return EmbeddingShardingPlanner(topology=topology, enumerator=enumerator, constraints=constraints, debug=False)


def plan_on_rank_zero(
    planner: Any, model: nn.Module, group: dist.ProcessGroup, sharders: list[ModuleSharder[nn.Module]]
) -> ShardingPlan:
    """Plan once and tell everyone, a failure too (TorchRec's `collective_plan` leaves the other ranks waiting)."""
    outcome: list[Any] = [None]
    if group.rank() == 0:
        try:
            outcome = [planner.plan(model, sharders)]
        except Exception as err:  # whatever it is, the other ranks are waiting to hear of it
            outcome = [f"{type(err).__name__}: {err}"]
        gc.collect()  # TorchRec's planner leaves a cycle behind that has the modules, with their whole tables
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if not isinstance(outcome[0], ShardingPlan):
        managed = [name for name, module in model.named_modules() if isinstance(module, _MANAGED)]
        way_out = f" TorchRec's planner refuses most of {some(managed)}: give a ShardingPlan with row_wise() for their "
        way_out += "tables (torchrec.distributed.sharding_plan)."
        raise ValueError(
            f"no sharding plan for this model on {group.size()} ranks.{way_out if managed else ''} The planner said: "
            f"{outcome[0]}"
        )
    return outcome[0]


class _InOneOrder(EmbeddingEnumerator):  # type: ignore[misc]
    """Lists the options of each table in one order: of options with equal costs the planner takes the first.

    TorchRec lists them in the order of a set of strings, which Python's hash seed changes from process to process.
    """

    @override
    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        tables = list(dict.fromkeys(option.fqn for option in options))
        place = dict(zip(tables, range(len(tables)), strict=True))
        order = [kind.value for kind in ShardingType]
        return sorted(options, key=lambda each: (place[each.fqn], order.index(each.sharding_type), each.compute_kernel))
