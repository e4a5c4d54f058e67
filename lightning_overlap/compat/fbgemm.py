"""FBGEMM's private names: the memory, counts, rates and caches of the kernels (TBEs) that look up tables.

A fused kernel updates its tables in the backward. A dense one leaves their gradient to an optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

FusedKernel: TypeAlias = SplitTableBatchedEmbeddingBagsCodegen
DenseKernel: TypeAlias = DenseTableBatchedEmbeddingBagsCodegen

_LAST_LOOKUP = ("lxu_cache_locations", "_indices", "_offsets", "_vbe_B_offsets", "_vbe_max_B")
_AHEAD = ("lxu_cache_locations_list", "timesteps_prefetched", "prefetched_info_list")
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "SplitTableBatchedEmbeddingBagsCodegen": (
        *("iter", "iter_cpu", "learning_rate_tensor", "optimizer_args", "weights_host", "weights_dev", "weights_uvm"),
        *("lxu_cache_weights", "lxu_cache_locking_counter", "prefetch_pipeline", "prefetch_stream", "use_cpu"),
        "D_offsets",
        *(*_LAST_LOOKUP, *_AHEAD),
    ),
    "DenseTableBatchedEmbeddingBagsCodegen": ("D_offsets", "embedding_specs", "use_cpu", "weights"),
}
"""By the class that has them. FBGEMM documents none of these attributes."""


# -- memory and arguments --------------------------------------------------------------------------------------------


def memory_of(kernel: FusedKernel) -> list[Tensor]:
    """Return the tensors with the weights of a fused kernel: on the host, on the device, in UVM; none is empty."""
    return [weights for weights in (kernel.weights_host, kernel.weights_dev, kernel.weights_uvm) if weights.numel()]


def runs_on_cpu(kernel: Any) -> bool:
    """Whether a kernel, or another module in its place, is FBGEMM's for a CPU."""
    return bool(getattr(kernel, "use_cpu", False))


def rows_of(kernel: DenseKernel) -> list[int]:
    """Return the number of rows of each table of a dense kernel."""
    return [num_rows for num_rows, _ in kernel.embedding_specs]


def no_features(kernel: FusedKernel | DenseKernel) -> Tensor:
    """Return the `feature_requires_grad` of a lookup without gradients of weights of ids.

    `(num_features,)`, int32, zeros, on the kernel's device. The kernel's backward computes these gradients for every
    lookup with weights, also where the weights require none; with zeros it updates the same rows to the same bits.
    """
    ends_of_columns: Tensor = kernel.D_offsets  # of each feature, after a 0
    return torch.zeros(ends_of_columns.numel() - 1, dtype=torch.int32, device=ends_of_columns.device)


def clips_gradients(kernel: FusedKernel) -> bool:
    """Whether the update of a fused kernel clips gradients (`gradient_clipping`)."""
    return bool(kernel.optimizer_args.gradient_clipping)


class SharingKernel(DenseTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """A dense kernel with all state of another one, `dense`: its parameter, too."""

    def __init__(self, dense: DenseKernel) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(vars(dense))  # not by the constructor, which would draw weights a second time

    def look_up_in(self, leaf: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Do what a lookup does, with a leaf, `(num_weights,)`, in the place of the parameter."""
        self.__dict__["weights"] = leaf  # hides the module's parameter
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        finally:
            del self.__dict__["weights"]


# -- counts and rates ------------------------------------------------------------------------------------------------


def lookup_counts(kernels: Sequence[Any]) -> list[int]:
    """Return how many lookups with gradients each kernel counts, from its copy on the host, without a sync."""
    return [int(kernel.iter_cpu) for kernel in kernels]


def count_on_device(kernel: FusedKernel) -> Tensor:
    """Return the count of lookups that a kernel's update reads, `(1,)`, int64, on its device; a lookup writes it."""
    count: Tensor = kernel.iter
    return count


def uncount(kernels: Sequence[Any], num_lookups: Sequence[int]) -> None:
    """Subtract lookups from the count of each kernel, on the current stream."""
    with torch.no_grad():
        for kernel, num in zip(kernels, num_lookups, strict=True):
            if num:
                kernel.iter.sub_(num)
                kernel.iter_cpu.sub_(num)


def set_count(kernel: Any, num_lookups: float) -> None:
    """Set the count of a kernel, on the current stream."""
    kernel.iter.fill_(num_lookups)
    kernel.iter_cpu.fill_(num_lookups)


def memory_of_rate(kernel: FusedKernel) -> Any:
    """Return the memory with the learning rate of a kernel's next lookup: a NumPy array `()` on the host."""
    return kernel.learning_rate_tensor.numpy()


# -- the cache of tables in UVM --------------------------------------------------------------------------------------


def has_cache(kernel: FusedKernel) -> bool:
    """Whether a kernel has tables in UVM, with a cache on the device."""
    return bool(kernel.lxu_cache_weights.numel())


def locks_rows(kernel: FusedKernel) -> bool:
    """Whether a kernel locks the rows in its cache from their prefetch until their backward (`prefetch_pipeline`)."""
    return bool(kernel.prefetch_pipeline)


def forget_prefetched(kernels: Sequence[FusedKernel]) -> None:
    """Unlock and drop rows that kernels have prefetched but not looked up, on the current stream."""
    for kernel in kernels:
        for locations in kernel.lxu_cache_locations_list:
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(kernel.lxu_cache_locking_counter, locations)
        for name in _AHEAD:
            getattr(kernel, name).clear()
        kernel.prefetch_stream = None  # FBGEMM keeps the first one, but another run prefetches on a stream of its own


@contextmanager
def without_backward(kernels: Sequence[FusedKernel]) -> Iterator[None]:
    """Make lookups without a backward: at the end, unlock their cache rows and restore the earlier lookup's state.

    A kernel that locks rows notes its last lookup for the next backward, also if it is another one's (FBGEMM 1.8).
    """
    locking = [kernel for kernel in kernels if has_cache(kernel) and locks_rows(kernel)]
    kept = [[getattr(kernel, name) for name in _LAST_LOOKUP] for kernel in locking]
    try:
        yield
    finally:
        for kernel, values in zip(locking, kept, strict=True):
            locations = kernel.lxu_cache_locations
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(kernel.lxu_cache_locking_counter, locations)
            for name, value in zip(_LAST_LOOKUP, values, strict=True):
                setattr(kernel, name, value)
