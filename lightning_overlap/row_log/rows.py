"""Rows of tables, as files have them, and how they are written into a part of a table."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

WEIGHT = "weight"  # the field of a table's weights; other fields are kinds of optimizer state (`momentum1`, ...)
Window: TypeAlias = tuple[slice, ...]  # what a part has of an unsharded tensor: rows, and columns if it has any

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table, of one kind of its optimizer state, or of its raw ids; tensors are on the host."""

    table: str  # in deltas the name of the table's weight in the unsharded LightningModule's `state_dict`
    field: str  # in deltas `WEIGHT`, `RAW_ID`, `EVICTED_ID`, or a kind of optimizer state
    shape: tuple[int, int]  # of the unsharded table; (rows, 1) for row-wise state and raw ids
    first_column: int  # of this shard
    rows: Tensor  # distinct row numbers in the unsharded table, `(N,)`, int64
    values: Tensor  # `(N, num_columns)`, with the dtype and bits of the trainer's table


@dataclass(frozen=True, slots=True)
class Dense:
    """A tensor of the dense part, on the host; `name` is its name in the LightningModule's `state_dict`."""

    name: str
    value: Tensor


def put_rows(part: Tensor, window: Window, entry: Rows) -> None:
    """Write what a part has of an entry's rows; a part of one dimension has the value of all columns of a row."""
    if part.dim() == 1:
        _put_window(part.unsqueeze(1), (*window, slice(0, 1)), entry.rows, 0, entry.values[:, :1])
    else:
        _put_window(part, window, entry.rows, entry.first_column, entry.values)


def _put_window(part: Tensor, window: Window, rows_N: Tensor, first_column: int, values_ND: Tensor) -> None:
    rows, columns = window
    start, stop = max(first_column, columns.start), min(first_column + values_ND.shape[1], columns.stop)
    is_mine = (rows_N >= rows.start) & (rows_N < rows.stop)
    if start < stop and bool(is_mine.any()):
        values = values_ND[is_mine, start - first_column : stop - first_column].to(part.dtype)
        write_rows(part, rows_N[is_mine] - rows.start, start - columns.start, values)


def write_rows(table: Tensor, rows_N: Tensor, first_column: int, values_ND: Tensor) -> None:
    """Write values of a table's dtype, bit for bit, into rows `(N,)`, int64, from a column on."""
    columns = _bits(table)[:, first_column : first_column + values_ND.shape[1]]
    columns.index_copy_(0, rows_N.to(table.device), _bits(values_ND).to(table.device))


def _bits(tensor: Tensor) -> Tensor:
    """Return a view as integers, so that writes keep every bit and `index_copy_` supports the dtype."""
    size = tensor.element_size()
    return tensor.detach().view(_SAME_SIZE[size]) if size in _SAME_SIZE else tensor.detach()
