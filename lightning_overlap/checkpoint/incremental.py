"""Checkpoints of the rows that changed since an earlier one: their manifests list files of earlier saves, too.

What several checkpoints need is in `shared_files` beside them, so any of them may be removed. The manifest of such a
checkpoint lists

- as its base, the files of a whole checkpoint, `.metadata` and `*.distcp`;
- `rows_K_R.arrow`: the rows that changed between the saves K-1 and K on rank R, as in deltas: `Rows.field` is the part
  of state, `Rows.table` a name in it. `rows.json` says which file has what, in the order in which they are applied;
- `.metadata` and `*.distcp` of its own: everything except rows of fused tables, as of this save; it replaces what the
  base has of it. All ids of managed collision modules, too;
- `increment.pt`, in the place of a whole checkpoint's `meta.pt`.
"""

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from ..distributed import Group, gather_objects, together
from ..row_log import Dense, FileError, Rows, decode_rows, encode_rows, put_rows
from ..runtime import TableAccess
from ..storage import DamagedError, Held, Manifest, Place, SavedFile, damaged_part, or_warn
from ..updated_rows import RowCopy, TouchedRows
from .not_checkpoints import INCREMENT_NAME
from .parts import FUSED, MODEL
from .stored_files import SavedFiles
from .table_state import KERNEL_KINDS, FusedTables, Piece, StateKey, local_parts

ROWS_NAME = "rows.json"
SETTLES_WITHIN_S = 1.0
"""How long the thread that writes leaves the interpreter to the one that trains, which settles in its next backward."""

RowsExtent: TypeAlias = tuple[str, str, int, int, int, int]
"""What a file of rows has of one piece: part, name, first row, last row + 1, first column, last column + 1."""


class RowsFile(NamedTuple):
    """What a file of rows is and has."""

    file: SavedFile
    places: list[RowsExtent]


class Newest(NamedTuple):
    """What the next increment stands on: the files of the newest checkpoint. Only rank 0 knows it."""

    place: Place
    manifest: Manifest  # the part of it that others may list
    rows: dict[str, RowsFile]  # its files of rows
    base: Manifest  # the whole checkpoint on which it stands, or itself

    @property
    def bytes_of_rows(self) -> int:
        """The size of all rows since the last whole checkpoint."""
        return sum(one.file.size for one in self.rows.values())

    @property
    def bytes_of_base(self) -> int:
        """The size of the last whole checkpoint."""
        return sum(file.size for file in self.base.files.values())


