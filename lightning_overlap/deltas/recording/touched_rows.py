"""The rows that updates have written since the last copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...runtime import LookupOrder
from ...tables import TableShard, kernel_shards, num_fused_writes, sharded_modules
from .copies import CopiedRows, DeviceCopy, Fields, HostCopy, RowCopy, Window, copy_on_host, fields_of, windows_of
from .kept_memory import KeptMemory
from .row_marks import DeviceMarks, HostMarks


class TouchedRows:
    """Marks rows when the fused backward writes them; copies marked rows, overlapped with the next forward.

    A forward hook of each kernel gets the ids of a lookup, and a hook of its output's autograd node runs right before
    the backward that updates these rows: in every mode, for early lookups and a module's own forward, immediate or
    deferred. A lookup without a backward (an evaluation, a dropped batch) marks nothing. Tables of the dense optimizer
    have no marks.

    Args:
        model: The sharded model; tables are named as in its `state_dict`.
        order: The device's streams, and the order of lookups and updates on them.
        num_pending: Returns the number of trained batches with pending table updates.
        states: Whether to also copy the fused optimizers' states.

    Attributes:
        dense: Shards of the dense optimizer's tables and of replicated tables, each with its fields, and whether it is
            replicated.

    Raises:
        ValueError: Rows have no fixed numbers, as in managed collision modules.
    """

    def __init__(
        self, model: nn.Module, order: LookupOrder, num_pending: Callable[[], int], *, states: bool = False
    ) -> None:
        kernels = kernel_shards(model)
        self._modules = list(sharded_modules(model).values())
        self._kernels = [kernel for kernel in kernels if kernel.is_fused]
        self._order, self._num_pending, self._states = order, num_pending, states
        self._on_device = order.streams.is_async
        self.dense: list[tuple[TableShard, Fields, bool]] = [
            (*shard, kernel.is_replicated)
            for kernel in kernels
            if not kernel.is_fused
            for shard in fields_of(kernel, states=states)
        ]
        self._marks = self._new_marks()
        self._spare_marks: list[Any] | None = None
        self._kept = KeptMemory()
        self._copier = ThreadPoolExecutor(1, "copy of touched rows")
        devices = [kernel.shards[0].weight.device for kernel in self._kernels]
        self._to_host = torch.cuda.Stream(devices[0]) if devices and devices[0].type == "cuda" else None
        self._copy: RowCopy | None = None
        self._writes_before = 0
        self._is_whole: bool | None = True
        self._handles: list[RemovableHandle] = []

    def _new_marks(self) -> list[Any]:
        found: list[DeviceMarks | HostMarks] = []
        for kernel in self._kernels:
            num_rows = [shard.weight.shape[0] for shard in kernel.shards]
            if self._on_device:
                marks = DeviceMarks(num_rows, kernel.table_of_feature, kernel.shards[0].weight.device)
                self._order.hand_to_lookup(marks.tensors)
                found.append(marks)
            else:
                found.append(HostMarks(num_rows, kernel.table_of_feature, copies=not kernel.receives_ids))
        return found

    # -- marking ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start marking."""
        self._handles = [
            kernel.kernel.register_forward_hook(self._watch(number), with_kwargs=True)
            for number, kernel in enumerate(self._kernels)
        ]

    def detach(self) -> None:
        """Stop marking, and wait for a running copy on the host."""
        for handle in self._handles:
            handle.remove()
        self._copier.shutdown()

    def _watch(self, kernel: int) -> Callable[..., None]:
        def looked_up(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], answer: Any) -> None:
            node = answer.grad_fn if isinstance(answer, Tensor) else None
            if node is not None:
                node.register_prehook(lambda _: self._before_update(kernel, args, kwargs))

        return looked_up

    def _before_update(self, kernel: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Mark the rows that a backward is about to write, after a running copy has read their old values."""
        if self._copy is not None or self._is_whole is None:
            self.settle()
            self.wait_copied()  # on a device every stream that writes tables must wait, not only the first
        indices = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets = kwargs["offsets"] if "offsets" in kwargs else args[1]
        sizes = kwargs.get("batch_size_per_feature_per_rank")
        batch_sizes = None if sizes is None else tuple(sum(of_feature) for of_feature in sizes)
        self._marks[kernel].add(indices, offsets, batch_sizes)

    def mark(self, name: str, rows: Tensor) -> None:
        """Mark rows of a table on this rank.

        Args:
            name: Name of the table's weight in the unsharded model.
            rows: Row numbers in the unsharded table, `(N,)`, int64, on the host; rows of other ranks are skipped.
        """
        for number, kernel in enumerate(self._kernels):
            for table, shard in enumerate(kernel.shards):
                if shard.name == name:
                    own = rows - shard.first_row
                    own = own[(own >= 0) & (own < shard.weight.shape[0])]
                    self._marks[number].add_rows(table, own)

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return sum(marks.most for marks in self._marks)

    def marked(self) -> dict[str, Tensor]:
        """Return table -> marked row numbers in the unsharded table, `(N,)`, int64, on the host."""
        found: dict[str, Tensor] = {}
        for kernel, marks in zip(self._kernels, self._marks, strict=True):
            for shard, rows_N in zip(kernel.shards, marks.rows(), strict=True):
                before = found.get(shard.name, rows_N.new_empty(0))
                found[shard.name] = torch.cat([before, rows_N + shard.first_row])
        return found

    @property
    def num_pending(self) -> int:
        """Number of trained batches with pending table updates."""
        return self._num_pending()

    # -- reading ------------------------------------------------------------------------------------------------

    def copy(self) -> RowCopy:
        """Begin to copy the marked rows, and remove their marks; `settle` tells whether the copy is consistent."""
        self.wait_copied()
        marks = self._marks
        self._writes_before, self._is_whole = self.num_writes, None
        if self._on_device:
            kernels = zip(self._kernels, marks, strict=True)
            self._copy = DeviceCopy(kernels, self._order, self._to_host, states=self._states)
            return self._copy
        # The spare marks, of the previous copy, are empty.
        self._marks, self._spare_marks = self._spare_marks or self._new_marks(), marks
        self._copy = HostCopy(self._copier.submit(self._copy_on_host, marks), self._kept)
        return self._copy

    def settle(self) -> bool:
        """Wait for the last copy; return False if tables were written meanwhile, so that the copy may be inconsistent.

        The first update after the copy also calls this.
        """
        if self._is_whole is None:
            self.wait_copied()
            self._is_whole = self.num_writes == self._writes_before
        return self._is_whole

    def wait_copied(self) -> None:
        """Wait until the last copy has read its rows: on a CPU the host waits, on a device the current stream."""
        if self._copy is not None:
            self._copy.wait_copied()
            if not self._on_device:
                self._copy = None  # on a device other streams have not waited

    def _copy_on_host(self, marks: list[HostMarks]) -> tuple[list[CopiedRows], Tensor]:
        rows = [rows_N for of_kernel in marks for rows_N in of_kernel.take()]
        return copy_on_host(self.fields, rows, self._kept)

    @property
    def fields(self) -> list[tuple[TableShard, Fields]]:
        """The shards of all fused tables on this rank, each with its fields."""
        return [shard for kernel in self._kernels for shard in fields_of(kernel, states=self._states)]

    @property
    def num_writes(self) -> int:
        """In-place writes to this rank's fused tables, except by their backward, plus `tables_changed()` calls."""
        return sum(write for module in self._modules for write in num_fused_writes(module)) + self._order.num_told

    def begin_base(self) -> list[list[Window]]:
        """Return windows of all rows of this rank's shards, and remove all marks."""
        self.wait_copied()
        self._marks = self._new_marks()
        for kernel in self._kernels:
            kernel.write_back_cache()
        return windows_of(self.fields)
