"""This rank's shards of tables, by kernel."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ..compat.torchrec import group_of, kernels_in, lookups_of
from ..text import some
from .combined_optimizer import DenseAndFused, optimizer_name
from .frozen import frozen_tables
from .ignored_options import sharded_by_user
from .replicas import ReplicaKernel
from .supported_modules import DATA_PARALLEL, DENSE, sharded_modules, spec_of, table_modules, tables_of
from .table import Rule


@dataclass(frozen=True, slots=True)
class TableShard:
    """A shard of a table."""

    name: str  # name of the table's weight in the `state_dict` of the unsharded model
    shape: tuple[int, int]  # rows and columns of the unsharded table
    first_row: int  # the shard's first row in the unsharded table
    first_column: int  # the shard's first column in the unsharded table
    weight: Tensor  # the shard, `(rows, columns)`: a view of the kernel's memory


@dataclass(frozen=True, slots=True)
class KernelShards:
    """The shards that one kernel looks up, in the kernel's order."""

    kernel: Any
    shards: list[TableShard]
    table_of_feature: list[int]  # feature of the kernel -> index of its shard
    is_replicated: bool  # whether every rank has the same shards (data-parallel tables)
    receives_ids: bool  # whether ids come from other ranks, in memory that is not reused; else they are the batch's

    @property
    def is_fused(self) -> bool:
        """Whether the kernel's backward writes exactly the rows that its lookup reads (replicas write others)."""
        return isinstance(self.kernel, SplitTableBatchedEmbeddingBagsCodegen)

    def states(self) -> list[dict[str, Tensor]]:
        """Return views of each shard's optimizer state by kind, `(rows, columns)` or row-wise `(rows,)`."""
        if isinstance(self.kernel, ReplicaKernel):
            of_replicas = [replica for optimizer in self.kernel.optimizers for replica in optimizer.state.values()]
            return [{kind.rpartition(".")[2]: state for kind, state in kinds.items()} for kinds in of_replicas]
        kinds = self.kernel.split_optimizer_states() if self.is_fused else []
        return [
            {f"momentum{number}": state for number, state in enumerate(of_table, start=1)}
            for of_table in kinds or [[]] * len(self.shards)
        ]

    def write_back_cache(self) -> None:
        """Write the rows of a UVM cache back to their tables, on the current stream, without a sync."""
        if self.is_fused:
            self.kernel.flush()


def check_assigned_rows(model: nn.Module) -> None:
    """Raise a ValueError for sharded modules of which nobody can say which id has which row: MPZCH; all ranks alike."""
    for name, module in sharded_modules(model).items():
        others = {
            type(one).__name__
            for one in module.modules()
            if isinstance(one, ManagedCollisionModule) and not isinstance(one, MCHManagedCollisionModule)
        }
        if others:
            raise ValueError(
                f"{name!r} gives rows to ids by {some(sorted(others))}. Only the ids of MCHManagedCollisionModule can "
                "be sent."
            )


def kernel_shards(model: nn.Module) -> list[KernelShards]:
    """Return this rank's shards of all tables, by kernel; raise a ValueError for rows that cannot be read by number."""
    found = []
    for name, module in table_modules(model).items():
        plan = module.module_sharding_plan
        paths = {path.split(".")[-2]: path for path, _ in module.named_parameters(name)}
        group = group_of(module)
        has_other_ranks = group is not None and group.size() > 1
        for lookup in lookups_of(module):
            for tables, kernel in kernels_in(lookup):
                shards = _shards(name, paths, kernel, tables)
                features = [number for number, table in enumerate(tables) for _ in table.feature_names]
                is_replicated = plan[tables[0].name].sharding_type == DATA_PARALLEL
                receives_ids = has_other_ranks and not is_replicated
                found.append(KernelShards(kernel, shards, features, is_replicated, receives_ids))
    return found


def table_names(model: nn.Module) -> dict[str, str]:
    """Return the name of the weight in `state_dict` -> name of the table, of all sharded tables; alike on all ranks."""
    return {
        f"{name}.{key}": key.split(".")[-2]
        for name, module in table_modules(model).items()
        for key in module.state_dict()
        if key.split(".")[-2] in module.module_sharding_plan
    }


