"""Shard the tables of a model in place: the user's argument, the plan, and checks before training starts."""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingPlanner, ShardingType
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionModule
from typing_extensions import override

from ..compat.torch import applied_in_backward, forget_in_backward, tell_in_backward
from ..compat.torchrec import forget_whole_weights, lookups_of, tell_where_weights_are
from ..distributed import take_from_rank_zero
from ..text import check_known, some
from .frozen import leave_out_frozen
from .ignored_options import options_of_tables, refuse_ignored_options, warn_of_unused_optimizer
from .kept_outside import refuse_kept_outside
from .kernel_checks import check_kernels, check_kernels_of_sharded, configs_by_table
from .left_behind import leave_shards_behind
from .loading import accept_some_tables
from .names import answer_in_config_order, divide_means_by_name, find_features_by_name
from .optimizer_checks import FusedOptimizer, apply_fused_optimizer, check_fused_optimizer, warn_of_dense_tables
from .plans import KeptPlan, divide_in_two, make_planner, plan_on_rank_zero, sharding_types
from .quantized_comms import check_plan, check_quantized_comms, codecs_of, sends_groups
from .replicas import ReplicateTables, make_replicas, replicas_in, tables_to_replicate
from .supported_modules import DATA_PARALLEL, DENSE, sharded_modules, table_modules
from .table import NAME_BEFORE, Rule, Table, find_tables, training_sharders
from .write_counts import refuse_gradients, watch_tables

_ROW_WISE = ShardingType.ROW_WISE.value
_COLUMN_WISE = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)

ShardingName: TypeAlias = Literal[
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"
]
"""The values of TorchRec's `ShardingType`, for editors and type checkers."""

