"""Inspect a sharded module: its kernels, fused optimizers and tables; TorchRec's private names."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from ..schedules import WeightOwner
from ..versions import check_names
from .replicas import ReplicaOptimizer
from .supported_modules import SUPPORTED_MODULES, TABLE_TYPES, owners_of, spec_of, tables_of
from .table import Rule

R = TypeVar("R")
SetRates: TypeAlias = Callable[[], None]  # passes the scheduler's current learning rates to the kernels

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "ShardedEmbeddingBagCollection": (
        *("_embedding_bag_configs", "_env", "_input_dists", "_is_weighted", "_lookups", "_output_dists"),
        *("_enabled_feature_score_auto_collection", "_features_order", "_free_features_storage_early"),
        *("_has_features_permute", "_has_mean_pooling_callback", "_has_uninitialized_input_dist", "_sharding_types"),
    ),
    "ShardedEmbeddingCollection": (
        *("_embedding_configs", "_env", "_input_dists", "_lookups", "_output_dists", "_sharding_type_to_sharding"),
        "_use_index_dedup",
    ),
    "ShardedFeatureProcessedEmbeddingBagCollection": ("_embedding_bag_collection", "_feature_processors"),
    "ShardedManagedCollisionEmbeddingBagCollection": ("_embedding_module", "_managed_collision_collection"),
    "ShardedManagedCollisionEmbeddingCollection": ("_embedding_module", "_managed_collision_collection"),
    "BatchedDenseEmbeddingBag": ("_emb_module",),
    "EmbeddingFusedOptimizer": ("_emb_module",),
    "TableBatchedEmbeddingSlice": (
        *("_embedding_dim", "_end_offset", "_num_embeddings", "_original_tensor", "_start_offset"),
    ),
    "GroupedPooledEmbeddingsLookup": ("_emb_modules",),
    "GroupedEmbeddingsLookup": ("_emb_modules",),
    "NoWait": ("_obj",),
    "SparseFeaturesDist": ("_dist",),
    "KeyedJaggedTensor": ("_inverse_indices", "_jt_dict", "_length_per_key", "_lengths", "_values", "_weights"),
    "KJTSplitsAllToAllMeta": ("_input",),
}
"""Class or module of TorchRec -> private names that `tables` and `sparse` use; no other folder uses any."""


def check_torchrec(module: nn.Module) -> None:
    """Raise an ImportError if a sharded module lacks a private name that this package uses."""
    owners = {kind.__name__: module for kind in SUPPORTED_MODULES if isinstance(module, kind)}
    check_names("torchrec", PRIVATE_NAMES, owners)
    if owners:
        tables = tables_of(module)
        owners = {kind.__name__: tables for kind in TABLE_TYPES if isinstance(tables, kind)}
    check_names("torchrec", PRIVATE_NAMES, owners)


def read_once(read: Callable[[Any], list[R]]) -> Callable[[Any], list[R]]:
    """Cache the results of a function by module; a module's shards do not change."""
    known: dict[int, list[R]] = {}  # a WeakKeyDictionary would take twice the time, a dozen times in a step

    @functools.wraps(read)
    def read_or_remember(module: Any) -> list[R]:
        found = known.get(id(module))
        if found is None:
            found = known[id(module)] = read(module)
            weakref.finalize(module, known.pop, id(module)).atexit = False
        return found

    return read_or_remember


owners_of_parts = read_once(owners_of)


@read_once
def keys_in_backward(module: Any) -> list[tuple[int, int, str]]:
    """Return (part, key within the part's KeyedJaggedTensor, table) of each fused table whose first column is here."""
    found = []
    for part, owner in enumerate(owners_of_parts(module)):
        if owner is not WeightOwner.FUSED_BACKWARD:
            continue
        tables = (table for group in module._lookups[part].grouped_configs for table in group.embedding_tables)
        for key, table in enumerate(one for one in tables for _ in one.feature_names):
            if table.local_metadata is None or table.local_metadata.shard_offsets[1] == 0:
                found.append((part, key, table.name))
    return found


@read_once
def tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the fused kernels (TBEs) of a module on this rank; empty for modules of unknown kinds."""
    return [] if spec_of(module) is None else tbes_within(tables_of(module)._lookups)


@read_once
def _rate_memory(module: Any) -> list[Any]:
    return [tbe.learning_rate_tensor.numpy() for tbe in tbes(module)]


def rates_of(module: Any) -> list[float]:
    """Return the learning rate of each kernel of a module, from host memory, without operators or syncs."""
    return list(map(float, _rate_memory(module)))


def tbes_within(lookups: Iterable[nn.Module]) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the fused kernels (TBEs) within lookups, in order."""
    parts = [part for lookup in lookups for part in lookup.modules()]
    return [part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)]


@read_once
def kernel_parameters(module: Any) -> list[nn.Parameter]:
    """Return the parameters in a module's kernels, at which graphs end; the module's own are views of them."""
    lookups = [] if spec_of(module) is None else tables_of(module)._lookups
    parts = [part for lookup in lookups for part in lookup.modules()]
    return [own for part in parts for _, own in nn.Module.named_parameters(part, recurse=False)]


def clips_in_backward(module: Any) -> bool:
    """Return whether the kernels of a module clip all gradients of its fused tables (FBGEMM's `gradient_clipping`)."""
    trained: dict[str, Rule] | None = getattr(module, "trained_in_backward", None)
    if trained is None:  # its user sharded it
        return all(tbe.optimizer_args.gradient_clipping for tbe in tbes(module))
    return all(rule.clips for rule in trained.values())


@read_once
def caching_tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the kernels with tables in UVM and a cache on the device."""
    return [tbe for tbe in tbes(module) if tbe.lxu_cache_weights.numel()]


def forget_prefetched(module: Any) -> None:
    """Unlock and drop rows that kernels have prefetched but not looked up, on the current stream."""
    for tbe in tbes(module) if caching_tbes(module) else []:  # kernels without a cache also note prefetches
        for locations in tbe.lxu_cache_locations_list:
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(tbe.lxu_cache_locking_counter, locations)
        tbe.lxu_cache_locations_list.clear()
        tbe.timesteps_prefetched.clear()
        tbe.prefetched_info_list.clear()
        tbe.prefetch_stream = None  # FBGEMM keeps the first one, but another strategy prefetches on a stream of its own


_LAST_LOOKUP = ("lxu_cache_locations", "_indices", "_offsets", "_vbe_B_offsets", "_vbe_max_B")
"""Attributes that a kernel sets in each lookup; the next backward uses them, also of another lookup (FBGEMM 1.8)."""


@contextmanager
def without_backward(module: Any) -> Iterator[None]:
    """Make lookups without a backward: at the end, unlock their cache rows and restore the earlier lookup's state."""
    kernels = [tbe for tbe in caching_tbes(module) if tbe.prefetch_pipeline]
    kept = [[getattr(tbe, name) for name in _LAST_LOOKUP] for tbe in kernels]
    try:
        yield
    finally:
        for tbe, values in zip(kernels, kept, strict=True):
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(tbe.lxu_cache_locking_counter, tbe.lxu_cache_locations)
            for name, value in zip(_LAST_LOOKUP, values, strict=True):
                setattr(tbe, name, value)


def kernel_of(fused_optimizer: Any) -> SplitTableBatchedEmbeddingBagsCodegen | ReplicaOptimizer | None:
    """Return the kernel of a fused optimizer, which has iteration count and learning rate; None for unknown kinds."""
    if isinstance(fused_optimizer, ReplicaOptimizer):
        return fused_optimizer
    kernel = getattr(fused_optimizer, "_emb_module", None)
    return kernel if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) else None
