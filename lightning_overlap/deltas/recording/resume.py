"""Find the rows that a resumed fit sends first: all rows that replicas may have with other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...plugin import OverlapEmbeddingStrategy
from ..parts import WEIGHT, PartError, PartName, decode
from .cuts import merged_rows
from .writer import CutWriter


def rows_to_resend(
    writer: CutWriter,
    run: str,
    known: Sequence[PartName],
    restored: Mapping[str, Any],
    tables: Mapping[str, tuple[int, int]],
    strategy: OverlapEmbeddingStrategy,
) -> dict[str, Tensor] | None:
    """Return the rows that replicas may have with other values than the tables now; all ranks call this.

    Args:
        writer: Reads the sink.
        run: The resumed training.
        known: The parts in the sink, equal on all ranks; may be newer than the checkpoint.
        restored: The callback's state in the checkpoint.
        tables: Table -> rows and columns.
        strategy: The strategy.

    Returns:
        Table -> row numbers, `(N,)`, int64; None if unknown, so that all rows must be sent.
    """
    acknowledged = restored["acknowledged"] and tuple(restored["acknowledged"])
    if all(name.cut != acknowledged for name in known):
        return None  # without that cut in the sink, it is unknown what replicas have applied since
    since = [name for name in known if name.cut > acknowledged]
    found: dict[str, Tensor] | None = None
    with suppress(Exception):  # then all rows are written
        found = merged_rows(_sent_rows(writer, since[strategy.global_rank :: strategy.world_size], run))
    of_ranks = strategy.gather(found)
    if any(rows is None for rows in of_ranks):
        return None
    whole = {name: torch.arange(tables[name][0]) for name in restored["whole"] if name in tables}
    return merged_rows([restored["rows"], whole, *of_ranks])


def _sent_rows(writer: CutWriter, names: Iterable[PartName], run: str) -> Iterator[dict[str, Tensor]]:
    for name in names:
        part = decode(writer.read(str(name)), str(name))
        if part.header.run != run:
            raise PartError(f"{name} is of the run {part.header.run!r}, this fit is of the run {run!r}.")
        yield from ({rows.table: rows.rows} for rows in part.rows if rows.field == WEIGHT)
