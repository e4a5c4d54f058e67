"""The rows that updates have written since the last copy."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime import Made, Streams
from ...schedules import StreamName
from ...tables import kernel_shards, num_fused_writes, sharded_modules
from ..parts import Rows
from .copies import DeviceCopy, Field, HostCopy, KeptMemory, RowCopy, copy_on_host, fields_of
from .row_marks import DeviceMarks, HostMarks


class TouchedRows:
    """Marks rows when the fused backward writes them; copies marked rows, overlapped with the next forward.

    A forward hook of each kernel gets the ids of a lookup, and a hook of its output's autograd node runs right before
    the backward that updates these rows, in every mode. A lookup without a backward marks nothing. `dense` has the
    fields of tables without marks: the dense optimizer's and, on rank 0, replicated tables.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Streams,
        *,
        rank: int,
        states: bool = False,
        num_changed: Callable[[], int] = lambda: 0,  # calls of `tables_changed()` so far
    ) -> None:
        kernels = kernel_shards(model)
        self._modules = list(sharded_modules(model).values())
        self._kernels = [kernel for kernel in kernels if kernel.is_fused]
        self._streams, self._states, self._num_changed = streams, states, num_changed
        self._on_device = streams.is_async
        others = [kernel for kernel in kernels if not kernel.is_fused and not (kernel.is_replicated and rank)]
        self.dense = [field for kernel in others for fields in fields_of(kernel, states=states) for field in fields]
        self._marks = self._new_marks()
        self._spare_marks: list[Any] | None = None
        self._kept = KeptMemory()
        self._copier = ThreadPoolExecutor(1, "copy of touched rows")
        devices = [kernel.shards[0].weight.device for kernel in self._kernels]
        self._to_host = torch.cuda.Stream(devices[0]) if devices and devices[0].type == "cuda" else None
        self._copy: RowCopy | None = None
        self._writes_before = 0
        self._is_whole: bool | None = True
        self._handles = [
            kernel.kernel.register_forward_hook(self._watch(number), with_kwargs=True)
            for number, kernel in enumerate(self._kernels)
        ]

    def detach(self) -> None:
        """Stop marking, and wait for a running copy on the host."""
        for handle in self._handles:
            handle.remove()
        self._copier.shutdown()

    def _new_marks(self) -> list[Any]:
        found: list[DeviceMarks | HostMarks] = []
        for kernel in self._kernels:
            num_rows = [shard.weight.shape[0] for shard in kernel.shards]
            if self._on_device:
                marks = DeviceMarks(num_rows, kernel.table_of_feature, kernel.shards[0].weight.device)
                # New memory, which only updates use.
                self._streams.use(Made(marks.tensors, StreamName.COMPUTE, None), on=self._streams.lookup)
                found.append(marks)
            else:
                found.append(HostMarks(num_rows, kernel.table_of_feature, copies=not kernel.receives_ids))
        return found

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
        """Mark rows `(N,)`, int64, on the host, of an unsharded table by its name; rows of other ranks are skipped."""
        for kernel, marks in zip(self._kernels, self._marks, strict=True):
            for table, shard in enumerate(kernel.shards):
                if shard.name == name:
                    own = rows - shard.first_row
                    marks.add_rows(table, own[(own >= 0) & (own < shard.weight.shape[0])])

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return sum(marks.most for marks in self._marks)

    def marked(self) -> list[dict[str, Tensor]]:
        """Return, for each shard, table -> marked row numbers in the unsharded table, `(N,)`, int64, on the host."""
        return [
            {shard.name: rows_N + shard.first_row}
            for kernel, marks in zip(self._kernels, self._marks, strict=True)
            for shard, rows_N in zip(kernel.shards, marks.rows(), strict=True)
        ]

    def copy(self) -> RowCopy:
        """Begin to copy the marked rows, and remove their marks; `settle` tells whether the copy is consistent."""
        self.wait_copied()
        marks = self._marks
        self._writes_before, self._is_whole = self.num_writes, None
        if self._on_device:
            kernels = zip(self._kernels, marks, strict=True)
            self._copy = DeviceCopy(kernels, self._streams, self._to_host, states=self._states)
        else:  # the spare marks, of the previous copy, are empty
            self._marks, self._spare_marks = self._spare_marks or self._new_marks(), marks
            self._copy = HostCopy(self._copier.submit(self._copy_on_host, marks), self._kept)
        return self._copy

    def settle(self) -> bool:
        """Wait for the last copy; return False if tables were written meanwhile, so that it may be inconsistent."""
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

    def _copy_on_host(self, marks: list[HostMarks]) -> tuple[list[Rows], Tensor]:
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
        """In-place writes to this rank's fused tables, except by their backward, plus `tables_changed()` calls."""
        return sum(write for module in self._modules for write in num_fused_writes(module)) + self._num_changed()

    def begin_base(self) -> None:
        """Remove all marks, and bring the memory of all tables up to date."""
        self.wait_copied()
        self._marks = self._new_marks()
        for kernel in self._kernels:
            kernel.write_back_cache()