Sharding: TypeAlias = ShardingName | Mapping[str, ShardingName] | ShardingPlanner | ShardingPlan | None
"""A type for all tables, a type by table name (TorchRec's planner decides about others), a planner, a plan, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """How a strategy shards tables; the first four as in its arguments."""

    sharding: Sharding
    fused_optimizer: FusedOptimizer | None
    quantized_comms: QCommsConfig | None
    replicate_tables: ReplicateTables
    group: dist.ProcessGroup
    on_host: dist.ProcessGroup | None  # of the same ranks, for tensors on the host; None on one rank
    device: torch.device
    local_world_size: int  # ranks on this host
    batch_size: int | None  # samples per batch and rank, None if unknown
    sends_buffers: bool  # whether DistributedDataParallel sends buffers of the dense part from rank 0
    rate_per_table: bool = False  # whether each table has a kernel, and so a learning rate, of its own
    in_two_parts: bool  # whether `divide_in_two` divides a plan that is not the user's, if sent numbers share no scale


def shard_tables(model: nn.Module, options: ShardingOptions) -> None:
    """Replace every TorchRec collection of a model by its sharded form, in place; all ranks of the group call this.

    Weights begin with rank 0's values, those of the rest of the model too (buffers only if DistributedDataParallel
    sends them). Tables on `meta` are allocated as shards only, and each rank initializes its own. Collections that the
    user has sharded stay as they are. A ValueError says, on every rank and before any table is sharded, what cannot be
    done as asked.
    This draws random numbers, more on some ranks than on others: the caller restores the generators.
    """
    tables, fused = find_tables(model), check_fused_optimizer(options.fused_optimizer)
    given = options_of_tables(options.sharding, fused, options.replicate_tables, options.rate_per_table)
    refuse_ignored_options(model, tables, given)
    asked_for = {
        "fused_optimizer": fused,
        "sharding": options.sharding,
        "rate_per_table": options.rate_per_table or None,
    }
    _check_sharded_modules(model, asked_for, options.quantized_comms)
    check_kernels_of_sharded(model, options.device)
    if tables:
        _refuse_pruning_and_shared_weights(model, tables)
        refuse_kept_outside(model, tables)
        if options.on_host is not None:
            _begin_as_rank_zero(model, tables, options.on_host, options.sends_buffers)
        _refuse_other_shapes(model, tables)  # after it: shapes that differ by rank are errors there, on all ranks
        planned = _plan(model, tables, fused, options)
        _apply_optimizers(planned, fused, options.device)
        trained = planned.rules()  # TorchRec renames the arguments that they are read from
        if options.rate_per_table:
            for table in planned.in_backward:
                # Replicas have kernels of this package.
                if table.parameter.requires_grad and table not in planned.replicas:
                    _give_own_kernel(table)
        _shard(model, planned, options)
        _annotate(model, planned, trained, options.quantized_comms, asked_for)
        watch_tables(model)  # optimizers of replicas have the weights that it makes
        modules = {table.module for table in planned.replicas}
        make_replicas(model, modules, trained, rate_per_table=options.rate_per_table)
    _watch(model)  # modules that the user has sharded, too


def _begin_as_rank_zero(model: nn.Module, tables: list[Table], group: dist.ProcessGroup, sends_buffers: bool) -> None:
    """Give the weights of all ranks the values of rank 0, which may have loaded them alone, before they are sharded.

    DistributedDataParallel does so, but only for a dense part that is trained, and not in evaluations.
    """
    sharded = tuple(f"{name}." for name in sharded_modules(model))  # by the user: each rank has shards of its own
    collections = tuple(f"{table.module}." if table.module else "" for table in tables)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: one for name, one in model.named_buffers() if sends_buffers or name.startswith(collections)}
    whole = {
        name: one
        for name, one in tensors.items()
        if not (name.startswith(sharded) or is_lazy(one)) and type(one.data) is Tensor and one.layout is torch.strided
    }
    frozen = {name: " frozen" for name, one in whole.items() if name.startswith(collections) and not one.requires_grad}
    take_from_rank_zero(whole, frozen, group)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The tables of an unsharded model, and how they will be sharded."""

    tables: list[Table]
    plan: ShardingPlan
    replicas: list[Table]  # data-parallel tables that every rank updates in the backward
    dense: list[Table]  # tables of the dense optimizer
    second: Mapping[str, list[str]]  # name of a module -> its tables that are looked up as a second part

    @property
    def in_backward(self) -> list[Table]:
        """The tables that the backward updates; frozen ones, at a rate of 0, too."""
        return [table for table in self.tables if table not in self.dense]

    def rules(self) -> dict[str, dict[str, Rule]]:
        """Return module -> table -> rule of the tables that the backward trains.

        A sharded module's kernels know the rates of this rank's shards only, and schedulers move them.
        """
        found: dict[str, dict[str, Rule]] = {table.module: {} for table in self.tables}
        for table in self.in_backward:
            if table.parameter.requires_grad:
                found[table.module][table.name] = table.rule
        return found


def _plan(
    model: nn.Module, tables: list[Table], fused: tuple[Any, dict[str, Any]] | None, options: ShardingOptions
) -> _Planned:
    """Plan how tables are sharded; raise a ValueError for what cannot be done."""
    named, num_ranks = _named_types(options.sharding, tables), options.group.size()
    replicate_tables = options.replicate_tables
    if replicate_tables is None and isinstance(options.sharding, KeptPlan):
        replicate_tables = options.sharding.replicated
    to_replicate = tables_to_replicate(
        replicate_tables, tables, named, batch_size=options.batch_size, fused=fused, world_size=num_ranks
    )
    plan = make_plan(
        model,
        options.sharding,
        options.group,
        options.device,
        options.local_world_size,
        options.quantized_comms,
        to_replicate if num_ranks > 1 else (),
    )
    check_kernels(model, tables, plan, options.device, fused)
    divides = options.in_two_parts and named is not None and not sends_groups(options.quantized_comms)
    second = divide_in_two(plan, model) if divides else {}
    replicas = replicas_in(plan, tables, to_replicate, num_ranks)
    dense = [table for table in tables if (how := table.planned(plan)) and how.compute_kernel == DENSE]
    _refuse_optimizers_within_ddp([table for table in dense if table not in replicas])
    _refuse_sequences_as_bags(dense, replicas, options.device)
    return _Planned(tables, plan, replicas, [table for table in dense if table not in replicas], second)


