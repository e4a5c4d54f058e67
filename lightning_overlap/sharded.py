"""One sharded module: the parts of what TorchRec does for it, so that each can run at a time of its own.

TorchRec names that start with an underscore occur in this file only (`PRIVATE_NAMES`; a test names each).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .stages import WeightOwner

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "ShardedEmbeddingBagCollection": ("_input_dists", "_lookups", "_output_dists", "_sharding_types"),
    "ShardedEmbeddingCollection": ("_input_dists", "_lookups", "_output_dists", "_sharding_type_to_sharding"),
    "EmbeddingFusedOptimizer": ("_emb_module",),
    "KJTAllToAll": ("_splits", "_stagger"),
    "SparseFeaturesDist": ("_dist",),
}
"""Private attributes of TorchRec that this file reads, by the object that has them."""

PIPELINED_TYPES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
"""Sharded modules whose lookup can start early; every other one runs its own forward."""

_KERNELS_WITHOUT_CACHE = (EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_UVM)


@dataclass(slots=True)
class ModuleInFlight:
    """One batch on its way through one module."""

    kjt: KeyedJaggedTensor
    context: Any = None
    splits: Any = None
    data: Any = None
    dist_input: KJTList | None = None
    outputs: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)
    rows: LazyAwaitable[Any] | None = None
    served: bool = False
    num_lookups: list[int] = field(default_factory=list)
    """What this batch added to the iteration count of each kernel."""


def sharded_modules(model: nn.Module) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
    """Return the outermost sharded modules of a model by name, each once."""
    found: dict[str, ShardedModule[Any, Any, Any, Any]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, ShardedModule) and not inside:
            found[name] = module
    return found


def owners_of(module: ShardedModule[Any, Any, Any, Any]) -> list[WeightOwner]:
    """Return who writes the tables of each of a module's shardings, in the order of its lookups.

    Read from the sharding plan, which is the same on all ranks: data-parallel tables and dense kernels are
    trained by the dense optimizer, all others by the fused backward.
    """
    shardings = (
        module._sharding_types
        if isinstance(module, ShardedEmbeddingBagCollection)
        else list(module._sharding_type_to_sharding)
    )
    dense = {
        parameter.sharding_type
        for parameter in module.module_sharding_plan.values()
        if parameter.compute_kernel == EmbeddingComputeKernel.DENSE.value
    }
    return [WeightOwner.DENSE_OPTIMIZER if sharding in dense else WeightOwner.FUSED_BACKWARD for sharding in shardings]


def look_up(module: Any, state: ModuleInFlight, owners: frozenset[WeightOwner]) -> None:
    """Run the part of a module's lookup whose tables belong to `owners`; assemble the rows once all parts ran.

    A module of one owner takes TorchRec's own `compute_and_output_dist`. A mixed one is looked up in two parts,
    each after the last writer of its tables.
    """
    assert state.dist_input is not None
    parts = parts_to_look_up(module, state, owners)
    num_parts = len(module._lookups)
    if len(parts) == num_parts:
        state.rows = module.compute_and_output_dist(state.context, state.dist_input)
        state.dist_input = None
        return
    lookups = module._lookups
    module._lookups = [lookup if part in parts else _NOTHING for part, lookup in enumerate(lookups)]
    try:
        rows = module.compute(state.context, state.dist_input)
    finally:
        module._lookups = lookups
    for part in parts:
        state.outputs[part] = module._output_dists[part](rows[part], state.context.sharding_contexts[part])
    if len(state.outputs) == num_parts:
        output_dists = module._output_dists
        module._output_dists = [_already_started] * num_parts
        try:
            state.rows = module.output_dist(state.context, [state.outputs[part] for part in range(num_parts)])
        finally:
            module._output_dists = output_dists
        state.outputs = {}
        state.dist_input = None


def tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The table-batched kernels of a module's own shards."""
    if not isinstance(module, PIPELINED_TYPES):
        return []
    parts = [part for lookup in module._lookups for part in lookup.modules()]
    return [part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)]


