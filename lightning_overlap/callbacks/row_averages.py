"""Exponential moving averages of a kernel's rows (N ids, R rows, D columns), which visit only rows that are updated."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..tables import KernelShards
from ..updated_rows import RowNumbers, ids_by_table

CHUNK_BYTES = 16 << 20  # most bytes that a pass over a whole table works on at once


def uncounted(tensor: Tensor) -> Tensor:
    """Return a view whose in-place writes do not count as the user's (`Tensor._version`)."""
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def chunks(tensor_RD: Tensor) -> Iterator[slice]:
    """Yield slices of rows of up to `CHUNK_BYTES`."""
    if not tensor_RD.numel():
        return
    row_bytes = tensor_RD.numel() // tensor_RD.shape[0] * tensor_RD.element_size()
    num_rows = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, tensor_RD.shape[0], num_rows):
        yield slice(first, first + num_rows)


class RowAverages:
    """Averages of the rows of some tables of a fused kernel, each brought up to date right before its row changes.

    While a row w is constant, n samples move its average e to `w + decay**n * (e - w)`. So a row is visited only when
    a backward is about to update it: w still has the value of the last sample then. `averages` has index of a shard in
    the kernel -> memory of its averages, `(rows, columns)`; each row also has the number of its last sample, int32.
    """

    def __init__(self, kernel: KernelShards, averages: Mapping[int, Tensor], decay: float) -> None:
        self._features, self._decay = kernel.table_of_feature, decay
        self._weights = {table: uncounted(kernel.shards[table].weight.detach()) for table in averages}
        self._averages = dict(averages)
        self._done = {
            table: torch.zeros(len(average), dtype=torch.int32, device=average.device)
            for table, average in averages.items()
        }
        self._num_samples = 0
        weights = [shard.weight for shard in kernel.shards]
        self._numbers: RowNumbers | None = None  # on a device
        if weights[0].device.type != "cpu":
            self._numbers = RowNumbers([len(one) for one in weights], kernel.table_of_feature, weights[0].device)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of the averages, and what belongs to it."""
        return [*self._averages.values(), *self._done.values(), *(self._numbers.tensors if self._numbers else ())]

    def begin(self, num_samples: int) -> None:
        """Take the averages as those of all rows after `num_samples` samples."""
        self._num_samples = num_samples
        for done_R in self._done.values():
            done_R.fill_(num_samples)

    def before_update(self, indices_N: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None) -> None:
        """Bring the rows of a lookup up to date, right before its backward updates them, on the current stream."""
        if not self._num_samples or not indices_N.numel():
            return
        if self._numbers is None:
            for table, ids_N in ids_by_table(indices_N, offsets, batch_sizes, self._features):
                if table in self._averages and len(ids_N):
                    num_rows = len(self._weights[table])
                    rows_N = ids_N * ((ids_N >= 0) & (ids_N < num_rows))
                    behind = self._done[table].index_select(0, rows_N) < self._num_samples
                    self._bring(table, rows_N[behind])
            return
        rows_N = self._numbers.of(indices_N, offsets, batch_sizes)
        for table in self._averages:
            # Without a sync it is not known which ids are of this table. Row 0 may be brought up to date at any time.
            own_N = rows_N - self._numbers.first_rows[table]
            self._bring(table, own_N * ((own_N >= 0) & (own_N < len(self._weights[table]))))

    def _bring(self, table: int, rows_N: Tensor) -> None:
        rows_N = rows_N.long()  # a row may come twice: both times the same is written
        average_RD, done_R = self._averages[table], self._done[table]
        gain_N = self._gain(done_R.index_select(0, rows_N), average_RD.dtype)
        average_ND, weight_ND = average_RD.index_select(0, rows_N), self._weights[table].index_select(0, rows_N)
        average_RD.index_copy_(0, rows_N, torch.lerp(average_ND, weight_ND, gain_N.unsqueeze(1)))
        done_R.index_fill_(0, rows_N, self._num_samples)

    def _gain(self, done_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight `(N,)` of the present row against its average: 1 - decay**n for n missing samples."""
        behind_N = (self._num_samples - done_N).double()
        return (1 - torch.pow(self._decay, behind_N)).to(dtype)

    def sample(self, *, visits_all: bool) -> None:
        """Count a sample of the rows as they are now; `visits_all`: also bring all rows up to date."""
        self._num_samples += 1
        if visits_all:
            self.bring_all()

    def bring_all(self) -> None:
        """Bring all rows up to date, on the current stream."""
        for table, average_RD in self._averages.items():
            weight_RD, done_R = self._weights[table], self._done[table]
            for rows in chunks(average_RD):
                if done_R.device.type == "cpu" and bool((done_R[rows] == self._num_samples).all()):
                    continue
                gain_N = self._gain(done_R[rows], average_RD.dtype)
                average_RD[rows].lerp_(weight_RD[rows], gain_N.unsqueeze(1))
            done_R.fill_(self._num_samples)
