"""Make the files of a cut from copied rows."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ...storage import Piece
from ...updated_rows import Field, RowCopy, to_host
from ..files import RAW_ID, WEIGHT, Columns, Dense, Header, Rows, encode_pieces
from .raw_ids import IdsCopy, IdSource

FILE_BYTES = 5 << 20  # most bytes of rows in a file; larger files do not fit a core's cache and are slower
WINDOW_BYTES = 64 << 20  # most bytes of values in a file of a base
_ID_BYTES = 16  # of a row's number and raw id

DenseCopy: TypeAlias = tuple[list[Tensor], IdsCopy, torch.cuda.Event | None]  # complete after the event (CUDA)

T = TypeVar("T")


def rows_of(field: Field, rows_N: Tensor, values_ND: Tensor) -> Rows:
    """Return rows of the unsharded table, by their numbers in it, int64, and a field's values of them."""
    shard = field.shard
    shape, width = shard.shape, shard.weight.shape[1]
    if field.is_row_wise and width == shape[1]:
        shape = (shape[0], 1)
    elif field.is_row_wise:  # each column shard has its own state for every row
        values_ND = values_ND.expand(-1, width)
    return Rows(shard.name, field.kind, shape, shard.first_column, rows_N, values_ND)


class DenseSource:
    """Tensors without marks on rows: the dense part by name, tables that are not fused, and raw ids."""

    def __init__(self, tensors: dict[str, Tensor], tables: Sequence[Field], ids: IdSource) -> None:
        self._tensors, self._tables, self.ids = tensors, tables, ids
        self._sent: Sequence[Tensor | None] = [None] * len(tables)

    def copy(self) -> DenseCopy:
        """Begin to copy all tensors; on a device on the current stream, without waiting."""
        now = [*self._tensors.values(), *(field.values_RD for field in self._tables)]
        copies, ids = [to_host(tensor.detach()) for tensor in now], self.ids.copy()
        of_ids = (one for pair in ids if pair is not None for one in pair)
        if not any(tensor.is_cuda for tensor in now) and not any(one.is_pinned() for one in of_ids):
            return copies, ids, None
        copied = torch.cuda.Event()
        copied.record()
        return copies, ids, copied

    def entries(self, copy: DenseCopy) -> tuple[list[Rows], list[Dense]]:
        """Return the rows of tables and raw ids that changed since the last call's copy, and the dense part."""
        copies, ids, copied = copy
        if copied is not None:
            copied.synchronize()
        dense = [Dense(name, value) for name, value in zip(self._tensors, copies, strict=False)]
        tables, rows = copies[len(dense) :], []
        for field, now_RD, before_RD in zip(self._tables, tables, self._sent, strict=True):
            changed_N = torch.arange(len(now_RD))
            if before_RD is not None:  # the rows that differ in any bit
                differ = now_RD.contiguous().view(torch.uint8) != before_RD.contiguous().view(torch.uint8)
                changed_N = differ.any(1).nonzero().squeeze(1)
            if len(changed_N):
                rows.append(rows_of(field, field.numbers(changed_N), now_RD.index_select(0, changed_N)))
        self._sent = tables
        return [*self.ids.rows(ids), *rows], dense

    def forget(self) -> None:
        """Forget the last call's copy, so that all rows count as changed."""
        self._sent = [None] * len(self._tables)
        self.ids.forget()