def _apply_optimizers(planned: _Planned, fused: tuple[Any, dict[str, Any]] | None, device: torch.device) -> None:
    """Apply the fused optimizer to tables without one, and warn of tables that the dense optimizer has to train."""
    if fused is not None:
        warn_of_unused_optimizer(planned.tables, planned.in_backward, fused)
    apply_fused_optimizer(planned.in_backward, fused, device)
    for table in planned.dense:  # TorchRec writes its kind of optimizer into the arguments, which tables may share
        if table.fused_optimizer is not None:
            tell_in_backward(table.parameter, table.fused_optimizer[1])
    if dist.get_rank() == 0:
        warn_of_dense_tables(planned.dense)


def _give_own_kernel(table: Table) -> None:
    applied = applied_in_backward(table.parameter)
    assert applied is not None
    tell_in_backward(table.parameter, {**applied[1], USE_ONE_TBE_PER_TABLE: True})


def _shard(model: nn.Module, planned: _Planned, options: ShardingOptions) -> None:
    """Replace the collections of a model by their sharded form, under all of their names, with the same weights."""
    tables, group, device = planned.tables, options.group, options.device
    # Further names of collections, each with the first: sharding replaces a module under the first only.
    first = {id(model.get_submodule(table.module)): table.module for table in tables}
    every = model.named_modules(remove_duplicate=False)
    aliases = {name: first[id(module)] for name, module in every if first.get(id(module), name) != name}
    initial = _initial_weights(model, tables)
    before = dict(model.named_parameters())
    if any(table.parameter.is_meta for table in tables):
        seed_shards(group.rank())
    for name in {table.module for table in tables}:
        tell_where_weights_are(model.get_submodule(name))
    with _local_world_size(options.local_world_size):
        sharders = training_sharders(codecs_of(options.quantized_comms, device))
        env = ShardingEnv.from_process_group(group)
        DistributedModelParallel(model, env, device, planned.plan, sharders, init_data_parallel=False)
    for alias, name in aliases.items():
        parent, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_submodule(name))
    if left_out := [table.path for table in find_tables(model)]:
        raise ValueError(f"the ShardingPlan leaves out {some(left_out)}: give every table of the model a place in it.")
    accept_some_tables(model)
    for name, weights in initial.items():
        model.get_submodule(name).load_state_dict(weights, strict=False)
    lookups = [lookup for module in table_modules(model).values() for lookup in lookups_of(module)]
    for lookup in lookups:  # data-parallel tables on meta, which each rank has initialized, start as those of rank 0
        for weight in lookup.parameters() if isinstance(lookup, DistributedDataParallel) else ():
            dist.broadcast(weight.data, group_src=0, group=group)
    _let_go(model, tables)
    kept = set(map(id, model.parameters()))
    for name, parameter in before.items():  # an earlier optimizer may still have those that were replaced
        if id(parameter) not in kept:
            vars(parameter)[NAME_BEFORE] = name


def _annotate(
    model: nn.Module,
    planned: _Planned,
    trained: Mapping[str, Mapping[str, Rule]],
    quantized_comms: QCommsConfig | None,
    asked_for: Mapping[str, Any],
) -> None:
    """Note at each sharded module what other code has to know of its tables, on ranks without a shard of them too."""
    for name, of_module in trained.items():
        tables = [table for table in planned.tables if table.module == name]
        replicated = sorted(table.name for table in tables if table in planned.replicas)
        sharded: Any = model.get_submodule(name)
        sharded.trained_in_backward = of_module
        sharded.rate_per_table = bool(asked_for["rate_per_table"])
        sharded.frozen_tables = [table.name for table in tables if not table.parameter.requires_grad]
        sharded.quantized_comms = quantized_comms
        sharded.asked_for = asked_for
        sharded.second_part = planned.second.get(name, [])
        sharded.kept_plan = planned.plan.get_plan_for_module(name), replicated
        leave_out_frozen(sharded)