def weights_in_backward(model: nn.Module) -> set[str]:
    """Return the names in `state_dict` of the tables that a backward updates, replicas too; alike on all ranks."""
    found = set()
    for name, module in table_modules(model).items():
        plan = module.module_sharding_plan
        owned = {key for key, _ in in_backward_optimizer_filter(module.named_parameters())}  # by the dense optimizer
        for key in module.state_dict():
            how = plan.get(key.split(".")[-2])
            is_dense = how is not None and how.compute_kernel == DENSE
            if how is not None and not (is_dense and (how.sharding_type != DATA_PARALLEL or key in owned)):
                found.add(f"{name}.{key}")
    return found


def _shards(name: str, paths: Mapping[str, str], kernel: Any, tables: list[Any]) -> list[TableShard]:
    if not isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen):
        kernels = ", ".join(sorted({one.compute_kernel.value for one in tables}))
        raise ValueError(
            f"the tables {', '.join(table.name for table in tables)} of {name!r} have compute kernel {kernels}, whose "
            f"rows cannot be read by number. Shard them with {EmbeddingComputeKernel.FUSED.value}."
        )
    shards = []
    for table, weight in zip(tables, kernel.split_embedding_weights(), strict=True):
        offsets = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        shape = (table.num_embeddings, table.embedding_dim)
        shards.append(TableShard(paths[table.name], shape, offsets[0], offsets[1], weight))
    return shards


def kernel_optimizers(model: nn.Module) -> dict[str, str]:
    """Return module.table -> optimizer and rate of a kernel of this rank, of tables without a known fused optimizer."""
    found: dict[str, str] = {}
    for name, module in sharded_modules(model).items():
        if spec_of(module) is None:
            continue
        known = getattr(module, "trained_in_backward", None) or {}
        for tables, kernel in (one for lookup in lookups_of(tables_of(module)) for one in kernels_in(lookup)):
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                trainer = f"{kernel.optimizer.name} of its kernel, lr {kernel.get_learning_rate():g}"
                found |= {f"{name}.{table.name}": trainer for table in tables if table.name not in known}
    return found


def table_lines(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    of_kernels: Mapping[str, str],
    *,
    scheduled: bool,
    moved: bool,
) -> list[str]:
    """Return a log line by module, sharding and optimizer; `moved`: a scheduler changes the rates of fused tables.

    `of_kernels` has the `kernel_optimizers` of all ranks.
    """
    owner_of = {id(p): optimizer_name(one) for one in optimizers for group in one.param_groups for p in group["params"]}
    lines, users = [], sharded_by_user(model)
    for name, module in sharded_modules(model).items():
        collection = module if spec_of(module) is None else tables_of(module)
        plan: Mapping[str, Any] = getattr(collection, "module_sharding_plan", None) or {}
        weights = {path.split(".")[-2]: weight for path, weight in collection.named_parameters() if "." in path}
        fused: dict[str, Rule] | None = getattr(module, "trained_in_backward", None)  # None: its user sharded it
        alike: dict[tuple[str, str], list[str]] = {}
        for table, parameter in plan.items():
            is_second = table in getattr(module, "second_part", ())
            kind = "table_wise, second part" if is_second else parameter.sharding_type
            trainer = "nothing (requires_grad=False)"
            if table in frozen_tables(module):
                pass
            elif owner := owner_of.get(id(weights.get(table))):
                trainer = f"{owner} of configure_optimizers"
            elif rule := (fused or {}).get(table):
                kind = "replicated" if kind == DATA_PARALLEL else kind
                constant = "constant: the scheduler does not move it (see combined_optimizer)"
                how = f", {'moved by the scheduler' if moved else constant}" if scheduled else ""
                trainer = f"{rule.name} in the backward, lr {rule.rate:g}{how}"
            elif not (fused and table in fused) and parameter.compute_kernel != DENSE:
                trainer = of_kernels.get(f"{name}.{table}", "the optimizer of its kernel")
            alike.setdefault((kind, trainer), []).append(table)
        lines += [f"{name}: {some(same, 3)}: {kind}, trained by {trainer}" for (kind, trainer), same in alike.items()]
        if name in users:
            lines.append(f"{name}: sharded by {users[name]}: no option of the strategy for tables has an effect on it")
    return lines


def dense_lines(optimizers: Iterable[Optimizer]) -> list[str]:
    """Return a log line for each optimizer of `configure_optimizers`, with the rates of its groups."""
    lines = []
    for one in optimizers:
        groups = (one.dense if isinstance(one, DenseAndFused) else one).param_groups
        # On CUDA the host would wait for a rate that is a tensor.
        rates = [group["lr"] for group in groups if not getattr(group["lr"], "is_cuda", False)]
        lines.append(f"dense part: trained by {optimizer_name(one)}, lr {some(f'{float(rate):g}' for rate in rates)}")
    return lines
