"""Sharded modules: their parts (one for each sharding type), the lookups and kernels of a part, and what they note.

`tables` is a ShardedEmbeddingBagCollection or a ShardedEmbeddingCollection. Other sharded modules contain one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingTable
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_OF_BOTH = ("_env", "_input_dists", "_lookups", "_output_dists")
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "EmbeddingBagCollection": ("_device",),
    "EmbeddingCollection": ("_device",),
    "ShardedEmbeddingBagCollection": (
        *(*_OF_BOTH, "_embedding_bag_configs", "_is_weighted", "_has_mean_pooling_callback", "_sharding_types"),
        *("_enabled_feature_score_auto_collection", "_features_order", "_free_features_storage_early"),
        *("_has_features_permute", "_has_uninitialized_input_dist", "sharding_type_to_sharding_infos"),
    ),
    "ShardedEmbeddingCollection": (
        *(*_OF_BOTH, "_embedding_configs", "_sharding_type_to_sharding", "_use_index_dedup"),
    ),
    "ShardedFeatureProcessedEmbeddingBagCollection": ("_embedding_bag_collection", "_feature_processors"),
    "ShardedManagedCollisionEmbeddingBagCollection": ("_embedding_module", "_evict", "_managed_collision_collection"),
    "ShardedManagedCollisionEmbeddingCollection": ("_embedding_module", "_evict", "_managed_collision_collection"),
    "GroupedPooledEmbeddingsLookup": ("_emb_modules", "grouped_configs"),
    "GroupedEmbeddingsLookup": ("_emb_modules", "grouped_configs"),
    "BatchedDenseEmbeddingBag": ("_emb_module", "emb_module"),
    "EmbeddingFusedOptimizer": ("_emb_module",),
    "SparseFeaturesDist": ("_dist",),
    "TableBatchedEmbeddingSlice": (
        *("_embedding_dim", "_end_offset", "_num_embeddings", "_original_tensor", "_start_offset"),
    ),
}

SliceT = TypeVar("SliceT", bound=TableBatchedEmbeddingSlice)


# -- where a module keeps its tables ---------------------------------------------------------------------------------


def bags_within(module: Any) -> Any:
    """Return the sharded EmbeddingBagCollection of a module with feature processors."""
    return module._embedding_bag_collection


def feature_processors_of(module: Any) -> nn.Module:
    """Return what sets the weights of ids, before the lookup of a module with feature processors."""
    processors: nn.Module = module._feature_processors
    return processors


def tables_within(module: Any) -> Any:
    """Return the sharded collection of a managed collision module."""
    return module._embedding_module


def collisions_within(module: Any) -> Any:
    """Return the part of a managed collision module that exchanges ids, and gives them rows."""
    return module._managed_collision_collection


def configs_of_bags(tables: Any) -> list[Any]:
    """Return the configs of all tables of a sharded EmbeddingBagCollection."""
    return list(tables._embedding_bag_configs)


def configs_of_sequences(tables: Any) -> list[Any]:
    """Return the configs of all tables of a sharded EmbeddingCollection."""
    return list(tables._embedding_configs)


def shardings_of_bags(tables: Any) -> list[str]:
    """Return the sharding type of each part of a sharded EmbeddingBagCollection, the same on all ranks."""
    return list(tables._sharding_types)


def shardings_of_sequences(tables: Any) -> list[str]:
    """Return the sharding type of each part of a sharded EmbeddingCollection, the same on all ranks."""
    return list(tables._sharding_type_to_sharding)


def group_of(tables: Any) -> dist.ProcessGroup | None:
    """Return the group over which tables are sharded; None without processes."""
    env = tables._env
    group: dist.ProcessGroup | None = getattr(env, "sharding_pg", env.process_group)  # of 2D sharding, a part of all
    return group


# -- options ---------------------------------------------------------------------------------------------------------


def is_weighted(bags: Any) -> bool:
    """Whether a sharded EmbeddingBagCollection takes weights of ids."""
    return bool(bags._is_weighted)


def has_index_dedup(sequences: Any) -> bool:
    """Whether a sharded EmbeddingCollection sends each id of a feature once (`use_index_dedup`)."""
    return bool(sequences._use_index_dedup)


def divide_no_means(tables: Any) -> None:
    """Let a sharded collection return sums where kernels sum for a mean; others are means."""
    tables._has_mean_pooling_callback = False


def forget_whole_weights(tables: Any) -> None:
    """Let a sharded collection forget the weights from which it was sharded; it asks for shapes if it shards anew.

    Only an EmbeddingBagCollection keeps them.
    """
    for info in chain.from_iterable(getattr(tables, "sharding_type_to_sharding_infos", {}).values()):
        info.param = info.param.detach().to("meta")


def tell_where_weights_are(unsharded: nn.Module) -> None:
    """Let the unsharded collections within a module say in `device` whether they have weights on `meta`.

    TorchRec copies all weights of a collection into the shards, unless its `device` equals `torch.device("meta")`. A
    string, which torch takes as well, equals no device; and some of a collection's weights may be elsewhere.
    """
    for part in unsharded.modules():
        if isinstance(part, (EmbeddingBagCollection, EmbeddingCollection)):
            on_meta = any(weight.is_meta for weight in part.parameters())
            part._device = torch.device("meta" if on_meta else part._device)


# -- ids -------------------------------------------------------------------------------------------------------------


def input_dists_of(module: Any) -> list[Any]:
    """Return the input dists of a module's parts; of tables, or of what exchanges ids in their place."""
    return list(module._input_dists)