def seed_shards(rank: int) -> None:
    """Seed this rank's generator, by its present state, for the values of shards of tables on `meta`.

    TorchRec draws a rank's shards from the rank's generator, and generators are often alike on all ranks.
    """
    torch.manual_seed(int(torch.randint(1 << 62, ())) + rank)


def _initial_weights(model: nn.Module, tables: list[Table]) -> dict[str, dict[str, nn.Parameter]]:
    """Return weights that TorchRec would initialize anew, by collection; managed collisions begin without ids.

    Each rank initializes its shards of tables on `meta`.
    """
    managed = [part for part in model.modules() if isinstance(part, ManagedCollisionModule)]
    without = {id(weight) for part in managed for weight in part.parameters()}  # MPZCH keeps its ids in parameters
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name in sorted({table.module for table in tables}):
        for key, weight in model.get_submodule(name).named_parameters():
            if id(weight) not in without and not weight.is_meta:
                found.setdefault(name, {})[key] = weight
    return found


def _let_go(model: nn.Module, tables: list[Table]) -> None:
    """Let nothing hold the whole weights of tables that are sharded now; only what the user made may."""
    for module in table_modules(model).values():
        forget_whole_weights(module)
    for table in tables:
        forget_in_backward(table.parameter)


def _check_sharded_modules(model: nn.Module, asked_for: Mapping[str, Any], comms: QCommsConfig | None) -> None:
    """Refuse modules that were sharded with other codecs, and warn of other options: they keep what they have."""
    asked_for = dict(asked_for)
    if not isinstance(asked_for["sharding"], (str, Mapping)):  # planners and plans are hard to compare
        del asked_for["sharding"]
    for name, module in sharded_modules(model).items():
        own = getattr(module, "quantized_comms", None)
        if own != comms:
            to_give = "codecs to the sharder that made it"
            if own is not None:
                to_give = f"strategy the same ({own.forward_precision} and, for gradients, {own.backward_precision})"
            raise ValueError(
                f"quantized_comms: {name} is sharded already, and goes on sending what it was sharded with. Give the "
                f"{to_give}, or make the module anew for this strategy."
            )
        before = getattr(module, "asked_for", asked_for)
        ignored = [f"{option}=" for option, value in asked_for.items() if value is not None and value != before[option]]
        if ignored and dist.get_rank() == 0:
            warnings.warn(
                f"{some(ignored)} of this strategy has no effect on {name}: it was sharded for another strategy, and "
                "goes on as that one has asked. Make the module anew for this one, and load a checkpoint.",
                stacklevel=2,
            )


def _watch(model: nn.Module) -> None:
    """Let modules go by names as the unsharded ones do, be copied, and count writes to their tables."""
    divide_means_by_name(model)
    answer_in_config_order(model)
    find_features_by_name(model)
    accept_some_tables(model)
    watch_tables(model)
    refuse_gradients(model)
    leave_shards_behind(model)


