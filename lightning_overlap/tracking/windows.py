"""Reading whole tables in bounded memory: some rows of some shards at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .copies import CopiedTable

CHUNK_BYTES = 64 << 20
"""Read at once, at most, but for rows that are larger."""


class Window(NamedTuple):
    """Some rows of one shard.

    Args:
        shard: Number of the shard among all shards of the rank.
        field: `WEIGHT`, or a kind of optimizer state.
        values: Of the shard, `(rows, columns)` or `(rows,)`, on any device.
        first: Of the rows.
        num_rows: How many.
    """

    shard: int
    field: str
    values: Tensor
    first: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """How much memory the rows take."""
        per_row = self.values.shape[1] if self.values.dim() > 1 else 1
        return self.num_rows * per_row * self.values.element_size()

    def read(self) -> CopiedTable:
        """Copy the rows to the host."""
        some = self.values.detach()[self.first : self.first + self.num_rows].to("cpu", copy=True)
        rows = torch.arange(self.first, self.first + self.num_rows)
        return CopiedTable(self.shard, self.field, rows, some.unsqueeze(1) if some.dim() == 1 else some)


def windows_of(shard: int, field: str, values: Tensor) -> Iterator[Window]:
    """Divide a shard, or a state of its optimizer, into windows of `CHUNK_BYTES` at most.

    Args:
        shard: Its number.
        field: `WEIGHT`, or a kind of optimizer state.
        values: `(rows, columns)` or `(rows,)`, on any device.
    """
    per_row = values.element_size() * (values.shape[1] if values.dim() > 1 else 1)
    at_once = max(1, CHUNK_BYTES // per_row)
    for first in range(0, values.shape[0], at_once):
        yield Window(shard, field, values, first, min(at_once, values.shape[0] - first))


def packed(windows: Iterable[Window]) -> list[list[Window]]:
    """Put windows together, in their order, as long as they take `CHUNK_BYTES` at most."""
    packs: list[list[Window]] = []
    free = 0
    for window in windows:
        if not packs or window.num_bytes > free:
            packs.append([])
            free = CHUNK_BYTES
        packs[-1].append(window)
        free -= window.num_bytes
    return packs
