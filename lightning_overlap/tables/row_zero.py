"""Let kernels on a CPU take row 0 for ids outside of their tables where FBGEMM itself raises an error."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..schedules import WeightOwner
from .supported_modules import spec_of, tables_of


def take_row_0_for_ids_outside(module: Any) -> list[RemovableHandle]:
    """Let the kernels of a sharded module take row 0 for every id outside, until the handles are removed.

    FBGEMM's fused kernels do so with every id but -1, which may stand for a pruned row. Its dense kernels
    (data-parallel tables, replicas) check no bounds and raise an error. A kernel's input is not changed in place.
    """
    kind, handles = spec_of(module), list[RemovableHandle]()
    if kind is None or kind.owner is WeightOwner.LOOKUP:  # managed collisions accept any ids
        return handles
    for wrapped in tables_of(module)._lookups:
        lookup = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        for group, part in zip(lookup.grouped_configs, lookup._emb_modules, strict=True):
            kernel = part.emb_module
            if not getattr(kernel, "use_cpu", False):
                continue
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                bound: Callable[..., Tensor | None] = _without_minus_one
            elif isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen):
                tables = zip(kernel.embedding_specs, group.embedding_tables, strict=True)
                bound = _Bounded([num_rows for (num_rows, _), table in tables for _ in table.feature_names])
            else:
                continue
            handles.append(kernel.register_forward_pre_hook(_with_ids(bound), with_kwargs=True))
    return handles


def _with_ids(bound: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """Return a hook that gives a kernel the ids that `bound` returns for its arguments, unless it returns None."""

    def hook(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("indices", "offsets"), args, strict=False)) | kwargs
        ids = bound(given["indices"], given["offsets"], given.get("batch_size_per_feature_per_rank"))
        if ids is None:
            return None
        return ((ids, *args[1:]), kwargs) if args else (args, {**kwargs, "indices": ids})

    return hook


def _without_minus_one(indices: Tensor, offsets: Tensor, batch_sizes: Any) -> Tensor | None:
    if not indices.numel() or indices.min().item() >= 0:
        return None
    return indices.masked_fill(indices == -1, 0)


class _Bounded:
    """Replaces ids outside of tables with these numbers of rows, by feature."""

    def __init__(self, num_rows: Sequence[int]) -> None:
        self._num_rows, self._fewest = torch.tensor(num_rows), min(num_rows)

    def __call__(self, indices: Tensor, offsets: Tensor, batch_sizes: Any) -> Tensor | None:
        if not indices.numel():
            return None
        ends = torch.aminmax(indices)
        if ends.min.item() >= 0 and ends.max.item() < self._fewest:
            return None
        if batch_sizes is None:
            batch_size = (offsets.numel() - 1) // len(self._num_rows)
            places = [batch_size * number for number in range(len(self._num_rows) + 1)]
        else:
            places = [0, *accumulate(sum(of_feature) for of_feature in batch_sizes)]
        num_rows_N = self._num_rows.repeat_interleave(offsets[places].diff().long())
        bounded = indices.clone()
        used = bounded[: len(num_rows_N)]
        used.masked_fill_((used < 0) | (used >= num_rows_N), 0)
        return bounded