def all_to_all_of(input_dist: Any) -> KJTAllToAll | None:
    """Return the all-to-all by which an input dist sends ids; None if it sends none (data-parallel tables)."""
    found = getattr(input_dist, "_dist", None)
    return found if isinstance(found, KJTAllToAll) else None


def features_order(bags: Any) -> list[int] | None:
    """Return the order in which `input_dist` sends the features of an input; None if it does more than order them.

    In its first call it makes the parts' input dists. Features in order already have no order either.
    """
    if (
        not bags._has_features_permute
        or bags._has_uninitialized_input_dist
        or bags._enabled_feature_score_auto_collection
        or bags._free_features_storage_early
    ):
        return None
    order: list[int] = bags._features_order
    return order


def input_dist_unordered(bags: Any, context: Any, features: KeyedJaggedTensor) -> Awaitable[Any]:
    """Do what `input_dist` does in a module with a `features_order`, except for ordering the features."""
    unordered = _Seen(bags, _has_features_permute=False)
    return type(bags).input_dist(unordered, context, features)


# -- lookups ---------------------------------------------------------------------------------------------------------


def lookups_of(tables: Any) -> list[Any]:
    """Return the modules that look up the parts of tables; replicated tables are in a DistributedDataParallel."""
    lookups: list[Any] = tables._lookups
    return lookups


def kernels_in(lookup: Any) -> Iterator[tuple[list[ShardedEmbeddingTable], Any]]:
    """Yield the kernels of a lookup, each after its shards of tables: FBGEMM's, or a module in the place of one."""
    own = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
    for group, holder in zip(own.grouped_configs, own._emb_modules, strict=True):
        yield group.embedding_tables, holder.emb_module


def replace_kernel(lookup: Any, number: int, kernel: nn.Module) -> None:
    """Let a lookup use another kernel in the place of the one with this number (`kernels_in`)."""
    lookup._emb_modules[number]._emb_module = kernel


def kernel_of_optimizer(fused_optimizer: Any) -> Any:
    """Return the kernel whose backward applies a fused optimizer; None for optimizers of other kinds."""
    return getattr(fused_optimizer, "_emb_module", None)


def output_dists_of(tables: Any) -> list[nn.Module]:
    """Return what sends the embeddings of each part."""
    dists: list[nn.Module] = tables._output_dists
    return dists


def compute_parts(tables: Any, context: Any, dist_input: KJTList, parts: Collection[int]) -> Sequence[Any]:
    """Look up some parts of tables, as `compute` does with all; return the embeddings by part, of these alone."""
    lookups = [lookup if part in parts else _NO_LOOKUP for part, lookup in enumerate(tables._lookups)]
    found: Sequence[Any] = type(tables).compute(_Seen(tables, _lookups=lookups), context, dist_input)
    return found


def start_output_dist(tables: Any, context: Any, part: int, embeddings: Tensor) -> Awaitable[Tensor]:
    """Send the embeddings of one part, as `output_dist` does with each."""
    return tables._output_dists[part](embeddings, context.sharding_contexts[part])


def assembled(tables: Any, context: Any, started: list[Awaitable[Tensor]]) -> LazyAwaitable[Any]:
    """Return what `output_dist` returns, from the parts' embeddings that `start_output_dist` has sent."""
    passed_on = _Seen(tables, _output_dists=[_pass_on] * len(started))
    return type(tables).output_dist(passed_on, context, started)


def _pass_on(started: Awaitable[Tensor], context: Any) -> Awaitable[Tensor]:
    return started


class _Seen:
    """Tables as one of their methods sees them: `other` attributes stand before their own, which stay as they are.

    The two alternatives are worse: a method's own attribute replaced while it runs is seen by hooks and threads, and
    a copy of the method would have to follow TorchRec in what it makes of embeddings (VBE, sequences, fused 2D).
    """

    def __init__(self, tables: Any, **other: Any) -> None:
        vars(self).update(other, seen_tables=tables)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["seen_tables"], name)


class _NoLookup:
    """Replaces the lookup of a part that is not run now, and its embeddings."""

    def __call__(self, features: KeyedJaggedTensor) -> "_NoLookup":
        return self

    def view(self, *shape: int) -> "_NoLookup":
        return self


_NO_LOOKUP = _NoLookup()


# -- weights ---------------------------------------------------------------------------------------------------------


def same_slice(kind: type[SliceT], weight: TableBatchedEmbeddingSlice, *, needs_gradient: bool) -> SliceT:
    """Return a weight of class `kind` with the rows of another one in a kernel's memory.

    The kernel's weight always needs a gradient: without one, a lookup has no backward.
    """
    memory = weight._original_tensor if needs_gradient else weight._original_tensor.detach()
    new: SliceT = kind(memory, weight._start_offset, weight._end_offset, weight._num_embeddings, weight._embedding_dim)
    return new
