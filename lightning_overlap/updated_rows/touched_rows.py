"""The rows that updates have written since the last copy."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime import TableAccess
from ..tables import KernelShards
from .copies import CopiedRows, DeviceCopy, Field, HostCopy, KeptMemory, RowCopy, copy_on_host, fields_of
from .marked_rows import MarkedRows
from .row_marks import HostMarks


class TouchedRows:
    """Marks rows when the fused backward or an eviction writes them; copies them, overlapped with the next forward.

    `dense` has the fields of tables without marks: the dense optimizer's and, on rank 0, replicated tables.
    """

    def __init__(
        self,
        model: nn.Module,
        access: TableAccess,
        *,
        rank: int,
        states: bool = False,
        on_settled: Callable[[bool], None] | None = None,
    ) -> None:
        self._on_settled = on_settled  # called with what `settle` returns, once for each copy
        self._marked = MarkedRows(model, access, self._before_update, states=states)
        self._access, self._streams, self._states = access, access.streams, states
        self._on_device = access.streams.is_async
        others = [kernel for kernel in self._marked.others if not (kernel.is_replicated and rank)]
        self.dense = [field for kernel in others for fields in fields_of(kernel, states=states) for field in fields]
        self._spare_marks: list[Any] | None = None
        self._kept = KeptMemory()
        self._copier = ThreadPoolExecutor(1, "copy of touched rows")
        devices = [kernel.shards[0].weight.device for kernel in self._kernels]
        self._to_host = torch.cuda.Stream(devices[0]) if devices and devices[0].type == "cuda" else None
        self._copy: RowCopy | None = None
        self._writes_before = 0
        self._is_whole: bool | None = True
        self._one_notes = threading.Lock()
        access.readers.append(self._before_update)

    def detach(self) -> None:
        """Stop marking, and wait for a running copy on the host."""
        self._marked.detach()
        self._access.readers.remove(self._before_update)
        self._copier.shutdown()

    @property
    def _kernels(self) -> list[KernelShards]:
        return self._marked.kernels

    def _before_update(self) -> None:
        """Let a running copy read the old values of the rows that are about to be written."""
        if self._copy is not None or self._is_whole is None:
            self.settle()
            self.wait_copied()  # on a device every stream that writes tables must wait, not only the first

    def mark(self, name: str, rows: Tensor) -> None:
        """Mark rows `(N,)`, int64, on the host, of an unsharded table by its name; rows of other ranks are skipped."""
        self._marked.mark(name, rows)

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return self._marked.most

    def marked(self) -> list[dict[str, Tensor]]:
        """Return, for each shard, table -> marked row numbers in the unsharded table, `(N,)`, int64, on the host."""
        return self._marked.marked()

    def copy(self) -> RowCopy:
        """Begin to copy the marked rows, and remove their marks; `settle` tells whether the copy is consistent."""
        self.wait_copied()
        marks: list[Any] = self._marked.marks
        self._writes_before, self._is_whole = self.num_writes, None
        if self._on_device:
            kernels = zip(self._kernels, marks, strict=True)
            self._copy = DeviceCopy(kernels, self._streams, self._to_host, states=self._states)
        else:  # the spare marks, of the previous copy, are empty
            self._marked.marks, self._spare_marks = self._spare_marks or self._marked.new_marks(), marks
            self._copy = HostCopy(self._copier.submit(self._copy_on_host, marks), self._kept)
        return self._copy

    def settle(self) -> bool:
        """Wait for the last copy; return False if tables were written meanwhile, so that it may be inconsistent."""
        if self._is_whole is None:
            self.wait_copied()
        return self._note_whole()

    def settle_in_thread(self) -> bool:
        """The same, for another thread: the one that trains may be waiting for other ranks."""
        copy = self._copy
        if self._is_whole is None and copy is not None:
            copy.wait_read()
        return self._note_whole()

    def _note_whole(self) -> bool:
        with self._one_notes:  # whoever is about to write tables waits here until a thread has compared the numbers
            if self._is_whole is None:
                self._is_whole = self.num_writes == self._writes_before
                if self._on_settled is not None:
                    self._on_settled(self._is_whole)
            return self._is_whole

    def wait_copied(self) -> None:
        """Wait until the last copy has read its rows: on a CPU the host waits, on a device the current stream."""
        if self._copy is not None:
            self._copy.wait_copied()
            if not self._on_device:
                self._copy = None  # on a device other streams have not waited

    def _copy_on_host(self, marks: list[HostMarks]) -> tuple[list[CopiedRows], Tensor]:
        rows = [rows_N for of_kernel in marks for rows_N in of_kernel.take()]
        shards = zip(self._fields_of_shards(), rows, strict=True)
        return copy_on_host([(field, rows_N) for shard, rows_N in shards if len(rows_N) for field in shard], self._kept)

    def _fields_of_shards(self) -> list[list[Field]]:
        return [fields for kernel in self._kernels for fields in fields_of(kernel, states=self._states)]

    @property
    def fields(self) -> list[Field]:
        """The fields of all fused tables on this rank."""
        return [field for fields in self._fields_of_shards() for field in fields]

    @property
    def num_writes(self) -> int:
        """In-place writes to this rank's fused tables, except by their backward, plus `tables_changed()` calls.

        If rows are copied with their optimizer state, those to this state count, too.
        """
        return self._marked.num_writes

    @property
    def num_weight_writes(self) -> int:
        """The same without optimizer state."""
        return self._marked.num_weight_writes

    def begin_base(self) -> None:
        """Remove all marks, and bring the memory of all tables up to date."""
        self.wait_copied()
        self._marked.marks = self._marked.new_marks()
        for kernel in self._kernels:
            kernel.write_back_cache()
