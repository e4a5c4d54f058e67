"""Marks on the rows that the fused backward has updated since the marks were taken."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..compat.torch import num_writes
from ..compat.torchrec import watch_evictions
from ..runtime import TableAccess
from ..tables import check_assigned_rows, hands_out_rows, kernel_shards, num_fused_writes, sharded_modules
from .row_marks import DeviceMarks, HostMarks
from .update_watch import UpdateWatch


class MarkedRows:
    """Marks rows of fused tables right before a backward updates them; `before_update` is called before it marks.

    `kernels` have the fused tables of this rank, `others` the tables without marks: the dense optimizer's and
    replicated tables. Rows are also marked when they are reset for new ids. Raises a ValueError for rows that cannot be
    read by number, and for managed collision modules other than `MCHManagedCollisionModule`. With `states` writes to
    optimizer state are counted, too.
    """

    def __init__(
        self,
        model: nn.Module,
        access: TableAccess,
        before_update: Callable[[], None],
        *,
        states: bool = False,
    ) -> None:
        check_assigned_rows(model)
        kernels = kernel_shards(model)
        self.kernels = [kernel for kernel in kernels if kernel.is_fused]
        self.others = [kernel for kernel in kernels if not kernel.is_fused]
        self._modules = list(sharded_modules(model).values())
        of_shards = [kinds for kernel in self.kernels if states for kinds in kernel.states()]
        self._states = [state for kinds in of_shards for state in kinds.values()]  # each shares its write count
        self._access, self._before_update = access, before_update
        self.marks = self.new_marks()
        self._watch = UpdateWatch(self.kernels, self._mark_lookup)
        self._num_reset_writes = self._num_reset_state_writes = 0
        self._unwatch = [
            watch_evictions(module, partial(self._resetting, name, module))
            for name, module in sharded_modules(model).items()
            if hands_out_rows(module)
        ]

    def detach(self) -> None:
        """Stop marking."""
        self._watch.detach()
        for stop in self._unwatch:
            stop()
        self._unwatch = []

    def new_marks(self) -> list[HostMarks | DeviceMarks]:
        """Return marks without any row, by kernel."""
        found: list[HostMarks | DeviceMarks] = []
        for kernel in self.kernels:
            num_rows = [shard.weight.shape[0] for shard in kernel.shards]
            if self._access.streams.is_async:
                marks = DeviceMarks(num_rows, kernel.table_of_feature, kernel.shards[0].weight.device)
                self._access.give_to_updates(marks.tensors)
                found.append(marks)
            else:
                found.append(HostMarks(num_rows, kernel.table_of_feature, copies=not kernel.receives_ids))
        return found

    def _mark_lookup(self, kernel: int, indices: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None) -> None:
        self._before_update()
        self.marks[kernel].add(indices, offsets, batch_sizes)

    @contextmanager
    def _resetting(self, name: str, module: nn.Module, rows: Mapping[str, Tensor]) -> Iterator[None]:
        """Mark the rows that a module resets in this context, by table; its writes do not count in `num_writes`."""
        self._before_update()
        before, of_states = sum(num_fused_writes(module)), self._num_state_writes
        yield
        self._num_reset_writes += sum(num_fused_writes(module)) - before
        self._num_reset_state_writes += self._num_state_writes - of_states
        for kernel, marks in zip(self.kernels, self.marks, strict=True):
            for number, shard in enumerate(kernel.shards):
                table = shard.name.split(".")[-2]
                if shard.name.startswith(f"{name}.") and table in rows:
                    marks.add_rows(number, rows[table].long())

    def mark(self, name: str, rows: Tensor) -> None:
        """Mark rows `(N,)`, int64, on the host, of an unsharded table by its name; rows of other ranks are skipped."""
        for kernel, marks in zip(self.kernels, self.marks, strict=True):
            for table, shard in enumerate(kernel.shards):
                if shard.name == name:
                    own = rows - shard.first_row
                    marks.add_rows(table, own[(own >= 0) & (own < shard.weight.shape[0])])

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return sum(marks.most for marks in self.marks)

    def marked(self) -> list[dict[str, Tensor]]:
        """Return, for each shard, table -> marked row numbers in the unsharded table, `(N,)`, int64, on the host."""
        return [
            {shard.name: rows_N + shard.first_row}
            for kernel, marks in zip(self.kernels, self.marks, strict=True)
            for shard, rows_N in zip(kernel.shards, marks.rows(), strict=True)
        ]

    @property
    def num_writes(self) -> int:
        """In-place writes to this rank's fused tables, except marked ones, plus `tables_changed()` calls.

        With `states` those to their optimizer state count, too.
        """
        return self.num_weight_writes + self._num_state_writes - self._num_reset_state_writes

    @property
    def num_weight_writes(self) -> int:
        """The same without optimizer state."""
        return num_other_writes(self._modules, self._access) - self._num_reset_writes

    @property
    def _num_state_writes(self) -> int:
        return sum(map(num_writes, self._states))


def num_other_writes(modules: list[torch.nn.Module], access: TableAccess) -> int:
    """Return the number of writes to this rank's fused tables, except by backwards, plus `tables_changed()` calls."""
    return sum(write for module in modules for write in num_fused_writes(module)) + access.num_changed