class Increments:
    """The incremental checkpoints of one fit: which rows changed since the newest, and what the next may stand on.

    A save is whole if there is none before it, if that was elsewhere or has failed, if tables were written other than
    by their backward since, or if shared files are gone (a warning), for which `commit` looks again. A save is whole,
    too, once the rows since the last whole one have more than `most` times its bytes. All ranks make the same calls.
    Raises a ValueError for managed collision modules other than `MCHManagedCollisionModule`.
    """

    def __init__(self, model: nn.Module, access: TableAccess, group: Group, most: float) -> None:
        rank = 0 if group is None else group.rank()
        made: list[TouchedRows] = []

        def mark() -> TouchedRows:
            made.append(TouchedRows(model, access, rank=rank, states=True, on_settled=self._settled))
            return made[0]

        try:
            self._touched = together(mark, group, alike=(ValueError,))  # only some ranks may have a kernel without rows
        except BaseException:
            for touched in made:
                touched.detach()
            raise
        self._group, self._most = group, most
        self.fused = FusedTables(model)
        mine = {field.shard.name for field in self._touched.fields}
        self._tables = {name for names in gather_objects(mine, group) for name in names}
        self._num_writes = 0
        self._is_saved = False  # whether the save at which the marks began is complete
        self._newest: Newest | None = None
        self._has_warned = False  # of saves in several folders
        self._held = Held()  # its files, while users may remove the checkpoints that list them
        self._increment: Increment | None = None  # whose rows may still be copied
        self._num = 0  # of increments in this fit, for the names of their files

    def detach(self) -> None:
        """Stop marking, once the rows of the last save are copied."""
        with suppress(RuntimeError):  # a broken device must not hide what broke it
            self.settle()
        self._settled(False)  # if that failed
        self._touched.detach()
        self._held.release()
        if self._newest is not None:  # on rank 0; perhaps no checkpoint is left that lists them
            or_warn(partial(self._newest.place.remove_unlisted, self._newest.manifest.saves()))

    def settle(self) -> None:
        """Wait until the rows of the last save are copied: from here on anybody may write tables."""
        self._touched.settle()

    def _settled(self, is_whole: bool) -> None:
        increment, self._increment = self._increment, None
        if increment is not None:
            increment.settle(is_whole)

    def can_follow(self, place: Place) -> bool:
        """Return whether, as this rank sees it, a save at `place` needs nothing but the rows that have changed."""
        if not self._is_saved or self._touched.num_writes != self._num_writes:
            return False
        if not (self._group is None or self._group.rank() == 0):
            return True
        return self._can_stand_on_newest(place)

    def begin_whole(self, model: nn.Module) -> None:
        """Note that a whole checkpoint is about to be written: the marks begin anew."""
        self._is_saved = False  # until this save is complete
        self.fused = FusedTables(model)
        self._touched.begin_base()
        self._num_writes = self._touched.num_writes

    def take(self, state: dict[str, dict[str, Any]]) -> "Increment":
        """Take the pieces of rows out of `state`, and return the increment that is to have their changed rows."""
        self._is_saved = False  # until this save is complete
        self._num += 1
        pieces = [
            (part, name, state[part].pop(name))
            for part in (MODEL, FUSED)
            for name in list(state.get(part, ()))
            if self._is_of_rows(part, name)
        ]
        return Increment(pieces, self._newest, self._num, self._touched.settle_in_thread)

    def start(self, increment: "Increment") -> None:
        """Begin to copy the changed rows: until `settle`, which the next update also calls, nobody may write tables."""
        increment.copy = self._touched.copy()
        self._increment = increment

    def _can_stand_on_newest(self, place: Place) -> bool:
        newest = self._newest
        if newest is None:
            return False
        if newest.place.beside(place.name) != place:
            self._warn_of_folders(newest.place, place)
            return False
        if newest.bytes_of_rows > self._most * newest.bytes_of_base:
            return False
        try:
            gone = newest.manifest.lacks()
        except OSError:  # a whole save raises it on all ranks, if it lasts
            return False
        if gone:
            self.lose(gone[0], "this checkpoint is whole")
        return not gone

    def _warn_of_folders(self, newest: Place, place: Place) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{place} is whole, as {newest} is in another folder: a checkpoint of changed rows shares files with "
                "others of its folder. Give all callbacks that save the same dirpath.",
                stacklevel=2,
            )

    def lose(self, gone: str, then: str) -> None:
        """Note on rank 0 that a file is gone on which the next save was to stand; say what follows."""
        if self._newest is not None:
            shown = self._newest.place.beside(gone)
            warnings.warn(
                f"{shown}, which the next increment was to share, is gone: {then}. Leave the files there to this "
                "strategy, which removes those that no checkpoint has.",
                stacklevel=2,
            )
        self._newest = None

    def _is_of_rows(self, part: str, name: str) -> bool:
        if part == MODEL:
            return name in self._tables
        key = StateKey.parse(name)
        return key.weight in self._tables and key.kind not in KERNEL_KINDS

    def saved(self, manifest: Manifest, place: Place, increment: "Increment | None") -> None:
        """Note on rank 0 a complete checkpoint: the next increment stands on it."""
        shared, rows = manifest.shared()._replace(base=manifest.base), {} if increment is None else increment.rows
        self._newest = Newest(place, shared, rows, shared if manifest.base is None else manifest.base)
        dropped = self._held.hold(shared)
        or_warn(partial(place.remove_unlisted, dropped))

    def end_save(self) -> None:
        """Note on every rank that the last save is complete."""
        self._is_saved = True


