"""Write the tables of an incremental checkpoint as a whole one has them, from its files, while training goes on."""

import io
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import override

from ..storage import StoppedError
from .incremental import RowsEntry, base_of, put_entry, read_rows
from .not_checkpoints import DamagedError, damaged_part
from .places import Place
from .safe_metadata import SafeReader
from .table_state import Piece


class MergedRows(DefaultSavePlanner):
    """Gives each shard as a checkpoint has it: as its base has it, with the changed rows, in the order of their saves.

    The state that is saved, part -> name -> piece, says what the shards are; its values are not read. Holds what
    changes of one shard, in addition to files that are mapped into memory.

    Args:
        place: The incremental checkpoint, whose base has the same shards.
        state: What this rank saves.
        stop: Once it is set, the next shard is not written, and saving raises a StoppedError.

    Raises:
        DamagedError: A file is not as it was saved, or not there.
    """

    def __init__(self, place: Place, state: Mapping[str, Mapping[str, Piece]], stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop
        base = SafeReader(base_of(place))
        self._place, self._places = place, base.read_metadata().storage_data
        assert base.checksums is not None  # an increment has them
        self._base = base.checksums
        self._rows: dict[tuple[str, str], list[RowsEntry]] = {}
        for entry in read_rows(place, state):
            if stop.is_set():  # then these rows are written nowhere
                break
            self._rows.setdefault((entry["part"], entry["name"]), []).append(entry)

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        live = super().resolve_data(write_item)
        assert isinstance(live, Tensor)
        if not live.numel():
            return live
        if self._stop.is_set():
            raise StoppedError
        part, name = map(str, self.mappings[write_item.index.fqn])
        shard = self._of_base(write_item, live)
        starts: Sequence[int] = write_item.index.offset or [0] * live.dim()
        window = tuple(slice(start, start + size) for start, size in zip(starts, live.shape, strict=True))
        for entry in self._rows.get((part, name), ()):
            put_entry(entry, window, shard)
        return shard

    def _of_base(self, write_item: WriteItem, live: Tensor) -> Tensor:
        found = self._places.get(write_item.index)
        if found is not None and not found.offset:
            with self._base.checked(found.relative_path) as path:
                # What is written into it stays in this process's memory.
                shard: Tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if shard.shape == live.shape and shard.dtype == live.dtype:
                return shard
        raise DamagedError(damaged_part(self._place, "base", f"has no shard {write_item.index}"))
