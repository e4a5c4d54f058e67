"""Copy marked rows, on a CPU in a thread, on CUDA on the lookup stream; copy whole tables window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...runtime import LookupOrder
from ...tables import KernelShards, TableShard
from ..parts import WEIGHT
from .kept_memory import KeptMemory
from .row_marks import DeviceMarks

GATHERED_AT_ONCE = 1 << 17
"""Most rows that one operator gathers from tables of different widths: its index has 8 bytes per value."""

WINDOW_BYTES = 64 << 20
"""Most bytes of a window of a table; a window has at least one row."""

Fields: TypeAlias = Mapping[str, Tensor]
"""`WEIGHT` or a kind of optimizer state -> tensor of a shard, `(rows, columns)`."""


class CopiedRows(NamedTuple):
    """Rows of one shard, on the host.

    Args:
        shard: The shard.
        field: `WEIGHT`, or a kind of optimizer state.
        rows_N: Row numbers in the shard, int64.
        values_ND: Their values, in the dtype of the table; row-wise state has one column.
    """

    shard: TableShard
    field: str
    rows_N: Tensor
    values_ND: Tensor


def fields_of(kernel: KernelShards, *, states: bool) -> list[tuple[TableShard, Fields]]:
    """Return the shards of a kernel, each with views of its weight and, with `states`, of its optimizer state."""
    kinds: list[dict[str, Tensor]] = kernel.states() if states else [{} for _ in kernel.shards]
    return [
        (shard, {field: _two_dim(values.detach()) for field, values in {WEIGHT: shard.weight, **of_shard}.items()})
        for shard, of_shard in zip(kernel.shards, kinds, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; of a device tensor in pinned memory, once the caller has waited for the stream."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


# -- marked rows -----------------------------------------------------------------------------------------------------


def copy_on_host(
    shards: Iterable[tuple[TableShard, Fields]], rows: Iterable[Tensor], kept: KeptMemory
) -> tuple[list[CopiedRows], Tensor]:
    """Copy rows, `(N,)` int64 for each shard, of host tables in any thread; the tables must not be written meanwhile.

    Returns:
        The copies, and the memory of their values, for `KeptMemory.give_back`.
    """
    wanted = [
        (shard, field, rows_N, values)
        for (shard, fields), rows_N in zip(shards, rows, strict=True)
        for field, values in fields.items()
        if rows_N.numel()
    ]
    lent, memory = kept.lend([((len(rows_N), values.shape[1]), values.dtype) for *_, rows_N, values in wanted])
    copied = []
    for (shard, field, rows_N, values), values_ND in zip(wanted, lent, strict=True):
        torch.index_select(values, 0, rows_N, out=values_ND)
        copied.append(CopiedRows(shard, field, rows_N, values_ND))
    return copied, memory


class HostCopy:
    """A copy that a thread makes with `copy_on_host`."""

    def __init__(self, copying: Future[tuple[list[CopiedRows], Tensor]], kept: KeptMemory) -> None:
        self._copying, self._kept = copying, kept

    def wait_copied(self) -> None:
        """Wait until the rows are copied."""
        self._copying.exception()

    def tables(self) -> list[CopiedRows]:
        """Wait for the copied rows and return them, in any thread."""
        return self._copying.result()[0]

    def give_back(self) -> None:
        """Give back the memory of the values, which must not be read any more."""
        if self._copying.exception() is None:
            self._kept.give_back(self._copying.result()[1])


class DeviceCopy:
    """A copy that is gathered on the lookup stream; `tables` copies it to the host on another stream.

    Args:
        kernels: The kernels, each with its marks, which are removed.
        order: The device's streams, and the order of lookups and updates on them.
        copying: The stream that copies to the host; None if all memory is on the host.
        states: Whether to also copy optimizer states.
    """

    def __init__(
        self,
        kernels: Iterable[tuple[KernelShards, DeviceMarks]],
        order: LookupOrder,
        copying: torch.cuda.Stream | None,
        *,
        states: bool,
    ) -> None:
        self._copying, self._streams = copying, order.streams
        order.lookup_waits()  # updates of a module's own forward run on the compute stream
        with order.on_lookup():
            self._gathered = [_gather(kernel, marks, states=states) for kernel, marks in kernels]
        self._event = order.streams.record(order.lookup)

    def wait_copied(self) -> None:
        """Let the current stream wait until the rows are gathered; the host does not wait."""
        self._streams.hand_to_caller((), self._event)

    def tables(self) -> list[CopiedRows]:
        """Copy the gathered rows to the host and return them; call this once, in any thread."""
        if self._copying is None:
            return [table for take in self._gathered for table in take()]
        with torch.cuda.device(self._copying.device), torch.cuda.stream(self._copying):
            self._event.synchronize()  # the host reads sizes
            copied = [table for take in self._gathered for table in take()]
        self._gathered.clear()
        return copied

    def give_back(self) -> None:
        """Do nothing: torch reuses pinned memory by itself."""


RowCopy: TypeAlias = HostCopy | DeviceCopy


def _gather(kernel: KernelShards, marks: DeviceMarks, *, states: bool) -> Callable[[], list[CopiedRows]]:
    """Gather the marked rows of a kernel's tables on the current stream, padded to a size known on the host.

    Returns:
        A function that copies the marked rows to the host and waits for them.
    """
    kernel.write_back_cache()
    rows, num_marked = marks.take()
    shards = fields_of(kernel, states=states)
    gathered = {field: _gather_rows([fields[field] for _, fields in shards], marks, rows) for field in shards[0][1]}

    def take() -> list[CopiedRows]:
        num_rows = int(num_marked)
        on_host = to_host(rows[:num_rows])
        values = {field: to_host(of_field[:num_rows]) for field, of_field in gathered.items()}
        if rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        ends = torch.searchsorted(on_host, torch.tensor(marks.first_rows)).tolist()
        copied = []
        for field, of_field in values.items():
            for (shard, fields), first, (start, end) in zip(shards, marks.first_rows, pairwise(ends), strict=False):
                if end > start:
                    values_ND = of_field[start:end, : fields[field].shape[1]].contiguous()
                    copied.append(CopiedRows(shard, field, on_host[start:end] - first, values_ND))
        return copied

    return take


def _gather_rows(parts: list[Tensor], marks: DeviceMarks, rows: Tensor) -> Tensor:
    """Return rows of several tables, `(N, widest)`, padded with zeros.

    `rows` are numbers over all tables (`DeviceMarks`), `(N,)`, int64, ascending, then zeros.
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


# -- whole tables ----------------------------------------------------------------------------------------------------


Window: TypeAlias = Callable[[], CopiedRows]
"""Call it to copy consecutive rows of a shard to the host; they must not be written before."""


def windows_of(shards: Iterable[tuple[TableShard, Fields]]) -> list[list[Window]]:
    """Divide shards into windows; return them in order, in groups of at most `WINDOW_BYTES`."""
    packs: list[list[Window]] = []
    free = 0
    for shard, fields in shards:
        for field, values_RD in fields.items():
            at_once = max(1, WINDOW_BYTES // (values_RD.shape[1] * values_RD.element_size()))
            for first in range(0, len(values_RD), at_once):
                window_ND = values_RD[first : first + at_once]
                if not packs or window_ND.nbytes > free:
                    packs.append([])
                    free = WINDOW_BYTES
                packs[-1].append(partial(_read, shard, field, first, window_ND))
                free -= window_ND.nbytes
    return packs


def _read(shard: TableShard, field: str, first: int, window_ND: Tensor) -> CopiedRows:
    rows_N = torch.arange(first, first + len(window_ND))
    return CopiedRows(shard, field, rows_N, window_ND.to("cpu", copy=True))
