"""Marks on the rows of a kernel's tables: ids on a host, flags on a device (N ids, F features, T tables, R rows)."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

FLAGGED_FROM = 2  # ids per row of a table from which flagging its rows is faster than sorting the ids

_Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
IdsT = TypeVar("IdsT", _Ids, Tensor)


class HostMarks:
    """Keeps the ids of lookups; `copies` them, as on one rank they may be in a batch whose memory the loader reuses."""

    def __init__(self, num_rows: Sequence[int], table_of_feature: Sequence[int], *, copies: bool = True) -> None:
        self._copies = copies
        self._num_rows, self._table_of_feature = tuple(num_rows), tuple(table_of_feature)
        self._num_all_rows = sum(num_rows)
        self._clear()

    def _clear(self) -> None:
        # number of ids, ids, offsets (None: they follow the ids), batch sizes
        self._lookups: list[tuple[int, Tensor, Tensor | None, tuple[int, ...] | None]] = []
        self._num_ids = self._num_kept = 0
        self._rows: list[list[Tensor]] = [[] for _ in self._num_rows]

    def add(self, indices_N: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None) -> None:
        """Mark the rows of a lookup: ids feature by feature, starts of bags, features' batch sizes (None: equal)."""
        num_ids = indices_N.numel()
        if not num_ids:  # without bags the offsets may be invalid
            return
        # by one operator: between two steps each operator is slow, as its code is not cached
        kept_N, beside = (torch.cat((indices_N, offsets)), None) if self._copies else (indices_N, offsets)
        self._lookups.append((num_ids, kept_N, beside, batch_sizes))
        self._num_ids += num_ids
        self._num_kept += kept_N.numel()
        if self._num_kept > 2 * self._num_all_rows:
            for table, rows_N in enumerate(self.take()):
                self.add_rows(table, rows_N)

    def add_rows(self, table: int, rows_N: Tensor) -> None:
        """Mark rows `(N,)`, int64, of one table."""
        self._rows[table].append(rows_N)
        self._num_ids += rows_N.numel()
        self._num_kept += rows_N.numel()

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return min(self._num_ids, self._num_all_rows)

    def rows(self) -> list[Tensor]:
        """Return the distinct marked rows of each table, `(N,)`, int64, ascending."""
        # By NumPy: torch releases the GIL in each operator, and each time this thread disturbs the training thread.
        ids = [[rows_N.numpy() for rows_N in rows] for rows in self._rows]
        for num_ids, kept_N, offsets, batch_sizes in self._lookups:
            ids_N = kept_N.numpy()
            on_host = ids_N[num_ids:] if offsets is None else offsets.numpy()
            for table, of_feature in ids_by_table(ids_N, on_host, batch_sizes, self._table_of_feature):
                ids[table].append(of_feature)
        return [_unique(found, num_rows) for found, num_rows in zip(ids, self._num_rows, strict=True)]

    def take(self) -> list[Tensor]:
        """Return `rows()`, and remove the marks."""
        rows = self.rows()
        self._clear()
        return rows


def ids_by_table(
    ids_N: IdsT, offsets: Any, batch_sizes: tuple[int, ...] | None, table_of_feature: Sequence[int]
) -> Iterator[tuple[int, IdsT]]:
    """Yield (table, ids) for each feature of a lookup on the host; arrays or tensors, as for `HostMarks.add`."""
    ends = offsets[_boundaries(len(table_of_feature), len(offsets), batch_sizes)].tolist()
    for feature, table in enumerate(table_of_feature):
        yield table, ids_N[ends[feature] : ends[feature + 1]]


