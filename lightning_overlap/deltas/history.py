"""What a sink has got of a run after one of its checkpoints: rows that a resumed training has to send again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .parts import WEIGHT, PartError, PartName, decode
from .sink import DeltaSink


def parse_names(names: Iterable[str]) -> list[PartName]:
    """Return the names that are those of chunks, sorted."""
    return sorted(found for name in names if (found := PartName.parse(name)) is not None)


def written_since(names: Iterable[PartName], acknowledged: tuple[int, int]) -> list[PartName] | None:
    """Return the chunks that were written after a cut, of its own generation and of later ones.

    Args:
        names: Of all chunks that the sink holds.
        acknowledged: The newest cut that all ranks were known to have written when a checkpoint was saved.

    Returns:
        None where the sink does not hold that cut any more: then nobody knows what replicas have applied since.
    """
    names = list(names)
    if all(name.cut != acknowledged for name in names):
        return None
    return [name for name in names if name.cut > acknowledged]


def rows_in(sink: DeltaSink, names: Iterable[PartName], run: str) -> dict[str, Tensor] | None:
    """Return which rows of which tables some chunks hold.

    Args:
        sink: Holds them.
        names: Of chunks.
        run: That all of them must be of.

    Returns:
        By table, `(N,)`, int64; None where a chunk is gone, torn, or of another run.
    """
    found: dict[str, list[Tensor]] = {}
    for name in names:
        try:
            part = decode(sink.read(str(name)), str(name))
        except (PartError, KeyError):
            return None
        if part.header.run != run:
            return None
        for rows in part.rows:
            if rows.field == WEIGHT:
                found.setdefault(rows.table, []).append(rows.rows)
    return {table: torch.cat(rows).unique() for table, rows in found.items()}
