"""Which raw id each row under managed collisions stands for, and what changed since the last cut."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from ...checkpoint import counting_modules, weight_of
from ...compat.torch import num_writes
from ...compat.torchrec import ROWS_OF_IDS, SEGMENTS, SORTED_IDS, first_row, hash_of
from ...updated_rows import to_host
from ..files import EVICTED_ID, NO_ID, RAW_ID, RawIds, Rows

IdsCopy: TypeAlias = list[tuple[Tensor, Tensor] | None]  # of each table: ids and their rows; None: as before


class _Table(NamedTuple):
    weight: str
    num_rows: int  # of all shards
    first_row: int
    module: MCHManagedCollisionModule
    described: RawIds

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.module.get_buffer(SORTED_IDS), self.module.get_buffer(ROWS_OF_IDS)


class IdSource:
    """The raw ids of this rank's rows; holds those that were sent last, 8 bytes for each row."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[_Table] = []
        for name, module in counting_modules(model).items():
            segments = tuple(row for row in module.get_buffer(SEGMENTS).tolist() if row >= 0)
            hash_size, is_hashed = hash_of(module)
            described = RawIds(
                module=name,
                sorted_ids=f"{name}.{SORTED_IDS}",
                rows_of_ids=f"{name}.{ROWS_OF_IDS}",
                segments=segments,
                hash_size=hash_size,
                is_hashed=is_hashed,
            )
            self._tables.append(_Table(weight_of(model, name), segments[-1], first_row(module), module, described))
        self.forget()

    def forget(self) -> None:
        """Forget what was sent, so that all rows count as changed."""
        self._sent: list[Tensor | None] = [None] * len(self._tables)
        self._versions: list[object] = [None] * len(self._tables)

    @property
    def described(self) -> dict[str, RawIds] | None:
        """How ids get their rows, by table; the same on all ranks. None if there is no such table."""
        return {table.weight: table.described for table in self._tables} or None

    @property
    def is_changed(self) -> bool:
        """Whether an id may have got or lost a row since the last copy."""
        return self._now() != self._versions

    @property
    def sizes(self) -> list[int]:
        """How many rows this rank has of each table."""
        return [table.module.output_size() for table in self._tables]

    def _now(self) -> list[object]:
        return [tuple((id(buffer), num_writes(buffer)) for buffer in table.buffers) for table in self._tables]

    def copy(self) -> IdsCopy:
        """Begin to copy the ids of tables in which any changed; on a device on the current stream, without waiting."""
        before, self._versions = self._versions, self._now()
        return [
            None if now == old else (to_host(table.buffers[0]), to_host(table.buffers[1]))
            for table, now, old in zip(self._tables, self._versions, before, strict=True)
        ]

    def rows(self, copy: IdsCopy) -> list[Rows]:
        """Return the ids of rows that changed since the last call's copy, and the ids that are known no more."""
        found = []
        for number, (table, copied) in enumerate(zip(self._tables, copy, strict=True)):
            if copied is None:
                continue
            ids, rows = copied
            now = torch.empty_like(ids)
            now[rows - table.first_row] = ids
            before, self._sent[number] = self._sent[number], now
            changed = torch.arange(len(now)) if before is None else (now != before).nonzero().squeeze(1)
            if len(changed):
                found.append(_rows(table, RAW_ID, changed, now))
            if before is not None:
                lost = changed[(before[changed] != NO_ID) & ~torch.isin(before[changed], now[changed])]
                if len(lost):
                    found.append(_rows(table, EVICTED_ID, lost, before))
        return found


def _rows(table: _Table, field: str, rows: Tensor, ids: Tensor) -> Rows:
    return Rows(table.weight, field, (table.num_rows, 1), 0, rows + table.first_row, ids[rows].unsqueeze(1))