def make_plan(
    model: nn.Module,
    sharding: Sharding,
    group: dist.ProcessGroup,
    device: torch.device,
    local_world_size: int,
    quantized_comms: QCommsConfig | None,
    whole: Collection[str] = (),
) -> ShardingPlan:
    """Return the plan that `shard_tables`, with the same options, shards a model by; all ranks of the group call it.

    Tables in `whole` become data-parallel, unless the plan or planner is the user's. Raise a ValueError as there.
    """
    tables = find_tables(model)
    check_sharding(sharding, tables, device)
    check_quantized_comms(quantized_comms, tables, device)
    codecs, named = codecs_of(quantized_comms, device), _named_types(sharding, tables)
    if isinstance(sharding, ShardingPlan):
        plan = sharding
    elif named is None:
        plan = plan_on_rank_zero(sharding, model, group, training_sharders(codecs))
    else:
        kinds = {**named, **dict.fromkeys(whole, DATA_PARALLEL)}
        constraints = _constraints(kinds, tables, group.size(), device.type)
        topology = Topology(group.size(), device.type, local_world_size=local_world_size)
        planner, sharders = make_planner(topology, constraints, codecs)
        plan = plan_on_rank_zero(planner, model, group, sharders)
    check_plan(quantized_comms, plan)
    return plan


def _refuse_optimizers_within_ddp(dense: list[Table]) -> None:
    """Refuse data-parallel tables whose collection has an optimizer of its own: TorchRec runs it within DDP."""
    if found := [table for table in dense if table.trains_itself]:
        sharding = {table.name: "table_wise" for table in found}
        raise ValueError(
            f"{some(table.path for table in found)}: data-parallel (or with a dense kernel), and of a "
            f"{found[0].sharder.module_type.__name__}, whose optimizer TorchRec would then run within "
            "DistributedDataParallel: on CUDA alone, and without its state in checkpoints. Shard them otherwise "
            f"(sharding={sharding}), or take an EmbeddingBagCollection with a fused_optimizer of the strategy."
        )


def _refuse_sequences_as_bags(dense: list[Table], replicas: list[Table], device: torch.device) -> None:
    """Refuse tables of an EmbeddingCollection whose dense kernel FBGEMM lets pool on a CPU, whatever it is told."""
    if found := [table for table in dense if table.is_pooled_if_whole(device)]:
        paths = some([table.path for table in found])
        sharding = {table.name: "table_wise" for table in found}
        sharding |= {table.name: DATA_PARALLEL for table in dense if table not in (*found, *replicas)}
        raise ValueError(
            f"{paths}: data-parallel (or with a dense kernel), and of an EmbeddingCollection, for which TorchRec "
            "makes bags on a CPU: a row for each sample, and not for each id. On a CPU its tables must be sharded "
            f"otherwise, and need a fused_optimizer: sharding={sharding}."
        )


def _refuse_pruning_and_shared_weights(model: nn.Module, tables: list[Table]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection)):
            raise ValueError(
                f"{name} is an {type(module).__name__}: it prunes by what its own shards count, and TorchRec's default "
                "sharders, which the strategy takes, would shard the tables inside it only. Shard it in "
                f"configure_model, with the {type(module).__name__}Sharder of torchrec.distributed.itep_embeddingbag."
            )
    owned = [named for name, module in model.named_modules() for named in module.named_parameters(name, recurse=False)]
    for table in tables:
        names = [name for name, weight in owned if weight is table.parameter]
        if len(names) > 1:
            raise ValueError(
                f"the weight of table {table.path} is that of several parts of the model: {some(names)}. "
                "Sharded, the table would have a weight of its own, and they would no longer be one. Give one table "
                "all the features (feature_names), or look up with it what the other part reads."
            )


def _refuse_other_shapes(model: nn.Module, tables: list[Table]) -> None:
    """Refuse weights of another shape than their configs have, by which TorchRec shards."""
    configs = {name: configs_by_table(model.get_submodule(name)) for name in {table.module for table in tables}}
    wrong = []
    for table in tables:
        config, shape = configs[table.module][table.name], tuple(table.parameter.shape)
        if shape != (expected := (config.num_embeddings, config.embedding_dim)):
            wrong.append(f"the weight of table {table.path} has the shape {shape}, and its config the shape {expected}")
    if wrong:
        raise ValueError(
            f"{some(wrong, 3)}. Give the weight the rows and columns of the config (num_embeddings, embedding_dim), or "
            "make the collection with a config for this weight."
        )