def kernel_of(fused_optimizer: Any) -> SplitTableBatchedEmbeddingBagsCodegen | None:
    """The table-batched kernel whose state a fused optimizer shows; None for kernels of other kinds."""
    kernel = getattr(fused_optimizer, "_emb_module", None)
    return kernel if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) else None


def lookup_counts(module: Any) -> list[int]:
    """Return the iteration count of each kernel, from its copy on the host: no sync."""
    return [int(tbe.iter_cpu) for tbe in tbes(module)]


def lookups_since(module: Any, counts: list[int]) -> list[int]:
    """Return what each kernel has counted since."""
    return [now - before for now, before in zip(lookup_counts(module), counts, strict=True)]


def parts_to_look_up(module: Any, state: ModuleInFlight, owners: frozenset[WeightOwner]) -> list[int]:
    """Return the parts of a module whose tables belong to `owners` and are still to be looked up."""
    return [part for part, owner in enumerate(owners_of(module)) if owner in owners and part not in state.outputs]


class _Nothing:
    """In the place of a lookup that is not run now, and of its rows."""

    def __call__(self, features: KeyedJaggedTensor) -> _Nothing:
        return self

    def view(self, *shape: int) -> _Nothing:
        return self


_NOTHING = _Nothing()


def _already_started(output: Awaitable[torch.Tensor], context: Any) -> Awaitable[torch.Tensor]:
    return output


@contextmanager
def splits_only(module: Any, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make a module's input dist describe its all-to-all of sizes instead of starting it, so it can be fused."""
    if group is None:
        yield
        return
    all_to_alls = [
        input_dist._dist
        for input_dist in module._input_dists
        if isinstance(getattr(input_dist, "_dist", None), KJTAllToAll)
    ]
    for all_to_all in all_to_alls:
        all_to_all.forward = partial(_describe_splits, all_to_all, group)
    try:
        yield
    finally:
        for all_to_all in all_to_alls:
            del all_to_all.forward


def _describe_splits(
    all_to_all: KJTAllToAll, group: dist.ProcessGroup, kjt: KeyedJaggedTensor
) -> KJTSplitsAllToAllMeta:
    """Return what an all-to-all of sizes would exchange. Source: `KJTAllToAllForward`, TorchRec 1.8."""
    splits, device = all_to_all._splits, kjt.device()
    first = sum(splits[: group.rank()])
    with torch.no_grad():
        input_splits = kjt.dist_splits(splits)
        per_rank = list(input_splits)
        if not kjt.variable_stride_per_key():
            per_rank.append([kjt.stride()] * group.size())
        sizes = torch.tensor(per_rank, dtype=torch.int64, pin_memory=device.type == "cuda")
        return KJTSplitsAllToAllMeta(
            pg=group,
            _input=kjt,
            splits=splits,
            splits_tensors=list(sizes.to(device, non_blocking=True).unbind()),
            input_splits=input_splits,
            input_tensors=kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=kjt.keys()[first : first + splits[group.rank()]],
            device=device,
            stagger=all_to_all._stagger,
        )


def why_never_early(module: Any) -> str | None:
    """Return why no lookup of a module may start early, or None."""
    if not isinstance(module, PIPELINED_TYPES):
        known = " and ".join(kind.__name__ for kind in PIPELINED_TYPES)
        return f"only {known} can start early, got {type(module).__name__}"
    # A cache hands out its slots in the forward and uses them in the backward: a lookup in between may evict them.
    kernels = {parameter.compute_kernel for parameter in module.module_sharding_plan.values()}
    cached = kernels - {kernel.value for kernel in _KERNELS_WITHOUT_CACHE}
    return (
        f"its tables have compute kernel {', '.join(sorted(cached))}, which keeps rows in a cache" if cached else None
    )