def _boundaries(num_features: int, num_offsets: int, batch_sizes: tuple[int, ...] | None) -> slice | list[int]:
    """Return the indices of the F + 1 offsets at which the ids of features start, and the last feature's end."""
    if batch_sizes is not None:
        return [0, *accumulate(batch_sizes)]
    batch_size = max(1, (num_offsets - 1) // max(1, num_features))
    return slice(0, num_features * batch_size + 1, batch_size)


def _unique(ids: list[_Ids], num_rows: int) -> Tensor:
    if not ids:
        return torch.empty(0, dtype=torch.int64)
    ids_N = np.concatenate(ids)
    if ids_N.size < FLAGGED_FROM * num_rows:
        rows_N = _sorted(ids_N)
        if rows_N.size and not 0 <= rows_N[0] <= rows_N[-1] < num_rows:
            rows_N = _sorted(valid(rows_N, num_rows))
        return torch.from_numpy(rows_N.astype(np.int64, copy=False))
    flags_R = np.zeros(num_rows, dtype=bool)
    flags_R[valid(ids_N, num_rows)] = True
    return torch.from_numpy(np.flatnonzero(flags_R))


def _sorted(sorted_N: _Ids) -> _Ids:
    """Sort ids in place and return distinct ids. NumPy sorts integers up to ten times as fast as torch on a host."""
    sorted_N.sort()
    is_first_N = np.ones(len(sorted_N), dtype=bool)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
    return sorted_N[is_first_N]


def valid(ids_N: Any, num_rows: Any) -> Any:
    """Return the ids with 0 for ids out of bounds: for these, a kernel that checks bounds updates row 0."""
    return ids_N * ((ids_N >= 0) & (ids_N < num_rows))


class RowNumbers:
    """Numbers the rows of a kernel's tables on a device, table by table; on the current stream, without syncs."""

    def __init__(self, num_rows: Sequence[int], table_of_feature: Sequence[int], device: torch.device) -> None:
        first = [0, *accumulate(num_rows)]
        self.ends_T = torch.tensor(first[1:], device=device)  # number of each table's last row + 1; int64
        self.first_rows = tuple(first)  # number of each table's first row, and the last row's number + 1
        self._first_F = torch.tensor([first[table] for table in table_of_feature], device=device)
        self._num_rows_F = torch.tensor([num_rows[table] for table in table_of_feature], device=device)
        self.tensors = [self.ends_T, self._first_F, self._num_rows_F]  # for `record_stream`

    def of(self, indices_N: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None) -> Tensor:
        """Return the number, `(N,)`, int64, of the row of each id of a lookup; arguments as for `HostMarks.add`."""
        places = _boundaries(self._first_F.numel(), offsets.numel(), batch_sizes)
        if isinstance(places, slice):
            ends = offsets[places]
        else:
            on_host = torch.tensor(places, pin_memory=offsets.is_cuda)
            ends = offsets.index_select(0, on_host.to(offsets.device, non_blocking=True))
        positions_N = torch.arange(indices_N.numel(), device=indices_N.device)
        feature_N = torch.searchsorted(ends[1:].long().contiguous(), positions_N, right=True)
        feature_N.clamp_(max=self._first_F.numel() - 1)
        rows_N: Tensor = valid(indices_N.long(), self._num_rows_F[feature_N]) + self._first_F[feature_N]
        return rows_N


class DeviceMarks:
    """Keeps a flag for each row, numbered table by table, on a device; on the current stream, without syncs."""

    def __init__(self, num_rows: Sequence[int], table_of_feature: Sequence[int], device: torch.device) -> None:
        self._numbers = RowNumbers(num_rows, table_of_feature, device)
        self.ends_T, self.first_rows = self._numbers.ends_T, self._numbers.first_rows
        self._flags_R = torch.zeros(self.first_rows[-1], dtype=torch.bool, device=device)
        self.tensors = [*self._numbers.tensors, self._flags_R]  # for `record_stream`
        self._num_ids = 0

    def add(self, indices_N: Tensor, offsets: Tensor, batch_sizes: tuple[int, ...] | None) -> None:
        """Mark the rows of a lookup; arguments as for `HostMarks.add`, on the device."""
        num_ids = indices_N.numel()
        if not num_ids:
            return
        rows_N = self._numbers.of(indices_N, offsets, batch_sizes)
        self._flags_R.index_fill_(0, rows_N, True)
        self._num_ids += num_ids

    def add_rows(self, table: int, rows_N: Tensor) -> None:
        """Mark rows `(N,)`, int64, on the host, of one table."""
        if rows_N.numel():
            self._flags_R.index_fill_(0, (rows_N + self.first_rows[table]).to(self._flags_R.device), True)
            self._num_ids += rows_N.numel()

    @property
    def most(self) -> int:
        """An upper bound of the number of marked rows."""
        return min(self._num_ids, self.first_rows[-1])

    def rows(self) -> list[Tensor]:
        """Wait for the device, and return the marked rows of each table, `(N,)`, int64, on the host."""
        flags_R = self._flags_R.cpu()
        return [flags_R[first:end].nonzero().squeeze(1) for first, end in pairwise(self.first_rows)]

    def take(self) -> tuple[Tensor, Tensor]:
        """Remove the marks; return the rows, `(most,)`, ascending, padded with 0, and their number, on the device."""
        rows = torch.nonzero_static(self._flags_R, size=self.most, fill_value=0).squeeze(1)
        num_marked = self._flags_R.sum()
        self._flags_R.zero_()
        self._num_ids = 0
        return rows, num_marked
