"""Refuse tables that FBGEMM's kernels cannot look up or train, by name and before any table is sharded.

Without this a kernel fails in the first step, or on the ranks of the table alone while the others wait.
"""

from collections.abc import Iterable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection, get_ec_index_dedup
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.types import DataType

from ..compat.torch import AppliedOptimizer
from ..compat.torchrec import has_index_dedup
from ..schedules import WeightOwner
from ..text import some
from .optimizer_checks import FusedOptimizer, check_fused_optimizer
from .sharded_module import tbes
from .supported_modules import (
    DATA_PARALLEL,
    DENSE,
    configs_of,
    hands_out_rows,
    sharded_modules,
    spec_of,
    table_modules,
    tables_of,
)
from .table import Table, find_tables, kind_of

MANAGED = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
_BAGS = (EmbeddingBagCollectionInterface,)
_WITH_CONFIGS = (*_BAGS, EmbeddingCollectionInterface)
_OF_SEQUENCES = (EmbeddingCollection, ManagedCollisionEmbeddingCollection)
_ON_CPU = (DataType.FP32, DataType.FP16)  # types of tables that FBGEMM 1.8 looks up on a CPU

ROW_WISE_PLAN = (
    "a ShardingPlan with row_wise(compute_kernel='fused') for each of its tables (torchrec.distributed.sharding_plan)"
)
"""How to shard managed collision modules; on a CPU TorchRec takes the dense kernel unless another one is named."""


def check_kernels(
    model: nn.Module, tables: list[Table], plan: ShardingPlan, device: torch.device, fused: AppliedOptimizer | None
) -> None:
    """Raise a ValueError if a plan asks for kernels that a table cannot have; all ranks raise alike.

    `fused` is the optimizer of tables that have none.
    """
    planned = [(table, how) for table in tables if (how := table.planned(plan)) is not None]
    _refuse_widths(planned, device)
    _refuse_dense_managed(
        table.path for table, how in planned if table.sharder.module_type in MANAGED and how.compute_kernel == DENSE
    )
    if device.type == "cpu":
        configs = {
            name: configs_by_table(model.get_submodule(name)) for name in {table.module: None for table in tables}
        }
        _refuse_types({table.path: configs[table.module][table.name].data_type for table in tables})
        _refuse_empty([(table, how, configs[table.module][table.name]) for table, how in planned], fused)
        of_sequences = [table.path for table in tables if table.sharder.module_type in _OF_SEQUENCES]
        _refuse_dedup(of_sequences if get_ec_index_dedup() else [])


def check_kernels_of_sharded(model: nn.Module, device: torch.device) -> None:
    """The same for modules that their user has sharded."""
    for name, module in sharded_modules(model).items():
        plan: Any = getattr(tables_of(module), "module_sharding_plan", {}) if hands_out_rows(module) else {}
        _refuse_dense_managed(f"{name}.{table}" for table, how in plan.items() if how.compute_kernel == DENSE)
    modules = table_modules(model).items() if device.type == "cpu" else ()
    for name, module in modules:
        _refuse_types({f"{name}.{config.name}": config.data_type for config in configs_of(module)})
        if isinstance(module, ShardedEmbeddingCollection) and has_index_dedup(module):
            _refuse_dedup([f"{name}.{config.name}" for config in configs_of(module)])


def refuse_reset_rows(model: nn.Module, fused: FusedOptimizer | None) -> None:
    """Refuse to train managed collisions on a CPU with an optimizer whose state FBGEMM cannot reset there.

    A row that gets another id is reset, its RowWiseAdagrad state too: FBGEMM has no `reset_weight_momentum` for a CPU.
    The first step in which an id is evicted would end in its error. `fused` is the optimizer of tables that have none.
    """
    default, found = check_fused_optimizer(fused), []
    for table in find_tables(model):
        optimizer = table.fused_optimizer or default
        trains = table.parameter.requires_grad and table.sharder.module_type in MANAGED
        if trains and optimizer is not None and kind_of(optimizer[0]) is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            found.append(table.path)
    for name, module in sharded_modules(model).items():
        kind = spec_of(module)
        resets = kind is not None and kind.owner is WeightOwner.LOOKUP
        if resets and any(kernel.optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD for kernel in tbes(module)):
            found += [f"{name}.{config.name}" for config in configs_of(tables_of(module))]
    if found:
        raise ValueError(
            f"{some(found)}: RowWiseAdagrad cannot train tables of managed collision modules on a CPU: a row that gets "
            "another id is reset together with its optimizer state, and FBGEMM has no reset_weight_momentum for a CPU. "
            "Use (torch.optim.SGD, {'lr': ...}) or (torch.optim.Adagrad, {'lr': ...}), or train on CUDA."
        )


