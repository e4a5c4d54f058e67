"""Find ids outside of their table, on the host in one pass over the ids; let kernels take row 0 for them."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.fbgemm import rows_of, runs_on_cpu
from ..compat.torch import never_compiled
from ..compat.torchrec import kernels_in, lookups_of
from ..schedules import WeightOwner
from .supported_modules import configs_of, spec_of, tables_of

OutOfRangeIds: TypeAlias = Literal["error", "warning", "fbgemm"]
"""Handling of ids outside of their table: raise an error; warn and continue like FBGEMM; or leave it to FBGEMM."""


def num_ids(kjt: KeyedJaggedTensor) -> list[int]:
    """Return `length_per_key()`, which computes the strides of all features even if it knows its result."""
    return kjt.length_per_key_or_none() or kjt.length_per_key()  # type: ignore[no-any-return]


class IdRanges:
    """The valid ids of one sharded module; any ids, with managed collisions or for modules of unknown kinds."""

    def __init__(self, module: Any) -> None:
        self._tables: dict[str, Any] = {}  # feature -> config of its smallest table
        kind = spec_of(module)
        if kind is not None and kind.owner is not WeightOwner.LOOKUP:
            for config in sorted(configs_of(tables_of(module)), key=lambda config: -config.num_embeddings):
                self._tables |= dict.fromkeys(config.feature_names, config)
        self._keys: list[str] = []
        self._fewest = 0  # rows of the smallest table of these keys
        self._last: dict[torch.dtype, Any] = {}  # last row by key; for features that no table reads, the largest number

    def first_outside(self, kjt: KeyedJaggedTensor) -> tuple[str, str] | None:
        """Return a feature with an id outside of its table and a description, or None; skip inputs on a device."""
        values = kjt.values()
        unsigned_of = {torch.int64: np.uint64, torch.int32: np.uint32}.get(values.dtype)
        if unsigned_of is None or values.device.type != "cpu" or not self._tables:
            return None
        keys = kjt.keys()
        if keys != self._keys:
            self._keys = list(keys)
            self._fewest = min((self._tables[key].num_embeddings for key in keys if key in self._tables), default=0)
            for dtype, unsigned in ((torch.int64, np.uint64), (torch.int32, np.uint32)):
                rows = [self._tables[key].num_embeddings if key in self._tables else None for key in keys]
                most, every = torch.iinfo(dtype).max, np.iinfo(unsigned).max
                self._last[dtype] = np.array([every if num is None else min(num - 1, most) for num in rows], unsigned)
        # Mostly all ids fit into the smallest table. Calls into NumPy would take 40 us of a step.
        if values.numel() and (ends := torch.aminmax(values)).min.item() >= 0 and ends.max.item() < self._fewest:
            return None
        counts, last = num_ids(kjt), self._last[values.dtype]
        starts = [0, *accumulate(counts)]
        filled = [place for place, count in enumerate(counts) if count] if 0 in counts else None
        if filled == []:
            return None
        # As unsigned numbers, negative ids are large.
        ids = values.numpy()[: starts[-1]].view(unsigned_of)
        first = starts[:-1] if filled is None else [starts[place] for place in filled]
        outside = (np.maximum.reduceat(ids, first) > (last if filled is None else last[filled])).tolist()
        if True not in outside:
            return None
        place = outside.index(True)
        at = place if filled is None else filled[place]
        [wrong] = np.nonzero(ids[starts[at] : starts[at + 1]] > last[at])
        example, table = values[int(starts[at] + wrong[0])].item(), self._tables[keys[at]]
        padding = ". A negative id is no padding: leave it out of values and lengths" if example < 0 else ""
        return keys[at], (
            f"feature {keys[at]!r} has id {example}, but table {table.name!r} has rows 0 to {table.num_embeddings - 1} "
            f"({len(wrong)} of {counts[at]} ids of the feature are outside){padding}"
        )


def take_row_0_for_ids_outside(module: Any) -> list[RemovableHandle]:
    """Let the kernels of a sharded module take row 0 for every id outside, until the handles are removed.

    FBGEMM's fused kernels do so with every id but -1, which may stand for a pruned row. Its dense kernels
    (data-parallel tables, replicas) check no bounds and raise an error. A kernel's input is not changed in place.
    """
    kind, handles = spec_of(module), list[RemovableHandle]()
    if kind is None or kind.owner is WeightOwner.LOOKUP:  # managed collisions accept any ids
        return handles
    for lookup in lookups_of(tables_of(module)):
        for tables, kernel in kernels_in(lookup):
            if not runs_on_cpu(kernel):
                continue
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                bound: Callable[..., Tensor | None] = _without_minus_one
            elif isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen):
                rows = zip(rows_of(kernel), tables, strict=True)
                bound = _Bounded([num_rows for num_rows, table in rows for _ in table.feature_names])
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

    return never_compiled(hook)


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