class Increment:
    """The rows of one save, until they are written."""

    def __init__(
        self,
        pieces: Sequence[tuple[str, str, Piece]],
        newest: Newest | None,
        num: int,
        settle_in_thread: Callable[[], object],
    ) -> None:
        self.copy: RowCopy | None = None
        self._settle_in_thread = settle_in_thread
        self.pieces, self._num = pieces, num
        self._is_settled, self._is_whole = threading.Event(), False
        self.base_save = "" if newest is None else newest.base.save  # on rank 0
        self._base = None if newest is None else newest.base  # on rank 0
        self.rows: dict[str, RowsFile] = {} if newest is None else dict(newest.rows)  # on rank 0 those of all ranks

    def settle(self, is_whole: bool) -> None:
        """Note whether the copied rows are those of the save."""
        self._is_whole = is_whole
        self._is_settled.set()

    def wait(self) -> None:
        """Wait in the thread that writes for `settle`, for a second: then settle here.

        The training thread may wait for a rank that has failed, and that waits for this save. A single operator that
        writes a table for longer than that is not noticed: torch counts a write when it has ended.
        """
        if not self._is_settled.wait(SETTLES_WITHIN_S):
            self._settle_in_thread()

    def check(self) -> None:
        """Raise a RuntimeError after `wait` if tables were written while the rows were copied."""
        if not self._is_whole:
            raise RuntimeError(
                "tables were written other than by their backward while the changed rows were copied, between the save "
                "and the next backward. Write tables before the save, or use async_checkpoint=False"
            )

    def base_of(self, place: Place) -> Manifest:
        """Return on rank 0 what the manifest of this place has to list as its base."""
        assert self._base is not None
        return self._base.seen_from(place.name)

    def write(self, files: SavedFiles, rank: int) -> dict[str, list[RowsExtent]]:
        """Write this rank's rows, in any thread; return what the file has by its name, or nothing without rows."""
        entries: list[Rows] = []
        places: list[RowsExtent] = []
        names = {
            shard.data_ptr(): (part, name)
            for part, name, piece in self.pieces
            for _, shard in local_parts(piece)
            if shard.numel()
        }
        copy = self.copy
        assert copy is not None
        copied = copy.rows()
        self.check()
        for field, rows_N, values_ND in copied:
            part, name = names[field.values_RD.data_ptr()]
            (num_rows, num_columns), first = field.shard.shape, field.shard.first_column
            if field.is_row_wise:
                num_columns, first = 1, 0
            entries.append(Rows(name, part, (num_rows, num_columns), first, rows_N, values_ND))
            places.append((part, name, int(rows_N[0]), int(rows_N[-1]) + 1, first, first + values_ND.shape[1]))
        if not entries:
            return {}
        name = f"rows_{self._num}_{rank}.arrow"
        with files.create_stream(files.concat_path(files.folder, name), "wb") as file:
            for piece in encode_rows({}, entries):
                file.write(piece)
        copy.give_back()
        return {name: places}

    def index(self) -> bytes:
        """Return the content of `rows.json`."""
        return json.dumps({name: one.places for name, one in self.rows.items()}).encode()


def is_incremental(manifest: Manifest) -> bool:
    """Return whether a checkpoint has a base, and rows that changed since."""
    return INCREMENT_NAME in manifest.files


def put_changed_rows(manifest: Manifest, state: Mapping[str, Mapping[str, Piece]]) -> None:
    """Copy changed rows of a checkpoint into loaded pieces (part -> name -> piece), in the order of their saves.

    Reads only files that have rows of this rank's shards. Raises a DamagedError for one that is not as it was saved.
    """
    with manifest.checked(ROWS_NAME) as file:
        index = json.loads(file.read_bytes())
    for name, places in index.items():
        if any(_concerns(one, state) for one in places):
            with manifest.checked(name) as file:
                for entry in _entries_of(file, manifest, name):
                    for window, shard in local_parts(state.get(entry.field, {}).get(entry.table, _NOTHING)):
                        put_rows(shard, window, entry)


_NOTHING = torch.empty(0)


def _entries_of(file: Path, manifest: Manifest, name: str) -> Iterator[Rows]:
    try:
        data: Any = np.memmap(file, mode="r")  # closed with the last entry that is read
        for entry in decode_rows(memoryview(data), name)[1]:
            if not isinstance(entry, Dense):
                yield entry
    except FileError as err:  # its checksum is right, so it was written like this
        raise DamagedError(damaged_part(manifest.shown, name, f"cannot be read ({err})")) from err


def _concerns(place: RowsExtent, state: Mapping[str, Mapping[str, Piece]]) -> bool:
    part, name, first_row, end_row, first_column, end_column = place
    piece = state.get(part, {}).get(name)
    for window, shard in [] if piece is None else local_parts(piece):
        rows, *columns = window
        has_columns = all(one.start < end_column and first_column < one.stop for one in columns)
        if shard.numel() and has_columns and rows.start < end_row and first_row < rows.stop:
            return True
    return False
