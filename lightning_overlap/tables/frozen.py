"""Frozen tables (requires_grad=False): no kernel computes their backward, as unsharded.

TorchRec's kernels know no frozen tables: they update what they are given, at a rate of 0. But a frozen table's fused
optimizer is like no trained table's (`apply_fused_optimizer`), so it shares a kernel with frozen tables only. The graph
of embeddings leaves such kernels out. What is sent in a backward has to be alike on all ranks, so a whole part of a
module (`lookups_of`) has a graph on all ranks, or on none: gradients of frozen tables are sent with those of trained
ones.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fused_embeddingbag import ShardedFusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import never_compiled
from ..compat.torchrec import kernels_in, lookups_of
from .sharded_module import read_once
from .supported_modules import DATA_PARALLEL, TABLE_TYPES, keeps_rows_in_cache, sharding_types_of, tables_of


def leave_out_frozen(module: nn.Module) -> None:
    """Let the lookups of a sharded collection have no graph at its frozen tables, from now on; all ranks call this.

    A lookup whose weights of ids are trained keeps its graph.
    """
    frozen = _left_out(module)
    if not frozen:
        return
    lookups = lookups_of(module)
    for part, is_frozen in enumerate(frozen_parts(module)):
        lookup = lookups[part]
        if isinstance(lookup, DistributedDataParallel):
            if not is_frozen:
                continue  # its reducer waits for a gradient of each kernel
            lookup = lookups[part] = lookup.module
        kernels = list(kernels_in(lookup))
        without = [kernel for tables, kernel in kernels if _all_in(frozen, tables)]
        for kernel in without:
            kernel.register_forward_hook(_leave_out, with_kwargs=True)
        if is_frozen:
            lookup.register_forward_hook(_detached)
        elif not is_frozen and kernels and len(without) == len(kernels):
            lookup.register_forward_hook(_EndsAt(without[0]))


def frozen_tables(module: Any) -> Collection[str]:
    """Return the tables of a sharded module that were frozen when the strategy sharded it; alike on all ranks.

    A FusedEmbeddingBagCollection trains its tables whatever `requires_grad` says.
    """
    return () if isinstance(module, ShardedFusedEmbeddingBagCollection) else getattr(module, "frozen_tables", ())


def trains_itself(model: nn.Module) -> bool:
    """Whether a model has sharded collections that were made with a fused optimizer; alike on all ranks."""
    return any(isinstance(module, ShardedFusedEmbeddingBagCollection) for module in model.modules())


@read_once
def frozen_parts(module: Any) -> list[bool]:
    """Return whether embeddings of a part have no graph: all of its tables are frozen; by part, alike on all ranks."""
    tables, frozen = tables_of(module), _left_out(module)
    trained = {how.sharding_type for name, how in tables.module_sharding_plan.items() if name not in frozen}
    return [sharding_type not in trained for sharding_type in sharding_types_of(tables)]


@read_once
def frozen_sent_parts(module: Any) -> list[int]:
    """Return the numbers of the parts in `frozen_parts` whose embeddings are sent between ranks, if there are any."""
    kinds = sharding_types_of(tables_of(module))
    return [part for part, is_frozen in enumerate(frozen_parts(module)) if is_frozen and kinds[part] != DATA_PARALLEL]


@read_once
def parts_trained_here(module: Any) -> list[bool]:
    """Return whether a kernel of this rank trains tables; by part."""
    frozen = _left_out(module)
    lookups = lookups_of(tables_of(module))
    return [any(not _all_in(frozen, tables) for tables, _ in kernels_in(lookup)) for lookup in lookups]


def _left_out(module: Any) -> set[str]:
    """Return the frozen tables of a module whose embeddings need no graph, alike on all ranks.

    None of modules with feature processors or managed collisions, whose lookups train or write something else, nor of
    FusedEmbeddingBagCollection and others that train their tables whatever `requires_grad` says. Nor tables whose
    kernels unlock or drop rows of a cache in the backward.
    """
    if type(module) not in TABLE_TYPES:
        return set()
    plan = module.module_sharding_plan
    return {name for name in getattr(module, "frozen_tables", ()) if not _needs_backward(plan[name])}


def _needs_backward(how: Any) -> bool:
    if how.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
        return bool(getattr(how.cache_params, "prefetch_pipeline", False))
    return keeps_rows_in_cache(how)


def _all_in(names: Collection[str], tables: Iterable[Any]) -> bool:
    return all(table.name in names for table in tables)


@never_compiled
def _leave_out(kernel: nn.Module, args: Any, kwargs: Mapping[str, Any], embeddings: Tensor) -> Tensor | None:
    weights = kwargs.get("per_sample_weights")  # TorchRec passes everything by name
    if weights is not None and weights.requires_grad:
        return None
    if kwargs.get("vbe_output") is not None:  # one tensor that all kernels of the part write, with one graph
        return None
    return embeddings.detach()


@never_compiled
def _detached(lookup: nn.Module, args: tuple[KeyedJaggedTensor], embeddings: Tensor) -> Tensor | None:
    """Detach what has a graph on ranks without kernels, and with `vbe_output`: they alone would send gradients."""
    weights = args[0].weights_or_none()
    return None if weights is not None and weights.requires_grad else embeddings.detach()


class _EndsAt:
    """Gives this rank's embeddings a graph too, because those of other ranks have one; it ends at a kernel's weight.

    Otherwise this rank would not take part in the all-to-all of the gradients. It is the weight at which the kernel's
    own graph would end: autograd knows the stream of this leaf (`Streams.hold_leaves`).
    """

    def __init__(self, kernel: nn.Module) -> None:
        self._kernel = kernel

    @never_compiled
    def __call__(self, lookup: nn.Module, args: tuple[KeyedJaggedTensor], embeddings: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled() or embeddings.requires_grad:
            return None
        leaf = next(weight for weight in self._kernel.parameters() if weight.requires_grad)
        ending: Tensor = _Ending.apply(leaf, [embeddings])  # type: ignore[no-untyped-call]
        return ending


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
