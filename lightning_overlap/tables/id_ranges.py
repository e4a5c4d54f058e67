"""Find ids outside of their table, on the host in one pass over the ids."""

from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..schedules import WeightOwner
from .supported_modules import configs_of, spec_of, tables_of

OutOfRangeIds: TypeAlias = Literal["error", "warning", "fbgemm"]
"""Handling of ids outside of their table: raise an error; warn and continue like FBGEMM; or leave it to FBGEMM."""


def num_ids(kjt: KeyedJaggedTensor) -> list[int]:
    """Return `length_per_key()`, which computes the strides of all features even if it knows its result."""
    return kjt._length_per_key or kjt.length_per_key()  # type: ignore[no-any-return]


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
