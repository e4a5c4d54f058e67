"""The kinds of sharded modules: where each keeps its tables, and the last writer of the tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule, ShardingType

from ..compat import torchrec
from ..schedules import WeightOwner
from ..text import some

TABLE_TYPES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)  # other kinds contain such a module


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A kind of sharded modules."""

    tables: Callable[[Any], Any] | None = None  # returns the sharded collection of the tables; None: the module itself
    exchange: Callable[[Any], Any] | None = None  # returns what has the input dists; None: the module itself
    owner: WeightOwner | None = None  # the last writer of the looked-up weights; None: by each table's compute kernel
    feature_processors: Callable[[Any], nn.Module] | None = None  # returns what runs before the lookup, if anything


_MANAGED_COLLISION = ModuleSpec(torchrec.tables_within, torchrec.collisions_within, WeightOwner.LOOKUP)
SUPPORTED_MODULES: Mapping[type, ModuleSpec] = {
    ShardedEmbeddingBagCollection: ModuleSpec(),
    ShardedEmbeddingCollection: ModuleSpec(),
    # The dense optimizer owns the position weights; the tables are written by it or earlier, by the backward.
    ShardedFeatureProcessedEmbeddingBagCollection: ModuleSpec(
        torchrec.bags_within,
        torchrec.bags_within,
        WeightOwner.DENSE_OPTIMIZER,
        torchrec.feature_processors_of,
    ),
    # The lookup assigns rows to new ids and counts ids.
    ShardedManagedCollisionEmbeddingBagCollection: _MANAGED_COLLISION,
    ShardedManagedCollisionEmbeddingCollection: _MANAGED_COLLISION,
}
"""Sharded modules whose stages can start early; other sharded modules run their own forward."""

DATA_PARALLEL, DENSE = ShardingType.DATA_PARALLEL.value, EmbeddingComputeKernel.DENSE.value
_WITHOUT_CACHE = (DENSE, EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM.value)


def spec_of(module: nn.Module) -> ModuleSpec | None:
    """Return the spec of a module's class or nearest base class; None for an unknown kind."""
    return next((SUPPORTED_MODULES[cls] for cls in type(module).__mro__ if cls in SUPPORTED_MODULES), None)


def tables_of(module: Any) -> Any:
    """Return the sharded collection with the tables of a module of a known kind: the module, or a submodule."""
    kind = spec_of(module)
    assert kind is not None, f"{type(module).__name__} is of no known kind"
    return kind.tables(module) if kind.tables else module


def configs_of(tables: Any) -> list[Any]:
    """Return the configs of the tables of a sharded collection."""
    is_pooled = isinstance(tables, ShardedEmbeddingBagCollection)
    return torchrec.configs_of_bags(tables) if is_pooled else torchrec.configs_of_sequences(tables)


def holds_sequences(module: Any) -> bool:
    """Return whether a module returns an embedding for each id instead of pooled embeddings."""
    return spec_of(module) is not None and isinstance(tables_of(module), ShardedEmbeddingCollection)


def processor_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer of a model's feature processors that checkpoints have; alike on all ranks, but for values.

    Each rank's processors see the features of its own tables, or its own samples, so their buffers may differ by rank.
    """
    found: dict[str, torch.Tensor] = {}
    for module in sharded_modules(model).values():
        kind = spec_of(module)
        if kind is None or kind.feature_processors is None:
            continue
        processors = kind.feature_processors(module)
        of_model = [name for name, one in model.named_modules() if one is processors][:1]
        saved = processors.state_dict()
        found |= {f"{of_model[0]}.{name}": one for name, one in processors.named_buffers() if name in saved}
    return found


def input_dists_of(module: Any) -> list[Any]:
    """Return the input dists of a module of a known kind, one for each sharding."""
    kind = spec_of(module)
    assert kind is not None
    return torchrec.input_dists_of(kind.exchange(module) if kind.exchange else module)


def sharded_modules(model: nn.Module) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
    """Return the outermost sharded modules of a model by name, each once."""
    return outermost(model, lambda module: isinstance(module, ShardedModule))


def outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """Return the wanted modules of a model that are not inside another wanted module, by name, each once."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_wanted(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def table_modules(model: nn.Module) -> dict[str, Any]:
    """Return all sharded collections with tables by name, each once, also inside other kinds of modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TABLE_TYPES)}


def has_model_parallel_tables(model: nn.Module) -> bool:
    """Return whether embeddings of any table are sent between ranks."""
    return {one.sharding_type for _, one in _planned(model)} != {DATA_PARALLEL}


def tables_in_dense_shards(model: nn.Module) -> list[str]:
    """Return the sharded tables whose shards are trained by each rank's dense optimizer."""
    return [path for path, one in _planned(model) if one.compute_kernel == DENSE and one.sharding_type != DATA_PARALLEL]


