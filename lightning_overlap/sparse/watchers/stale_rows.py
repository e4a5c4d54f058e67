"""Count the stale rows of a lookup: rows that it reads before the update of an earlier batch has written them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ...runtime import Streams, Walker
from ...schedules import Stage, StreamName, WeightOwner
from ...tables import TABLE_TYPES, keys_in_backward, owners_of_parts, tables_in_backward
from ..shared import Shared
from ..sparse_batch import SparseBatch
from .watcher import LookedUp, Watcher

ROW_BITS = 40  # a row is counted as `table << ROW_BITS | row`, so that one pass counts all tables of a rank


@dataclass(frozen=True, slots=True)
class StaleCounts:
    """Stale rows of one batch over all ranks; the counts may still be under way (T tables)."""

    tables: tuple[str, ...]
    counts_T2: Tensor  # on the host, int64: distinct rows read stale, and distinct rows read, by table
    streams: Streams
    event: Any  # recorded after the copy to the host
    work: dist.Work | None = None  # the all-reduce over ranks, where the host waits for it: on a CPU

    @property
    def over(self) -> bool:
        """Whether the counts can be read; does not wait."""
        return self.streams.is_over(self.event) if self.work is None else self.work.is_completed()

    def wait(self) -> None:
        """Wait until the counts can be read."""
        if self.work is None:
            self.streams.let_host_wait(self.event)
        else:
            self.work.wait()

    def read(self) -> dict[str, tuple[int, int]]:
        """Return the stale rows and all rows that were read, by table; tables of which no row was read are left out."""
        counts = zip(self.tables, self.counts_T2.tolist(), strict=True)
        return {table: (stale, read) for table, (stale, read) in counts if read}


class StaleRows(Watcher):
    """Counts the stale rows of single batches: each rank those of its shards, then the ranks add up; no host wait."""

    def __init__(
        self,
        modules: Mapping[str, Any],
        shared: Shared,
        walker: Callable[[], Walker | None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._watchers, self._streams, self._walker, self._group = shared.watchers, shared.streams, walker, group
        # Replicas and tables of the dense optimizer are looked up after their update: no batch ahead has ids of theirs.
        self._modules = {
            name: one
            for name, one in modules.items()
            if isinstance(one, TABLE_TYPES) and WeightOwner.FUSED_BACKWARD in owners_of_parts(one)
        }
        fused = [(name, table) for name, one in self._modules.items() for table in tables_in_backward(one)]
        self._number = {key: number for number, key in enumerate(fused)}
        names = [table for _, table in fused]
        self.tables = tuple(table if names.count(table) == 1 else f"{name}.{table}" for name, table in fused)

    @property
    def staleness(self) -> int:
        """Staleness of the schedule that is walked now, in batches; 0 before the first batch."""
        walker = self._walker()
        return 0 if walker is None else walker.schedule.staleness

    def keep_ids(self, keep: bool) -> None:
        """Set whether coming lookups keep their ids; `count` needs the ids of the last `staleness + 1` lookups."""
        self._watchers.remove(self)
        if keep:
            self._watchers.add(self)

    @override
    def looks_up(self, flight: LookedUp) -> None:
        flight.ids = flight.dist_input  # gone with the batch, also if the fit fails

    def count(self) -> StaleCounts | None:
        """Start to count the rows of the batch looked up last, if it missed updates; all ranks call this together."""
        walker = self._walker()
        batches = [] if walker is None else _looked_up_last(walker.batches.in_flight)  # type: ignore[arg-type]
        if not batches:
            return None
        ids: dict[str, list[Any]] = {
            name: [getattr(one.modules.get(name), "ids", None) for one in batches]
            for name in self._modules
            if name in batches[0].modules
        }
        # A module that ran in its own forward in one of these batches has no ids of it, on all ranks alike.
        ids = {name: of_module for name, of_module in ids.items() if None not in of_module}
        kept = [kjts for of_module in ids.values() for kjts in of_module]
        if not kept:
            return None
        self._streams.use(self._streams.made(kept, on=self._streams.lookup), on=StreamName.SIDE)
        with self._streams.on(StreamName.SIDE), torch.no_grad():
            counts = self._count(ids)
        batches[0].counted = counts  # so that a failed fit frees the counts with the batch
        return counts

    def _count(self, ids: Mapping[str, Sequence[Any]]) -> StaleCounts:
        device = getattr(self._streams[StreamName.SIDE], "device", "cpu")
        counts_T2 = torch.zeros(len(self.tables), 2, dtype=torch.int64, device=device)
        for name, (read, *unseen) in ids.items():
            keys = keys_in_backward(self._modules[name])
            places = [(part, key, self._number[name, table]) for part, key, table in keys]
            if places:
                add_counts(counts_T2, _rows(read, places), torch.cat([_rows(one, places) for one in unseen]))
        work = None if self._group is None else dist.all_reduce(counts_T2, group=self._group, async_op=True)
        if not self._streams.is_async:
            return StaleCounts(self.tables, counts_T2, self._streams, None, work)
        if work is not None:
            work.wait()  # lets this stream wait, not the host
        on_host = torch.empty(counts_T2.shape, dtype=counts_T2.dtype, pin_memory=counts_T2.is_cuda)
        on_host.copy_(counts_T2, non_blocking=True)
        return StaleCounts(self.tables, on_host, self._streams, self._streams.record(StreamName.SIDE))


def _looked_up_last(in_flight: Mapping[int, SparseBatch]) -> list[SparseBatch]:
    """Return the batch looked up last, then those whose updates it did not see; [] unless all are still in flight."""
    latest = max((index for index, batch in in_flight.items() if Stage.EMBEDDING_LOOKUP in batch.issued), default=None)
    if latest is None or not (num_unseen := in_flight[latest].num_unseen):
        return []
    numbers = [latest, *range(latest - num_unseen, latest)]
    return [in_flight[index] for index in numbers] if all(index in in_flight for index in numbers) else []


def _rows(ids: Any, places: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the rows of a module's received ids, without a host sync; `places`: part, key in it, number of table."""
    rows = []
    for part, key, table in places:
        first, end = ids[part].offset_per_key()[key : key + 2]
        of_key = ids[part].values()[first:end].long()
        of_key = of_key * (of_key >> ROW_BITS == 0)  # an id outside, negative ones too: the kernel has taken row 0
        rows.append(of_key + (table << ROW_BITS))
    return torch.cat(rows)


def add_counts(counts_T2: Tensor, read_N: Tensor, unseen_M: Tensor) -> None:
    """Add, by table, the rows that are both read and unseen, and the rows that are read; each row once."""
    # No size here depends on the ids: the host would have to wait for it.
    if not read_N.numel():
        return
    read_N = read_N.sort().values
    first_N = torch.ones_like(read_N, dtype=torch.bool)
    first_N[1:] = read_N[1:] != read_N[:-1]
    stale_N = torch.zeros_like(first_N)
    if unseen_M.numel():
        unseen_M = unseen_M.sort().values
        place_N = torch.searchsorted(unseen_M, read_N).clamp_(max=unseen_M.numel() - 1)
        stale_N = first_N & (unseen_M[place_N] == read_N)
    both_N2 = torch.stack([stale_N, first_N], dim=1).long()
    counts_T2.index_add_(0, read_N >> ROW_BITS, both_N2)
