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
    """Some rows of one shard that follow one another.

    Args:
        shard: Number of the shard among all shards of the rank.
        field: `WEIGHT`, or a kind of optimizer state.
        first: Number of the first row in the shard.
        values_ND: A view of the shard, `(rows, columns)`, on any device.
    """

    shard: int
    field: str
    first: int
    values_ND: Tensor

    def read(self) -> CopiedTable:
        """Copy the rows to the host; nobody may write them meanwhile."""
        rows_N = torch.arange(self.first, self.first + len(self.values_ND))
        return CopiedTable(self.shard, self.field, rows_N, self.values_ND.to("cpu", copy=True))


def windows_of(shard: int, field: str, values_RD: Tensor) -> Iterator[Window]:
    """Divide a shard, or a state of its optimizer, into windows of `CHUNK_BYTES` at most.

    Args:
        shard: Its number.
        field: `WEIGHT`, or a kind of optimizer state.
        values_RD: `(rows, columns)`, on any device.
    """
    at_once = max(1, CHUNK_BYTES // (values_RD.shape[1] * values_RD.element_size()))
    for first in range(0, len(values_RD), at_once):
        yield Window(shard, field, first, values_RD[first : first + at_once])


def packed(windows: Iterable[Window]) -> list[list[Window]]:
    """Put windows together, in their order, as long as they take `CHUNK_BYTES` at most."""
    packs: list[list[Window]] = []
    free = 0
    for window in windows:
        if not packs or window.values_ND.nbytes > free:
            packs.append([])
            free = CHUNK_BYTES
        packs[-1].append(window)
        free -= window.values_ND.nbytes
    return packs
