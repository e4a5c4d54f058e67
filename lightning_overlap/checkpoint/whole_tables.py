"""Whole tables on the host, row by row, from the shards of all ranks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import Group, gather_objects
from ..tables import hands_out_rows, sharded_modules, spec_of, table_modules
from ..text import unknown_name_message
from .table_state import Piece, Window, first_owners, local_parts

BYTES_AT_ONCE = 1 << 26  # of a table, so much is sent at once: a part beside the rows themselves


class FoundTable(NamedTuple):
    """A table of a sharded model."""

    collection: Any  # the sharded collection
    name: str  # in its config

    def weight(self) -> Piece:
        """Return this rank's part; rows in a cache on the device are written back to the table first."""
        state: dict[str, Piece] = self.collection.state_dict()
        return next(weight for key, weight in state.items() if key.split(".")[-2] == self.name)


def find_table(model: nn.Module, name: str) -> FoundTable:
    """Find a table by its `name` in its config, or by the name of its module and that name, joined by a dot.

    Raises a ValueError if the name is unknown or not unique, or if the table's module assigns rows to ids.
    """
    found = {f"{module}.{one.name}": one for module, one in _tables(model)}
    paths = [name] if name in found else [path for path, one in found.items() if one.name == name]
    if len(paths) > 1:
        raise ValueError(f"several modules have a table {name!r}: ask for one of {', '.join(map(repr, paths))}.")
    if not paths:
        names = [one.name for one in found.values()]
        known = [one.name if names.count(one.name) == 1 else path for path, one in found.items()]
        raise ValueError(unknown_name_message("table", name, known))
    if (table := found[paths[0]]).collection is None:
        raise ValueError(
            f"{paths[0]!r} belongs to a managed collision module, which assigns rows to ids during training: its row "
            "numbers are not ids. Look its ids up by calling the module."
        )
    return table


def _tables(model: nn.Module) -> Iterator[tuple[str, FoundTable]]:
    """Yield the module's name and the table of each; without its collection if the module assigns rows to ids."""
    for outer_name, outer in sharded_modules(model).items():
        for inner_name, collection in table_modules(outer).items():
            # A module of a known kind has one collection: itself, or one inside it.
            is_inside = inner_name and spec_of(outer) is None
            for table in collection.module_sharding_plan:
                own = None if hands_out_rows(outer) else collection
                yield f"{outer_name}.{inner_name}" if is_inside else outer_name, FoundTable(own, table)


class TableReader:
    """Reads rows of a table from the shards of all ranks; every rank makes one and calls it alike."""

    def __init__(self, table: FoundTable, group: Group, to_rank: int | None) -> None:
        """Read for one rank, or for all of them (None)."""
        self._group, self._rank, self._to_rank = group, 0 if group is None else group.rank(), to_rank
        weight = table.weight()
        self._parts = local_parts(weight)
        windows = [window for window, _ in self._parts]
        everyone = gather_objects((tuple(weight.size()), weight.dtype, windows), group)
        (self.num_rows, self._num_columns), self._dtype, _ = everyone[0]
        self._owners: list[tuple[int, Window]] = first_owners([windows for _, _, windows in everyone])

    @torch.no_grad()
    def read(self, first_row: int, num_rows: int) -> Tensor | None:
        """Return rows on the host, `(num_rows, columns)`; None on a rank that gets none."""
        rows = None
        if self._to_rank in (None, self._rank):
            with torch.inference_mode(False):  # else a user could not train with the tensor
                rows = torch.empty((num_rows, self._num_columns), dtype=self._dtype)
        num_at_once = max(1, BYTES_AT_ONCE // max(1, self._num_columns * self._dtype.itemsize))
        end = first_row + num_rows
        for start in range(first_row, end, num_at_once):
            stop = min(start + num_at_once, end)
            self._read(start, stop, None if rows is None else rows[start - first_row : stop - first_row])
        return rows

    def _read(self, start: int, stop: int, rows: Tensor | None) -> None:
        """Fill `rows` with the rows from `start` to `stop`."""
        for owner, window in self._owners:
            (of_owner, columns), part = window, None
            first, last = max(start, of_owner.start), min(stop, of_owner.stop)
            if first >= last:
                continue
            if owner == self._rank:
                shard = next(shard for place, shard in self._parts if place == window)
                part = shard[first - of_owner.start : last - of_owner.start].cpu().contiguous()
            elif rows is not None:
                part = torch.empty((last - first, columns.stop - columns.start), dtype=self._dtype)
            if part is not None and self._group is not None and owner != self._to_rank:
                self._exchange(part, owner)
            if rows is not None and part is not None:
                rows[first - start : last - start, columns] = part

    def _exchange(self, part: Tensor, owner: int) -> None:
        """Send `part` from its owner to the rank that reads, or to all ranks; these receive it in `part`."""
        sent = part.view(torch.uint8)  # gloo knows few dtypes
        if self._to_rank is None:
            dist.broadcast(sent, group_src=owner, group=self._group)
        elif owner == self._rank:
            dist.send(sent, group_dst=self._to_rank, group=self._group)
        else:
            dist.recv(sent, group_src=owner, group=self._group)