class Cut:
    """One rank's files of a cut, until all ranks are known to have written their files; `rows` may still be copied."""

    def __init__(self, header: Header, rows: RowCopy, source: DenseSource) -> None:
        self.header = header
        self._source = source
        self._copies: tuple[RowCopy, DenseCopy] | None = (rows, source.copy())  # until written
        self._lock = threading.Lock()
        self._entries: list[Rows] | None = None

    def numbers(self) -> list[dict[str, Tensor]]:
        """Wait for the copied rows, in any thread; return table -> row numbers, also after they are written."""
        return [{entry.table: entry.rows} for entry in self._wait()]

    def files(self) -> Iterator[tuple[str, list[Piece]]]:
        """Yield the name and content of each file; call this once."""
        assert self._copies is not None
        copy, dense_copy = self._copies
        of_dense, dense = self._source.entries(dense_copy)
        entries = self._wait()
        sized = ((entry, len(entry.rows), 8 + _row_bytes(entry.values)) for entry in (*entries, *of_dense))
        packs = packed(sized, FILE_BYTES) or [[]]
        for number, pack in enumerate(packs):
            header = replace(self.header, chunk=number, num_chunks=len(packs))
            yield str(header.name), encode_pieces(header, _parts(pack), () if number else dense)
        with self._lock:  # give the memory of the values to the next cut
            self._entries = [replace(entry, values=entry.values.new_empty(0, 0)) for entry in entries]
            self._copies = None
            copy.give_back()

    def _wait(self) -> list[Rows]:
        with self._lock:
            if self._entries is None:
                assert self._copies is not None
                self._entries = [rows_of(*copied) for copied in self._copies[0].rows()]
            return self._entries


def base_files(header: Header, fields: Sequence[Field], source: DenseSource) -> Iterator[tuple[str, list[Piece]]]:
    """Yield the name and content of each file of a base; reads the tables file by file, `source` in the last."""
    plan = packed(((field, len(field.values_RD), _row_bytes(field.values_RD)) for field in fields), WINDOW_BYTES)
    num_of_ids = len(packed(((None, num, _ID_BYTES) for num in source.ids.sizes), WINDOW_BYTES))
    header = replace(header, num_chunks=len(plan) + num_of_ids + 1)
    for pack in plan:
        rows = [
            rows_of(field, field.numbers(torch.arange(first, end)), field.values_RD[first:end].to("cpu", copy=True))
            for field, first, end in pack
        ]
        yield str(header.name), encode_pieces(header, rows)
        header = replace(header, chunk=header.chunk + 1)
    found, dense = source.entries(source.copy())
    of_ids = [one for one in found if one.field == RAW_ID]
    for part in packed(((one, len(one.rows), _ID_BYTES) for one in of_ids), WINDOW_BYTES):
        yield str(header.name), encode_pieces(header, _parts(part))
        header = replace(header, chunk=header.chunk + 1)
    yield str(header.name), encode_pieces(header, [one for one in found if one.field != RAW_ID], dense)


def _parts(pack: Iterable[tuple[Rows, int, int]]) -> list[Rows]:
    return [replace(one, rows=one.rows[first:end], values=one.values[first:end]) for one, first, end in pack]


def packed(items: Iterable[tuple[T, int, int]], most_bytes: int) -> list[list[tuple[T, int, int]]]:
    """Divide (item, rows, row bytes) into packs of (item, first row, last row + 1), up to `most_bytes` or one row."""
    packs: list[list[tuple[T, int, int]]] = []
    free = 0
    for item, num_rows, row_bytes in items:
        first = 0
        while first < num_rows:
            if not packs or free < row_bytes:
                packs.append([])
                free = most_bytes
            end = min(num_rows, first + max(1, free // row_bytes))
            packs[-1].append((item, first, end))
            free -= (end - first) * row_bytes
            first = end
    return packs


def _row_bytes(values: Tensor) -> int:
    return values.shape[1] * values.element_size()


def columns_of_states(fields: Iterable[Field]) -> list[Columns]:
    """Return (table, kind, first column, number of columns) of row-wise states whose values depend on the plan."""
    return sorted(
        (shard.name, kind, shard.first_column, shard.weight.shape[1])
        for shard, kind, values_RD in fields
        if kind != WEIGHT and values_RD.shape[1] == 1 and shard.weight.shape[1] != shard.shape[1]
    )


def merged_rows(rows: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the union of several mappings of table -> row numbers, `(N,)`, int64, on the host."""
    found: dict[str, list[Tensor]] = {}
    for one in rows:
        for table, numbers in one.items():
            found.setdefault(table, []).append(numbers)
    return {table: torch.cat(numbers).unique() for table, numbers in found.items()}