class ShardedStateNames(set[str]):
    """Names that DDP must leave alone: a model's sharded parameters and all buffers of its sharded modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, module in sharded_modules(model).items():
            self.update(module.sharded_parameter_names(name), dict(module.named_buffers(name)))
        self._within = tuple(f"{name}." for name in sharded_modules(model))
        self._averaged = dict(model.named_parameters()).keys() - self

    @override
    def __reduce__(self) -> tuple[type[set[str]], tuple[list[str]]]:
        return set, (sorted(self),)  # a copied model gets its own names before DDP wraps it

    @override
    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        # Managed collision modules register buffers, which differ by rank, in their first lookup.
        return isinstance(name, str) and name.startswith(self._within) and name not in self._averaged


def check_sharding_types(sharding: Sharding) -> Sharding:
    """Return `sharding`, checked as far as possible without tables and a device; raise a TypeError or ValueError."""
    kinds = [sharding] if isinstance(sharding, str) else sharding.values() if isinstance(sharding, Mapping) else []
    known = [kind.value for kind in ShardingType]
    for kind in kinds:
        check_known("sharding type", kind, known, "sharding: ")
    is_planner = callable(getattr(sharding, "plan", None))
    if not (sharding is None or is_planner or isinstance(sharding, (str, Mapping, ShardingPlan))):
        raise TypeError(
            "sharding is None, a sharding type, {'table': type}, a planner or a ShardingPlan, "
            f"got {type(sharding).__name__}: {sharding!r}."
        )
    return sharding


def check_sharding(sharding: Sharding, tables: list[Table], device: torch.device) -> None:
    """Refuse, with a ValueError, tables that an unsharded model does not have, and types that a device lacks."""
    known = {table.name: table for table in tables}
    for name, kind in (_named_types(sharding, tables) or {}).items():
        check_known("table", name, known, "sharding: ")
        possible = sharding_types(known[name].sharder, device.type)
        if kind not in possible:
            raise ValueError(
                f"sharding of table {name!r}: {kind!r} is not possible on {device.type}. Possible there: "
                f"{', '.join(possible)}."
            )


def _named_types(sharding: Sharding, tables: list[Table]) -> dict[str, str] | None:
    """Return the sharding types that the user has named, by table; None where the plan or planner is the user's."""
    if isinstance(sharding, str):
        return dict.fromkeys((table.name for table in tables), sharding)
    if isinstance(sharding, Mapping):
        return {str(name): kind for name, kind in sharding.items()}
    return {} if sharding is None else None


def _constraints(
    kinds: Mapping[str, str], tables: list[Table], num_ranks: int, device: str
) -> dict[str, ParameterConstraints]:
    """Return constraints for a planner, by table: tables in `kinds` get that type, the others stay sharded."""
    constraints = {}
    for table in tables:
        kind, dim = kinds.get(table.name), table.parameter.shape[1]
        # The planner estimates costs with a default batch size: it must not choose by itself what is replicated, or
        # left to the dense optimizer. Row-wise is for tables that are named so, and where nothing else is possible.
        own = [one for one in table.sharder.sharding_types(device) if one != DATA_PARALLEL] or [_ROW_WISE]
        # A shard for each rank, where the columns divide: FBGEMM wants widths that are multiples of 4.
        divides = kind in _COLUMN_WISE and num_ranks > 1 and dim % (4 * num_ranks) == 0
        constraints[table.name] = ParameterConstraints(
            sharding_types=own if kind is None else [kind], min_partition=dim // num_ranks if divides else None
        )
    return constraints


@contextmanager
def _local_world_size(local_world_size: int) -> Iterator[None]:
    """Tell TorchRec how many ranks share a host; Lightning's own launcher does not set the variable."""
    # Not by `mock.patch.dict`: it writes the whole environment, which threads of gloo and NCCL may be reading.
    name = "LOCAL_WORLD_SIZE"
    before = os.environ.get(name)
    os.environ[name] = str(local_world_size)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
