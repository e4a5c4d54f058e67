"""Whole tables on the host, row by row, from the shards of all ranks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from ..compat.torchrec import first_row, id_of_row
from ..distributed import Group, gather_objects
from ..tables import hands_out_rows, sharded_modules, spec_of, table_modules
from ..text import unknown_name_message
from .moved_ids import counting_modules
from .table_state import Piece, Window, first_owners, local_parts

BYTES_AT_ONCE = 1 << 26  # of a table, so much is sent at once: a part beside the rows themselves


class Parts(NamedTuple):
    """What a rank has of a tensor of rows and columns."""

    size: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    parts: Sequence[tuple[Window, Tensor]]


class FoundTable(NamedTuple):
    """A table of a sharded model."""

    collection: Any  # the sharded collection
    name: str  # in its config
    hands_out_rows: bool  # whether its module assigns rows to ids
    collisions: MCHManagedCollisionModule | None  # which then knows the ids; not of MPZCH

    def weight(self) -> Parts:
        """Return this rank's part; rows in a cache on the device are written back to the table first."""
        state: dict[str, Piece] = self.collection.state_dict()
        weight = next(weight for key, weight in state.items() if key.split(".")[-2] == self.name)
        return Parts(tuple(weight.size()), weight.dtype, local_parts(weight))

    def raw_ids(self) -> Parts:
        """Return the ids of this rank's rows, in one column; raise a ValueError if nothing knows them."""
        if self.collisions is None and not self.hands_out_rows:
            raise ValueError(f"{self.name!r} has no managed collision module: the ids are the numbers of its rows.")
        if self.collisions is None:
            raise ValueError(f"{self.name!r}: only the ids of MCHManagedCollisionModule can be read.")
        ids, first = id_of_row(self.collisions), first_row(self.collisions)
        (num_rows, _), *_ = self.weight()
        return Parts((num_rows, 1), ids.dtype, [((slice(first, first + len(ids)), slice(0, 1)), ids.unsqueeze(1))])


def find_table(model: nn.Module, name: str) -> FoundTable:
    """Find a table by its `name` in its config, or by the name of its module and that name, joined by a dot.

    Raises a ValueError if the name is unknown or not unique.
    """
    found = {f"{module}.{one.name}": one for module, one in _tables(model)}
    paths = [name] if name in found else [path for path, one in found.items() if one.name == name]
    if len(paths) > 1:
        raise ValueError(f"several modules have a table {name!r}: ask for one of {', '.join(map(repr, paths))}.")
    if not paths:
        names = [one.name for one in found.values()]
        known = [one.name if names.count(one.name) == 1 else path for path, one in found.items()]
        raise ValueError(unknown_name_message("table", name, known))
    return found[paths[0]]


def _tables(model: nn.Module) -> Iterator[tuple[str, FoundTable]]:
    """Yield the module's name and the table of each."""
    counting = counting_modules(model)
    for outer_name, outer in sharded_modules(model).items():
        is_managed = hands_out_rows(outer)
        of_outer = {name.rpartition(".")[2]: one for name, one in counting.items() if name.startswith(f"{outer_name}.")}
        for inner_name, collection in table_modules(outer).items():
            # A module of a known kind has one collection: itself, or one inside it.
            is_inside = inner_name and spec_of(outer) is None
            for table in collection.module_sharding_plan:
                found = FoundTable(collection, table, is_managed, of_outer.get(table) if is_managed else None)
                yield f"{outer_name}.{inner_name}" if is_inside else outer_name, found


class TableReader:
    """Reads rows of a table, or their ids, from the shards of all ranks; every rank makes one and calls it alike."""

    def __init__(self, mine: Parts, group: Group, to_rank: int | None) -> None:
        """Read for one rank, or for all of them (None)."""
        self._group, self._rank, self._to_rank = group, 0 if group is None else group.rank(), to_rank
        self._parts = mine.parts
        windows = [window for window, _ in self._parts]
        everyone = gather_objects((mine.size, mine.dtype, windows), group)
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
