"""Copy marked rows, on a CPU in a thread, on CUDA on the lookup stream."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..row_log import WEIGHT
from ..runtime import Made, Streams
from ..schedules import StreamName
from ..tables import KernelShards, TableShard
from .row_marks import DeviceMarks

GATHERED_AT_ONCE = 1 << 17  # most rows to gather at once from tables of different widths: the index is large
ALIGNED_TO = 64  # alignment of each tensor in lent memory, in bytes
LARGER = 4  # kept memory is freed if it is larger than a request by more than this factor


class Field(NamedTuple):
    """The weight or one kind of optimizer state of a shard; `values_RD` is a view, row-wise state has one column."""

    shard: TableShard
    kind: str
    values_RD: Tensor

    @property
    def is_row_wise(self) -> bool:
        """Whether it has one value per row, and the shard several columns."""
        return self.values_RD.shape[1] != self.shard.weight.shape[1]

    def numbers(self, rows_N: Tensor) -> Tensor:
        """Return the numbers of the shard's rows, int64, in the unsharded table."""
        return rows_N + self.shard.first_row if self.shard.first_row else rows_N


class CopiedRows(NamedTuple):
    """Rows of a field, copied to the host."""

    field: Field
    rows_N: Tensor  # their numbers in the unsharded table, int64
    values_ND: Tensor


def fields_of(kernel: KernelShards, *, states: bool) -> list[list[Field]]:
    """Return the fields of each shard of a kernel: its weight and, with `states`, its optimizer state."""
    kinds: list[dict[str, Tensor]] = kernel.states() if states else [{} for _ in kernel.shards]
    return [
        [
            Field(shard, kind, values.detach().unsqueeze(1) if values.dim() == 1 else values.detach())
            for kind, values in {WEIGHT: shard.weight, **of_shard}.items()
        ]
        for shard, of_shard in zip(kernel.shards, kinds, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; of a device tensor in pinned memory, once the caller has waited for the stream."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class KeptMemory:
    """Lends memory, and keeps the last piece given back: getting a page from the system costs more than writing it."""

    def __init__(self) -> None:
        self._at_rest: deque[Tensor] = deque(maxlen=1)

    def lend(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[Tensor], Tensor]:
        """Return uninitialized tensors of these shapes and dtypes, and the memory of all of them, for `give_back`."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
        *firsts, num_bytes = accumulate((-(-size // ALIGNED_TO) * ALIGNED_TO for size in sizes), initial=0)
        memory = self._at_rest.pop() if self._at_rest else None
        if memory is None or not num_bytes <= memory.numel() <= LARGER * num_bytes:
            del memory
            # NumPy requests huge pages, torch does not
            memory = torch.from_numpy(np.empty(num_bytes + num_bytes // 8, dtype=np.uint8))
        places = zip(firsts, sizes, wanted, strict=True)
        return [memory[first : first + size].view(dtype).view(shape) for first, size, (shape, dtype) in places], memory

    def give_back(self, memory: Tensor) -> None:
        """Take memory back, in any thread; its tensors must not be used any more."""
        self._at_rest.append(memory)


def copy_on_host(wanted: Sequence[tuple[Field, Tensor]], kept: KeptMemory) -> tuple[list[CopiedRows], Tensor]:
    """Copy rows, `(N,)` int64, of host tables in any thread; return them and their memory, for `give_back`."""
    shapes = [((len(rows_N), values_RD.shape[1]), values_RD.dtype) for (_, _, values_RD), rows_N in wanted]
    lent, memory = kept.lend(shapes)
    copied = []
    for (field, rows_N), values_ND in zip(wanted, lent, strict=True):
        torch.index_select(field.values_RD, 0, rows_N, out=values_ND)
        copied.append(CopiedRows(field, field.numbers(rows_N), values_ND))
    return copied, memory


class HostCopy:
    """Rows that a thread copies with `copy_on_host`."""

    def __init__(self, copying: Future[tuple[list[CopiedRows], Tensor]], kept: KeptMemory) -> None:
        self._copying, self._kept = copying, kept

    def wait_copied(self) -> None:
        """Wait until the rows are copied."""
        self._copying.exception()

    wait_read = wait_copied

    def rows(self) -> list[CopiedRows]:
        """Wait for the copied rows and return them, in any thread."""
        return self._copying.result()[0]

    def give_back(self) -> None:
        """Give back the memory of the values, which must not be read any more."""
        if self._copying.exception() is None:
            self._kept.give_back(self._copying.result()[1])


class DeviceCopy:
    """Rows gathered on the lookup stream, and their marks removed; `copying` is None if all memory is on the host."""

    def __init__(
        self,
        kernels: Iterable[tuple[KernelShards, DeviceMarks]],
        streams: Streams,
        copying: torch.cuda.Stream | None,
        *,
        states: bool,
    ) -> None:
        self._copying, self._streams = copying, streams
        streams.order(StreamName.COMPUTE, then=streams.lookup)  # the user may have written tables on the compute stream
        with streams.on_lookup():
            self._gathered = [_gather(kernel, marks, states=states) for kernel, marks in kernels]
        self._event = streams.record(streams.lookup)

    def wait_copied(self) -> None:
        """Let the current stream wait until the rows are gathered; the host does not wait."""
        self._streams.give_to_caller(Made((), self._streams.lookup, self._event))

    def wait_read(self) -> None:
        """Let the host wait until the rows are gathered, in any thread."""
        if self._copying is not None:
            self._event.synchronize()

    def rows(self) -> list[CopiedRows]:
        """Copy the gathered rows to the host and return them; call this once, in any thread."""
        if self._copying is None:
            return [rows for take in self._gathered for rows in take()]
        with torch.cuda.device(self._copying.device), torch.cuda.stream(self._copying):
            self._event.synchronize()  # the host reads sizes
            copied = [rows for take in self._gathered for rows in take()]
        self._gathered.clear()
        return copied

    def give_back(self) -> None:
        """Do nothing: torch reuses pinned memory by itself."""


RowCopy: TypeAlias = HostCopy | DeviceCopy


def _gather(kernel: KernelShards, marks: DeviceMarks, *, states: bool) -> Callable[[], list[CopiedRows]]:
    """Gather a kernel's marked rows on the current stream; return what copies them to the host and waits for them."""
    kernel.write_back_cache()
    rows, num_marked = marks.take()
    kinds = [*zip(*fields_of(kernel, states=states), strict=True)]
    gathered = [_gather_rows([field.values_RD for field in fields], marks, rows) for fields in kinds]

    def take() -> list[CopiedRows]:
        num_rows = int(num_marked)
        on_host = to_host(rows[:num_rows])
        values = [to_host(of_kind[:num_rows]) for of_kind in gathered]
        if rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        ends = torch.searchsorted(on_host, torch.tensor(marks.first_rows)).tolist()
        copied = []
        for fields, of_kind in zip(kinds, values, strict=True):
            for field, first, (start, end) in zip(fields, marks.first_rows, pairwise(ends), strict=False):
                if end > start:
                    values_ND = of_kind[start:end, : field.values_RD.shape[1]].contiguous()
                    copied.append(CopiedRows(field, field.numbers(on_host[start:end] - first), values_ND))
        return copied

    return take


def _gather_rows(parts: list[Tensor], marks: DeviceMarks, rows: Tensor) -> Tensor:
    """Return rows (numbers over all tables, ascending, then zeros), `(N, widest)`, padded with zeros."""
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
