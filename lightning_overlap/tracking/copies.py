"""Copies of marked rows: in a thread on a host, on the lookup stream of a device."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..runtime import LookupOrder
from ..tables import KernelShards
from .dense_copies import to_host
from .kept_memory import KeptMemory
from .row_marks import DeviceMarks

GATHERED_AT_ONCE = 1 << 17
"""Rows of tables of several widths that are gathered by one operator: its index has 8 bytes for each value."""

WEIGHT = "weight"
"""The field of a table's own values."""


class CopiedTable(NamedTuple):
    """Rows of one shard, on the host.

    Args:
        shard: Number of the shard among all shards of the rank.
        field: `WEIGHT`, or a kind of optimizer state.
        rows_N: Numbers in the shard, int64.
        values_ND: Their values, row-wise state with one column.
    """

    shard: int
    field: str
    rows_N: Tensor
    values_ND: Tensor


def fields_of(kernel: KernelShards, *, states: bool) -> list[dict[str, Tensor]]:
    """Return the values of each shard and, where asked for, its optimizer's states by kind, each `(rows, columns)`."""
    kinds: list[dict[str, Tensor]] = kernel.states() if states else [{} for _ in kernel.shards]
    return [
        {field: _two_dim(values.detach()) for field, values in {WEIGHT: shard.weight, **of_shard}.items()}
        for shard, of_shard in zip(kernel.shards, kinds, strict=True)
    ]


def copy_on_host(
    shards: list[dict[str, Tensor]], rows: list[Tensor], kept: KeptMemory
) -> tuple[list[CopiedTable], Tensor]:
    """Return copies of rows, and the memory of their values; any thread may do so while nobody writes the tables.

    Args:
        shards: The fields of each shard of the rank.
        rows: Of each of them, `(N,)`, int64.
        kept: Lends the memory.
    """
    wanted = [
        (number, field, rows_N, values)
        for number, (rows_N, fields) in enumerate(zip(rows, shards, strict=True))
        for field, values in fields.items()
        if rows_N.numel()
    ]
    lent, memory = kept.lend([((len(rows_N), values.shape[1]), values.dtype) for *_, rows_N, values in wanted])
    copied = []
    for (number, field, rows_N, values), values_ND in zip(wanted, lent, strict=True):
        torch.index_select(values, 0, rows_N, out=values_ND)
        copied.append(CopiedTable(number, field, rows_N, values_ND))
    return copied, memory


class HostCopy:
    """A copy that a thread makes, by `copy_on_host`, into kept memory."""

    def __init__(self, copying: Future[tuple[list[CopiedTable], Tensor]], kept: KeptMemory) -> None:
        self._copying, self._kept = copying, kept

    def wait_copied(self) -> None:
        """Let the host wait for it."""
        self._copying.exception()

    def tables(self) -> list[CopiedTable]:
        """Wait for it on the host, in any thread, and return what was copied."""
        return self._copying.result()[0]

    def give_back(self) -> None:
        """Say that nobody reads the values any more: their memory may be written. The rows' numbers stay."""
        if self._copying.exception() is None:
            self._kept.give_back(self._copying.result()[1])