def _refuse_widths(planned: list[tuple[Table, ParameterSharding]], device: torch.device) -> None:
    wrong: dict[str, tuple[Table, int]] = {}
    for table, how in planned:
        shards = [] if how.sharding_spec is None else how.sharding_spec.shards
        widths = [shard.shard_sizes[1] for shard in shards] or [table.parameter.shape[1]]
        odd = next((width for width in widths if width % 4), None)
        if how.compute_kernel != DENSE and odd is not None:
            wrong[table.path] = table, odd
    if not wrong:
        return
    whole = {table.name: DATA_PARALLEL for table, _ in wrong.values() if not table.is_pooled_if_whole(device)}
    dense = f", or leave it whole, to the optimizer of configure_optimizers: sharding={whole}" if whole else ""
    raise ValueError(
        f"{some(f'{path} (a shard with {odd} columns)' for path, (_, odd) in wrong.items())}: FBGEMM's fused kernels "
        "take multiples of 4. Make embedding_dim a multiple of 4, and of 4 for each shard if columns are "
        f"sharded{dense}."
    )


def _refuse_dense_managed(paths: Iterable[str]) -> None:
    if found := some(paths):
        raise ValueError(
            f"{found}: the plan gives tables of a managed collision module the dense kernel, which cannot reset rows "
            f"that get other ids. Pass {ROW_WISE_PLAN}."
        )


def _refuse_empty(planned: list[tuple[Table, ParameterSharding, Any]], fused: AppliedOptimizer | None) -> None:
    """Refuse plans under which a kernel of a rank has no row: FBGEMM takes it for one of a GPU."""
    kernels: dict[Any, list[tuple[Table, int]]] = {}  # kernel of a rank -> its tables, with their rows there
    for table, how, config in planned:
        # What TorchRec puts into one kernel. A table of an EmbeddingCollection has no pooling.
        pooling, optimizer = getattr(config, "pooling", None), repr(table.fused_optimizer or fused)
        alike = table.module, how.sharding_type, how.compute_kernel, config.data_type, pooling, optimizer
        for shard in [] if how.sharding_spec is None else how.sharding_spec.shards:
            kernels.setdefault((alike, shard.placement.rank()), []).append((table, shard.shard_sizes[0]))
    wrong: dict[str, tuple[Table, int]] = {}
    for (_, rank), shards in sorted(kernels.items(), key=lambda one: one[0][1]):
        if not any(num_rows for _, num_rows in shards):
            wrong |= {table.path: (table, rank) for table, _ in shards if table.path not in wrong}
    if wrong:
        found = some(
            f"{path} ({table.parameter.shape[0]} rows, none on rank {rank})" for path, (table, rank) in wrong.items()
        )
        sharding = {table.name: "table_wise" for table, _ in wrong.values()}
        raise ValueError(
            f"{found}: too few rows to be divided among the ranks, of which each takes equally many until none are "
            f"left; on a CPU FBGEMM cannot train a rank's kernel without rows. Use sharding={sharding}, let "
            "replicate_tables hold small tables whole on every rank, or train on fewer ranks."
        )


def configs_by_table(collection: nn.Module) -> dict[str, Any]:
    """Return table -> its config; its type may differ from that of TorchRec's unsharded table."""
    parts = [part for part in collection.modules() if isinstance(part, _WITH_CONFIGS)]
    configs = [one.embedding_bag_configs() if isinstance(one, _BAGS) else one.embedding_configs() for one in parts]
    return {config.name: config for of_part in configs for config in of_part}


def _refuse_types(types: dict[str, DataType]) -> None:
    if wrong := some(f"{path} ({kind})" for path, kind in types.items() if kind not in _ON_CPU):
        raise ValueError(
            f"{wrong}: on a CPU FBGEMM looks up tables of DataType.FP32 and DataType.FP16 only. Set one of them as the "
            "data_type of the table's config, or train on CUDA."
        )


def _refuse_dedup(paths: list[str]) -> None:
    if paths:
        raise ValueError(
            f"{some(paths)}: set_ec_index_dedup(True), or use_index_dedup=True of a sharder, is for CUDA only: FBGEMM "
            "has no jagged_unique_indices for a CPU. Call set_ec_index_dedup(False) before fit, and leave "
            "use_index_dedup out."
        )
