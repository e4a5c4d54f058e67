"""Raw ids of tables under managed collisions: which row each has, and which row unknown ids get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..files import EVICTED_ID, NO_ID, RAW_ID, Header, RawIds, Rows
from .covered_rows import CoveredRows, TablesError


def shards_of(ids: Tensor, hash_size: int, num_shards: int) -> Tensor:
    """Return the shard that looks each id up, `(N,)`, int64, on any device, as FBGEMM divides ids among ranks.

    Ids are unsigned 64-bit numbers there: those below `hash_size`, rounded up, in ranges, others by their remainder.
    """
    in_a_shard = -(-hash_size // num_shards)
    # A negative id is 2**64 more.
    remainders = (ids % num_shards + (ids < 0) * ((1 << 64) % num_shards)) % num_shards
    if in_a_shard == 0:
        return remainders
    end = in_a_shard * num_shards
    is_within = ids >= 0 if end > NO_ID else (ids >= 0) & (ids < end)
    return torch.where(is_within, ids // in_a_shard, remainders)


def rows_of(raw: Tensor, sorted_ids: Tensor, rows: Tensor, described: RawIds) -> tuple[Tensor, Tensor]:
    """Return the row of each raw id, of any integer dtype, and whether it is known; `sorted_ids` ends with `NO_ID`.

    An unknown id gets the last row of its shard, as in the trained module.
    """
    ids = raw.long()
    places = torch.searchsorted(sorted_ids, ids)
    is_known = (sorted_ids[places] == ids) & (ids != NO_ID)
    ends = torch.tensor(described.segments[1:], device=ids.device)
    unknown = ends[shards_of(ids, described.hash_size, len(ends))] - 1
    return torch.where(is_known, rows[places], unknown), is_known


@dataclass(frozen=True, slots=True, eq=False)
class KnownIds:
    """The raw ids of a table; tensors are on the host and never written."""

    described: RawIds
    id_of_row: Tensor  # (rows,), int64: `NO_ID` for a row that has no id
    sorted_ids: Tensor  # (rows,), int64: ascending, `NO_ID` at the end
    rows_of_ids: Tensor  # (rows,), int64: the row of each of them; in the end the rows without an id, ascending

    @classmethod
    def of(cls, described: RawIds, id_of_row: Tensor, before: KnownIds | None = None) -> KnownIds:
        """Sort the ids of rows; with those `before` only what changed is sorted."""
        now = id_of_row.numpy()
        if before is None:
            changed = np.arange(len(now))
            ids, rows = now[:0], changed[:0]
        else:
            changed = np.flatnonzero(now != before.id_of_row.numpy())
            gone, sorted_before = before.id_of_row.numpy()[changed], before.sorted_ids.numpy()
            kept = np.ones(len(sorted_before), dtype=bool)
            kept[np.searchsorted(sorted_before, gone[gone != NO_ID])] = False
            kept &= sorted_before != NO_ID
            ids, rows = sorted_before[kept], before.rows_of_ids.numpy()[kept]
        new_rows = changed[now[changed] != NO_ID]
        new_rows = new_rows[np.argsort(now[new_rows], kind="stable")]
        places = np.searchsorted(ids, now[new_rows])
        free = np.flatnonzero(now == NO_ID)
        sorted_ids = np.concatenate([np.insert(ids, places, now[new_rows]), now[free]])
        rows_of_ids = np.concatenate([np.insert(rows, places, new_rows), free])
        return cls(described, id_of_row, torch.from_numpy(sorted_ids), torch.from_numpy(rows_of_ids))

    def check(self, table: str) -> None:
        """Raise a TablesError if two rows have one id, or a row for unknown ids has one."""
        ids = self.sorted_ids[self.sorted_ids != NO_ID]
        if (ids[1:] == ids[:-1]).any():
            raise TablesError(f"two rows of {table} would have the same raw id. Do all files come from one training?")
        if (self.id_of_row[torch.tensor(self.described.segments[1:]) - 1] != NO_ID).any():
            raise TablesError(f"a row of {table} for unknown ids would have a raw id. Who wrote these files?")


class ComingIds:
    """The raw ids that the files of a move bring; nothing is written."""

    def __init__(self, known: Mapping[str, KnownIds], *, begins: bool) -> None:
        self._known, self._begins = {} if begins else known, begins
        self._rows: dict[str, list[Rows]] = {}
        self._covered = CoveredRows()
        self._evicted: dict[str, Tensor] = {}  # of the last cut

    def add(self, entry: Rows) -> None:
        """Note a checked entry."""
        if entry.field == RAW_ID:
            self._rows.setdefault(entry.table, []).append(entry)
            if self._begins:
                self._covered.add(entry)
        elif entry.field == EVICTED_ID:
            self._evicted[entry.table] = entry.values

    def known(self, header: Header) -> dict[str, KnownIds]:
        """Return what is known after the move; raise a TablesError if the files do not agree on it."""
        described = header.raw_ids or {}
        if self._begins and len(self._rows):
            self._covered.check(header, {table: (header.tables[table][0], 1) for table in described})
        found: dict[str, KnownIds] = {}
        for table, how in described.items():
            before, entries = self._known.get(table), self._rows.get(table, [])
            if before is None and not (self._begins and entries):
                raise TablesError(f"generation {header.generation}, step {header.step} lacks the raw ids of {table}.")
            if before is not None and before.described != how:
                raise TablesError(
                    f"generation {header.generation}, step {header.step} gives ids of {table} rows in another way, "
                    "without a base."
                )
            if before is not None and not entries:
                found[table] = before
                continue
            now = torch.full((how.segments[-1],), NO_ID) if before is None else before.id_of_row.clone()
            for entry in entries:
                now[entry.rows] = entry.values.squeeze(1)
            found[table] = KnownIds.of(how, now, before)
            found[table].check(table)
        for table, lost in self._evicted.items():
            if torch.isin(lost, found[table].id_of_row).any():
                raise TablesError(
                    f"generation {header.generation}, step {header.step} says that raw ids of {table} are evicted, "
                    "which have a row."
                )
        return found


class Remap:
    """Stands in for the method `remap` of an unsharded managed collision module: unknown ids as in the trained one."""

    def __init__(self, module: nn.Module, described: RawIds) -> None:
        self._module, self._described = module, described

    def __call__(self, features: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Return features, JaggedTensors, with rows in the place of ids."""
        named = dict(self._module.named_buffers(self._described.module))
        sorted_ids, rows = named[self._described.sorted_ids], named[self._described.rows_of_ids]
        found = {}
        for name, ids in features.items():
            values = rows_of(ids.values(), sorted_ids, rows, self._described)[0]
            found[name] = type(ids)(
                values.to(ids.values().dtype),
                lengths=ids.lengths(),
                offsets=ids.offsets(),
                weights=ids.weights_or_none(),
            )
        return found