class DeviceCopy:
    """A copy that the lookup stream makes; another one then takes it to the host, in the thread that asks for it.

    Args:
        kernels: Each with its marks.
        order: Of the lookup stream.
        copying: Stream that takes copies to the host; None where all memory is the host's.
        states: Whether to copy the optimizers' state too.
    """

    def __init__(
        self,
        kernels: list[tuple[KernelShards, DeviceMarks]],
        order: LookupOrder,
        copying: torch.cuda.Stream | None,
        *,
        states: bool,
    ) -> None:
        self._copying, self._streams = copying, order.streams
        self._gathered: list[_Gathered] = []
        first_shard = 0
        order.lookup_waits()  # a module's own forward has its update on the compute stream
        with order.on_lookup():
            for kernel, marks in kernels:
                self._gathered.append(_Gathered(kernel, marks, first_shard, states=states))
                first_shard += len(kernel.shards)
        self._event = order.streams.record(order.lookup)

    def wait_copied(self) -> None:
        """Let the current stream wait until the rows have been gathered; the host does not wait."""
        self._streams.hand_to_caller((), self._event)

    def tables(self) -> list[CopiedTable]:
        """Wait for the gathering, take what is marked to the host, and return it."""
        if self._copying is None:
            return [table for gathered in self._gathered for table in gathered.split()]
        with torch.cuda.device(self._copying.device), torch.cuda.stream(self._copying):
            self._event.synchronize()  # the sizes are the host's to know now, in this thread
            copied = [table for gathered in self._gathered for table in gathered.split()]
        self._gathered.clear()
        return copied

    def give_back(self) -> None:
        """Do nothing: pinned memory goes back to torch when nobody holds the values."""


RowCopy: TypeAlias = HostCopy | DeviceCopy
"""A copy that may still be under way."""


class _Gathered:
    """Rows of all tables of a kernel, gathered on the device; more than there are marked."""

    def __init__(self, kernel: KernelShards, marks: DeviceMarks, first_shard: int, *, states: bool) -> None:
        kernel.write_back_cache()
        self._first_shard, self._first_rows = first_shard, marks.first_rows
        self._rows, self._num_marked = marks.take()
        shards = fields_of(kernel, states=states)
        tables = {field: [of_shard[field] for of_shard in shards] for field in shards[0]}
        self._widths = {field: [table.shape[1] for table in of_field] for field, of_field in tables.items()}
        self._values = {field: _gather_rows(of_field, marks, self._rows) for field, of_field in tables.items()}

    def split(self) -> list[CopiedTable]:
        """Take what is marked to the host; tell it by table."""
        num_marked = int(self._num_marked)
        rows = to_host(self._rows[:num_marked])
        values = {field: to_host(of_field[:num_marked]) for field, of_field in self._values.items()}
        if self._rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        ends = torch.searchsorted(rows, torch.tensor(self._first_rows)).tolist()
        copied = []
        for field, of_field in values.items():
            for number, width in enumerate(self._widths[field]):
                start, end = ends[number], ends[number + 1]
                if end > start:
                    rows_N, values_ND = rows[start:end] - self._first_rows[number], of_field[start:end, :width]
                    copied.append(CopiedTable(self._first_shard + number, field, rows_N, values_ND.contiguous()))
        return copied


def _gather_rows(parts: list[Tensor], marks: DeviceMarks, rows: Tensor) -> Tensor:
    """Return the rows of several tables, `(N, widest)`, each filled up on the right.

    Args:
        parts: The tables, `(rows, columns)`, one dtype.
        marks: Tell where each table's rows begin among those of all.
        rows: Among those of all, `(N,)`.
    """
    first_rows, start, widths = marks.first_rows, parts[0], [part.shape[1] for part in parts]
    size = start.element_size()
    begins = [part.data_ptr() - start.data_ptr() for part in parts]
    in_a_row = begins == [first * widths[0] * size for first in first_rows[:-1]]
    if len(set(widths)) == 1 and in_a_row:
        return torch.as_strided(start, (first_rows[-1], widths[0]), (widths[0], 1)).index_select(0, rows)
    found = start.new_zeros(len(rows), max(widths))
    for first in range(0, len(rows), GATHERED_AT_ONCE):
        some = rows[first : first + GATHERED_AT_ONCE]
        table = torch.searchsorted(marks.ends_T, some, right=True)
        for number, part in enumerate(parts):
            if not part.shape[0]:
                continue
            own = (table == number).unsqueeze(1)
            values = part.index_select(0, (some - first_rows[number]).clamp(0, part.shape[0] - 1))
            place = found[first : first + len(some), : part.shape[1]]
            place.copy_(torch.where(own, values, place))
    return found


def _two_dim(values: Tensor) -> Tensor:
    return values.unsqueeze(1) if values.dim() == 1 else values
