"""Make the chunks of a part from copied rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from ...tables import TableShard
from ..parts import WEIGHT, Dense, Header, Piece, Rows, encode_pieces
from .copies import Fields, RowCopy, Window, to_host

CHUNK_BYTES = 5 << 20
"""Most bytes of rows in a chunk; larger chunks do not fit a core's cache and are slower."""


DenseCopy: TypeAlias = tuple[dict[str, Tensor], torch.cuda.Event | None]
"""Copies on the host by key, and the event after which they are complete; None on a CPU."""


class DenseSource:
    """Tensors without marks on rows: the dense part, and tables that are not fused.

    Args:
        tensors: The dense part, by names in the unsharded model.
        tables: Shards of the dense optimizer's tables and of replicated tables, each with the fields to send.
    """

    def __init__(self, tensors: dict[str, Tensor], tables: Sequence[tuple[TableShard, Fields]]) -> None:
        self._tensors = tensors
        self._tables = {
            f"{number} {field}": (shard, field, values_RD)
            for number, (shard, fields) in enumerate(tables)
            for field, values_RD in fields.items()
        }
        self._sent: dict[str, Tensor] = {}

    def copy(self) -> DenseCopy:
        """Begin to copy all tensors; on a device on the current stream, without waiting."""
        now = {**self._tensors, **{key: values for key, (_, _, values) in self._tables.items()}}
        copies = {key: to_host(tensor.detach()) for key, tensor in now.items()}
        if not any(tensor.is_cuda for tensor in now.values()):
            return copies, None
        copied = torch.cuda.Event()
        copied.record()
        return copies, copied

    def entries(self, copy: DenseCopy) -> tuple[list[Rows], list[Dense]]:
        """Return the rows of tables that changed since the last call's copy, and the dense part."""
        values, copied = copy
        if copied is not None:
            copied.synchronize()
        rows = []
        for key, (shard, field, _) in self._tables.items():
            now_RD, before_RD = values[key], self._sent.get(key)
            changed_N = torch.arange(len(now_RD)) if before_RD is None else _changed_rows(now_RD, before_RD)
            self._sent[key] = now_RD
            if len(changed_N):
                rows.append(rows_of(shard, field, changed_N, now_RD.index_select(0, changed_N)))
        return rows, [Dense(name, values[name]) for name in self._tensors]

    def forget(self) -> None:
        """Forget the last call's copy, so that all rows count as changed."""
        self._sent.clear()


def _changed_rows(now_RD: Tensor, before_RD: Tensor) -> Tensor:
    """Return the rows that differ in any bit, `(N,)`, int64."""
    differ = now_RD.contiguous().view(torch.uint8) != before_RD.contiguous().view(torch.uint8)
    return differ.any(1).nonzero().squeeze(1)


class Cut:
    """One rank's part of a cut, until all ranks are known to have written their parts.

    Args:
        header: Header of the part, without numbers of chunks.
        rows: The copy of the marked rows, which may still run.
        source: Everything else to send.
    """

    def __init__(self, header: Header, rows: RowCopy, source: DenseSource) -> None:
        self.header = header
        self._source = source
        self._rows: RowCopy | None = rows  # until written
        self._dense: DenseCopy | None = source.copy()  # until written
        self._lock = threading.Lock()
        self._entries: list[Rows] | None = None

    def numbers(self) -> list[dict[str, Tensor]]:
        """Wait for the copied rows, in any thread; return table -> row numbers, also after they are written."""
        return [{entry.table: entry.rows} for entry in self._wait()]

    def chunks(self) -> Iterator[tuple[str, list[Piece]]]:
        """Yield the name and content of each chunk; call this once."""
        assert self._dense is not None
        of_dense, dense = self._source.entries(self._dense)
        packs = packed_rows([*self._wait(), *of_dense])
        for number, rows in enumerate(packs):
            chunk = replace(self.header, chunk=number, num_chunks=len(packs))
            yield str(chunk.name), encode_pieces(chunk, rows, () if number else dense)
        self._dense = None
        packs.clear()
        with self._lock:  # give the memory of the values to the next cut
            assert self._entries is not None
            assert self._rows is not None
            self._entries = [replace(entry, values=entry.values.new_empty(0, 0)) for entry in self._entries]
            self._rows.give_back()
            self._rows = None

    def _wait(self) -> list[Rows]:
        with self._lock:
            if self._entries is None:
                assert self._rows is not None
                self._entries = [rows_of(*copied) for copied in self._rows.tables()]
            return self._entries


def base_chunks(header: Header, plan: Sequence[list[Window]], source: DenseSource) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the name and content of each chunk of a base; reads the tables chunk by chunk, `source` in the last."""
    header = replace(header, num_chunks=len(plan) + 1)
    for windows in plan:
        yield str(header.name), encode_pieces(header, [rows_of(*read()) for read in windows])
        header = replace(header, chunk=header.chunk + 1)
    yield str(header.name), encode_pieces(header, *source.entries(source.copy()))


def packed_rows(entries: Iterable[Rows]) -> list[list[Rows]]:
    """Divide rows into at least one chunk of at most `CHUNK_BYTES`, in order."""
    packs: list[list[Rows]] = [[]]
    free = CHUNK_BYTES
    for entry in entries:
        per_row = max(1, 8 + entry.values.shape[1] * entry.values.element_size())
        first = 0
        while first < len(entry.rows):
            if free < per_row and packs[-1]:
                packs.append([])
                free = CHUNK_BYTES
            end = min(len(entry.rows), first + max(1, free // per_row))
            packs[-1].append(replace(entry, rows=entry.rows[first:end], values=entry.values[first:end]))
            free -= (end - first) * per_row
            first = end
    return packs


def rows_of(shard: TableShard, field: str, rows_N: Tensor, values_ND: Tensor) -> Rows:
    """Return rows of a shard as rows of the unsharded table.

    Args:
        shard: The shard.
        field: `WEIGHT`, or a kind of optimizer state.
        rows_N: Row numbers in the shard, `(N,)`, int64.
        values_ND: Their values. Row-wise state, `(N, 1)`, of a column-wise shard is repeated for each of its columns.
    """
    num_rows, num_columns = shard.shape
    width = shard.weight.shape[1]
    rows_N = rows_N + shard.first_row if shard.first_row else rows_N
    if field != WEIGHT and values_ND.shape[1] == 1 != width:
        if width == num_columns:
            return Rows(shard.name, field, (num_rows, 1), 0, rows_N, values_ND)
        values_ND = values_ND.expand(-1, width)  # each column shard has its own state for every row
    return Rows(shard.name, field, shard.shape, shard.first_column, rows_N, values_ND)


def columns_of_states(shards: Iterable[tuple[TableShard, Fields]]) -> list[tuple[str, str, int, int]]:
    """Return the column-wise shards with row-wise state, which depend on the sharding plan.

    Returns:
        Sorted (name of the table, kind of state, first column, number of columns).
    """
    return sorted(
        (shard.name, field, shard.first_column, shard.weight.shape[1])
        for shard, fields in shards
        for field, values_RD in fields.items()
        if field != WEIGHT and values_RD.shape[1] == 1 and shard.weight.shape[1] != shard.shape[1]
    )


def merged_rows(rows: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the union of several mappings of table -> row numbers, `(N,)`, int64, on the host."""
    found: dict[str, list[Tensor]] = {}
    for one in rows:
        for table, numbers in one.items():
            found.setdefault(table, []).append(numbers)
    return {table: torch.cat(numbers).unique() for table, numbers in found.items()}
