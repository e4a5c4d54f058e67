"""Inspect a sharded module: its kernels, fused optimizers and tables."""

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from ..compat import fbgemm, torchrec
from ..compat.fbgemm import clips_gradients, has_cache, memory_of_rate
from ..compat.torchrec import kernel_of_optimizer, kernels_in, lookups_of
from ..schedules import WeightOwner
from ..versions import check_names
from .replicas import ReplicaOptimizer
from .supported_modules import SUPPORTED_MODULES, TABLE_TYPES, owners_of, spec_of, tables_of
from .table import Rule

R = TypeVar("R")
SetRates: TypeAlias = Callable[[], None]  # passes the scheduler's current learning rates to the kernels


def check_torchrec(module: nn.Module) -> None:
    """Raise an ImportError if a sharded module lacks a private name that this package uses."""
    owners = {kind.__name__: module for kind in SUPPORTED_MODULES if isinstance(module, kind)}
    check_names("torchrec", torchrec.PRIVATE_NAMES, owners)
    if owners:
        tables = tables_of(module)
        owners = {kind.__name__: tables for kind in TABLE_TYPES if isinstance(tables, kind)}
    check_names("torchrec", torchrec.PRIVATE_NAMES, owners)


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
        tables = (table for tables, _ in kernels_in(lookups_of(module)[part]) for table in tables)
        for key, table in enumerate(one for one in tables for _ in one.feature_names):
            if table.local_metadata is None or table.local_metadata.shard_offsets[1] == 0:
                found.append((part, key, table.name))
    return found


@read_once
def tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the fused kernels (TBEs) of a module on this rank; empty for modules of unknown kinds."""
    return [] if spec_of(module) is None else tbes_within(lookups_of(tables_of(module)))


@read_once
def _rate_memory(module: Any) -> list[Any]:
    return list(map(memory_of_rate, tbes(module)))


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
    lookups = [] if spec_of(module) is None else lookups_of(tables_of(module))
    parts = [part for lookup in lookups for part in lookup.modules()]
    return [own for part in parts for _, own in nn.Module.named_parameters(part, recurse=False)]


def clips_in_backward(module: Any) -> bool:
    """Return whether the kernels of a module clip all gradients of its fused tables (FBGEMM's `gradient_clipping`)."""
    trained: dict[str, Rule] | None = getattr(module, "trained_in_backward", None)
    if trained is None:  # its user sharded it
        return all(map(clips_gradients, tbes(module)))
    return all(rule.clips for rule in trained.values())


@read_once
def caching_tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the kernels with tables in UVM and a cache on the device."""
    return list(filter(has_cache, tbes(module)))


def forget_prefetched(module: Any) -> None:
    """Unlock and drop rows that kernels have prefetched but not looked up, on the current stream."""
    if caching_tbes(module):  # kernels without a cache also note prefetches
        fbgemm.forget_prefetched(tbes(module))


def without_backward(module: Any) -> AbstractContextManager[None]:
    """Make lookups without a backward: at the end, unlock their cache rows and restore the earlier lookup's state."""
    return fbgemm.without_backward(caching_tbes(module))


def kernel_of(fused_optimizer: Any) -> SplitTableBatchedEmbeddingBagsCodegen | ReplicaOptimizer | None:
    """Return the kernel of a fused optimizer, which has iteration count and learning rate; None for unknown kinds."""
    if isinstance(fused_optimizer, ReplicaOptimizer):
        return fused_optimizer
    kernel = kernel_of_optimizer(fused_optimizer)
    return kernel if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) else None
