"""Reading whole tables in bounded memory: some rows of some shards at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def packs_of(shards: Iterable[Mapping[str, Tensor]]) -> list[list[Window]]:
    """Divide shards into windows, and put these together, in their order, as long as they take `CHUNK_BYTES` at most.

    Args:
        shards: The values and states of each shard by field, each `(rows, columns)`, on any device.
    """
    packs: list[list[Window]] = []
    free = 0
    for number, fields in enumerate(shards):
        for field, values_RD in fields.items():
            at_once = max(1, CHUNK_BYTES // (values_RD.shape[1] * values_RD.element_size()))
            for first in range(0, len(values_RD), at_once):
                window = Window(number, field, first, values_RD[first : first + at_once])
                if not packs or window.values_ND.nbytes > free:
                    packs.append([])
                    free = CHUNK_BYTES
                packs[-1].append(window)
                free -= window.values_ND.nbytes
    return packs