def _planned(model: nn.Module) -> list[tuple[str, Any]]:
    modules = table_modules(model).items()
    return [(f"{name}.{table}", one) for name, module in modules for table, one in module.module_sharding_plan.items()]


def hands_out_rows(model: nn.Module) -> bool:
    """Return whether a model has sharded modules that assign rows to ids (managed collisions)."""
    kinds = map(spec_of, sharded_modules(model).values())
    return any(kind is not None and kind.owner is WeightOwner.LOOKUP for kind in kinds)


def owners_of(module: ShardedModule[Any, Any, Any, Any]) -> list[WeightOwner]:
    """Return the last writer of the weights that a module's lookup reads, by sharding; the same on all ranks."""
    kind, tables = spec_of(module), tables_of(module)
    shardings = sharding_types_of(tables)
    if kind is not None and kind.owner is not None:
        return [kind.owner] * len(shardings)
    fused = {tables.module_sharding_plan[name].sharding_type for name in tables_in_backward(tables)}
    return [WeightOwner.FUSED_BACKWARD if sharding in fused else WeightOwner.DENSE_OPTIMIZER for sharding in shardings]


def tables_in_backward(module: ShardedModule[Any, Any, Any, Any]) -> list[str]:
    """Return the tables in shardings that the fused backward owns (`owners_of`), the same on all ranks."""
    plan = module.module_sharding_plan
    dense = {one.sharding_type for one in plan.values() if one.compute_kernel == DENSE}
    return [name for name, one in plan.items() if one.sharding_type not in dense]


def sharding_types_of(tables: Any) -> list[str]:
    """Return the sharding type of each of a sharded collection's lookups and output dists."""
    is_pooled = isinstance(tables, ShardedEmbeddingBagCollection)
    return torchrec.shardings_of_bags(tables) if is_pooled else torchrec.shardings_of_sequences(tables)


def ids_fit_32_bits(module: Any) -> bool:
    """Return whether every id of a module's sharded tables fits 32 bits; the same on all ranks."""
    kind = spec_of(module)
    if kind is None or kind.owner is WeightOwner.LOOKUP:  # managed collisions accept any ids
        return False
    specs = [parameter.sharding_spec for parameter in tables_of(module).module_sharding_plan.values()]
    shards = [shard for spec in specs if spec is not None for shard in spec.shards]
    return all(shard.shard_offsets[0] + shard.shard_sizes[0] <= torch.iinfo(torch.int32).max for shard in shards)


def why_never_early(module: Any, group: dist.ProcessGroup | None = None, *, prefetches: bool = False) -> str | None:
    """Return why no stage may start early in `group` (None: one rank), or None; `prefetches`: the mode fills caches."""
    kind = spec_of(module)
    if kind is None:
        known = ", ".join(sorted(cls.__name__ for cls in SUPPORTED_MODULES))
        return f"only {known} can start early, got {type(module).__name__}"
    cached = _why_cached(tables_of(module), prefetches and kind.owner is not WeightOwner.LOOKUP)
    if cached is not None:
        return cached
    if kind.feature_processors and list(kind.feature_processors(module).buffers()):
        return "its feature processors have buffers, which an early lookup might change too early"
    own = torchrec.group_of(tables_of(module))
    if own is None:
        return None
    ranks = dist.get_process_group_ranks(own)
    everyone = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    if ranks == everyone:
        return None
    return f"its tables are sharded over ranks {ranks}, not over all ranks {everyone} (2D sharding or another group)"


def keeps_rows_in_cache(planned: Any) -> bool:
    """Return whether the kernel of a table, whose `ParameterSharding` this is, keeps rows in a cache."""
    return planned.compute_kernel not in _WITHOUT_CACHE


def _why_cached(tables: Any, prefetches: bool) -> str | None:
    """Return why an early lookup may evict rows from a cache that a backward needs, or None; a prefetch locks them."""
    plan = tables.module_sharding_plan
    cached = {table: parameter for table, parameter in plan.items() if keeps_rows_in_cache(parameter)}
    if not cached:
        return None
    kernels = {parameter.compute_kernel for parameter in cached.values()}
    reason = f"its tables have compute kernel {', '.join(sorted(kernels))}, which keeps rows in a cache"
    if not prefetches or kernels != {EmbeddingComputeKernel.FUSED_UVM_CACHING.value}:
        return reason
    unlocked = some(name for name, one in cached.items() if not getattr(one.cache_params, "prefetch_pipeline", False))
    return f"{reason}, and the plan's cache_params of {unlocked} lack prefetch_pipeline" if unlocked else None
