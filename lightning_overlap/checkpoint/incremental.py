"""Checkpoint folders with the rows that changed since an earlier checkpoint, and hard links to what that one has.

Such a folder is complete by itself: it may be moved, and others may be removed. In an object store, which has no links,
the marker lists the files of earlier saves: those of `base/`, and those of rows. A folder has

- `base/`: the files of a whole checkpoint, as hard links;
- `rows_K_R.pt`: the rows that changed between the saves K-1 and K on rank R, a list of `RowsEntry`; hard links but for
  the newest K. `rows.json` says which file has what, in the order in which they are applied;
- `.metadata` and `*.distcp`: everything except rows of fused tables, as of this save; it replaces what `base/` has of
  it. All ids of managed collision modules, too;
- `increment.pt`, in the place of a whole folder's `meta.pt`: readers that do not know increments find no checkpoint.
"""

import json
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from ..distributed import Group, gather_objects, together, warn_on_rank_zero
from ..runtime import TableAccess
from ..updated_rows import RowCopy, TouchedRows
from .atomic import check_replaceable, disk_errors, make_unfinished
from .checksums import Checksums, HashingFiles, SavedFile, read_checksums
from .not_checkpoints import (
    BASE_FOLDER,
    CHECKSUMS_NAME,
    INCREMENT_NAME,
    METADATA_NAME,
    DamagedError,
    damaged_part,
    is_own_file,
)
from .parts import FUSED, MODEL
from .places import LocalPlace, Place, as_place
from .store_place import StoredBase, StorePlace
from .table_state import KERNEL_KINDS, FusedTables, Piece, StateKey, Window, local_parts

ROWS_NAME = "rows.json"
SETTLES_WITHIN_S = 1.0
"""How long the thread that writes leaves the interpreter to the one that trains, which settles in its next backward."""

RowsExtent: TypeAlias = tuple[str, str, int, int, int, int]
"""What a file of rows has of one piece: part, name, first row, last row + 1, first column, last column + 1."""


class RowsEntry(TypedDict):
    """Rows of one piece of state."""

    part: str
    name: str
    first_column: int
    rows: Tensor  # (N,), int64: their numbers in the unsharded table
    values: Tensor  # (N, columns), or (N,) of row-wise state


class RowsFile(NamedTuple):
    """What a file of rows is and has."""

    file: SavedFile
    places: list[RowsExtent]


class Newest(NamedTuple):
    """What the next increment stands on: the newest checkpoint. Only rank 0 knows it."""

    place: Place
    identity: Any  # while the place has this one, the checkpoint is as it was saved
    checksums: Checksums
    rows: dict[str, RowsFile]  # its files of rows
    base_save: str  # identity of the save of its base, or of its own
    base_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether it is its own base."""
        return self.base_save == self.checksums.save

    @property
    def bytes_of_rows(self) -> int:
        """The size of all rows since the last whole checkpoint."""
        return sum(one.file.size for one in self.rows.values())

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open its folder on a disk, which may be renamed from then on; a GoneError if it is not as it was saved."""
        assert isinstance(self.place, LocalPlace)
        with opened(self.place.path) as folder:
            if _identity_in(folder) != self.identity:
                raise GoneError(str(self.place))
            yield folder


class GoneError(OSError):
    """A checkpoint that a save was to stand on is not there, or not as it was saved."""


class Increments:
    """The incremental checkpoints of one fit: which rows changed since the newest, and what the next may stand on.

    A save is whole if there is none before it, if the newest is gone (a warning) or failed, or if tables were written
    other than by their backward since. Users remove, rename and copy checkpoints at any time: the folders of a disk are
    linked where they are checked, and the files of a store are checked again before a marker lists them. A save is
    whole, too, once the rows since the last whole one have more than `most` times its bytes. All ranks make the same
    calls. Raises a ValueError for managed collision modules other than `MCHManagedCollisionModule`.
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
        self._increment: Increment | None = None  # whose rows may still be copied
        self._can_link = True
        self._num = 0  # of increments in this fit, for the names of their files

    def detach(self) -> None:
        """Stop marking, once the rows of the last save are copied."""
        with suppress(RuntimeError):  # a broken device must not hide what broke it
            self.settle()
        self._settled(False)  # if that failed
        self._touched.detach()

    def settle(self) -> None:
        """Wait until the rows of the last save are copied: from here on anybody may write tables."""
        self._touched.settle()

    def _settled(self, is_whole: bool) -> None:
        increment, self._increment = self._increment, None
        if increment is not None:
            increment.settle(is_whole)

    def can_follow(self, place: Place) -> bool:
        """Return whether, as this rank sees it, a save at `place` needs nothing but the rows that have changed.

        If so, and on a disk, the unfinished save already has links to all other rows.
        """
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
        if newest is None or not (self._can_link or place.is_store):
            return False
        if newest.bytes_of_rows > self._most * newest.base_bytes:
            return False
        try:
            if newest.identity is None:
                raise GoneError(str(newest.place))
            if isinstance(place, LocalPlace) and isinstance(newest.place, LocalPlace):
                there = next(folder for folder in place.path.parents if folder.exists())
                if there.stat().st_dev != newest.identity[0]:
                    return False
                check_replaceable(place.path)  # a whole save raises the error on all ranks
                _link(newest, place)
                return True
            if newest.place.beside(place.name) != place:  # a marker lists files beside it
                return False
            if _identity(newest.place) != newest.identity:
                raise GoneError(str(newest.place))
            return True
        except (GoneError, FileNotFoundError, NotADirectoryError, DamagedError):
            self.lose("this checkpoint is whole")
            return False
        except OSError:  # of the new place, such as a full disk: a whole save raises it on all ranks
            return False

    def lose(self, then: str) -> None:
        """Note on rank 0 that the newest checkpoint is not what a save can stand on any more; say what follows."""
        if self._newest is not None:
            warnings.warn(
                f"{self._newest.place}, on which the next increment was to stand, is gone or not as it was saved: "
                f"{then}. Rename or remove other checkpoints than the newest one, or copy it.",
                stacklevel=2,
            )
        self._newest = None

    def _is_of_rows(self, part: str, name: str) -> bool:
        if part == MODEL:
            return name in self._tables
        key = StateKey.parse(name)
        return key.weight in self._tables and key.kind not in KERNEL_KINDS

    def try_links(self, place: Place) -> None:
        """Find out on rank 0 whether a file system has hard links, in the folder of a save that is not complete yet."""
        if not isinstance(place, LocalPlace):
            return
        probe = place.unfinished / METADATA_NAME
        try:
            os.link(probe, link := probe.with_suffix(".link"))
            link.unlink()
        except OSError as err:
            self._can_link = False
            warn_on_rank_zero(
                f"{place.path.parent} has no hard links ({err}), which checkpoint_format='incremental' needs: every "
                "checkpoint will be whole."
            )

    def saved(self, checksums: Checksums, identity: Any, increment: "Increment | None") -> None:
        """Note on rank 0 a complete checkpoint, with what `commit` has returned: the next increment stands on it."""
        place = checksums.place
        if increment is None:
            num_bytes = sum(file.size for file in checksums.files.values())
            self._newest = Newest(place, identity, checksums, {}, checksums.save, num_bytes)
        else:
            before = increment.newest
            assert before is not None
            self._newest = before._replace(place=place, identity=identity, checksums=checksums, rows=increment.rows)

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
        self.newest = newest  # on rank 0
        self.base_save = "" if newest is None else newest.base_save  # on rank 0
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

    def list_base(self, place: Place) -> Checksums | None:
        """Return what a new marker in an object store has to list of the base; None on a disk, which has links."""
        newest = self.newest
        assert newest is not None
        if not place.is_store:
            return None
        known = newest.checksums.seen_from(place)
        self.rows = {name: RowsFile(known.files[name], one.places) for name, one in newest.rows.items()}
        return known if newest.is_whole else known.base

    def write(self, files: HashingFiles, folder: str, rank: int) -> dict[str, list[RowsExtent]]:
        """Write this rank's rows, in any thread; return what the file has by its name, or nothing without rows."""
        entries: list[RowsEntry] = []
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
            column = field.shard.first_column
            values = values_ND.squeeze(1) if field.is_row_wise else values_ND
            # torch.save writes all of the memory that a tensor shares.
            entry = RowsEntry(part=part, name=name, first_column=column, rows=rows_N, values=values.clone())
            entries.append(entry)
            places.append(
                (part, name, int(rows_N[0]), int(rows_N[-1]) + 1, column, column + field.shard.weight.shape[1])
            )
        if not entries:
            return {}
        name = f"rows_{self._num}_{rank}.pt"
        with disk_errors(), files.create_stream(files.concat_path(folder, name), "wb") as file:
            torch.save(entries, file)
            if files.is_local:
                file.flush()
                os.fsync(file.fileno())
        copy.give_back()
        return {name: places}

    def index(self) -> bytes:
        """Return the content of `rows.json`."""
        return json.dumps({name: one.places for name, one in self.rows.items()}).encode()


@contextmanager
def opened(folder: Path | str, within: int | None = None) -> Iterator[int]:
    """Open a folder, perhaps one within an open folder: whatever it is renamed to, its files are reached through it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def link_files(folder: int, into: Path, skipped: Collection[str] = ()) -> None:
    """Make hard links to a checkpoint's own files in an open folder, not to what users have put there."""
    for name in os.listdir(folder):
        if is_own_file(name) and name not in skipped:
            os.link(name, into / name, src_dir_fd=folder)


def _link(newest: Newest, place: LocalPlace) -> None:
    """Begin a save on a disk with links to base and rows of the newest checkpoint; an OSError if that is gone."""
    make_unfinished(place.path)  # folders and links alone: files are written in the thread
    into = place.unfinished / BASE_FOLDER
    into.mkdir()
    with newest.opened() as folder:
        for name in newest.rows:
            os.link(name, place.unfinished / name, src_dir_fd=folder)
        if newest.is_whole:
            link_files(folder, into, {METADATA_NAME})
        else:
            with opened(BASE_FOLDER, folder) as base:
                link_files(base, into)
    # Somebody may be removing it, file by file: then a list of its files is no list of what it was.
    linked = read_checksums(LocalPlace(into))
    if linked is None or linked.save != newest.base_save or linked.files.keys() - {METADATA_NAME, *os.listdir(into)}:
        raise GoneError(str(newest.place))


def _identity(place: Place) -> Any:
    """Return what changes when a checkpoint is saved again or removed; an OSError if it is gone."""
    if isinstance(place, LocalPlace):
        with opened(place.path) as folder:
            return _identity_in(folder)
    checksums = read_checksums(place)
    if checksums is None:
        raise GoneError(str(place))
    return checksums.save


def commit(place: Place, checksums: Checksums, also: Place | None) -> Any:
    """Commit a save, and return its identity, None if somebody has removed it at once."""
    if not isinstance(place, LocalPlace):
        place.commit(checksums, also)
        return checksums.save
    with opened(place.unfinished) as folder:
        place.commit(checksums, also)
        with suppress(FileNotFoundError):
            return _identity_in(folder)  # somebody may have renamed it by now
    return None


def _identity_in(folder: int) -> Any:
    """Return the identity of a checkpoint in an open folder on a disk."""
    found = os.stat(CHECKSUMS_NAME, dir_fd=folder)
    return found.st_dev, found.st_ino, found.st_mtime_ns  # file systems use the number of a removed file again


def is_incremental(place: Place) -> bool:
    """Return whether a checkpoint has a base, and rows that changed since."""
    if not place.is_store and place.has(INCREMENT_NAME):
        return True
    checksums = read_checksums(place)
    return checksums is not None and INCREMENT_NAME in checksums.files


def base_of(place: Place) -> Place:
    """Return the place of the whole checkpoint that an incremental one contains.

    A save to an object store lists its base, one to a disk has it in a folder; either may have been copied elsewhere.
    """
    checksums = read_checksums(place)
    if checksums is not None and checksums.base is not None:
        return cast(Place, StoredBase(place, checksums.base))  # which can be read
    if isinstance(place, LocalPlace):
        return LocalPlace(place.path / BASE_FOLDER)
    assert isinstance(place, StorePlace)
    return place.inside(BASE_FOLDER)


def put_rows(place: Path | Place, state: Mapping[str, Mapping[str, Piece]]) -> None:
    """Copy changed rows of a folder into loaded pieces (part -> name -> piece), in the order of their saves.

    Reads only files that have rows of this rank's shards. Raises a DamagedError for one that is not as it was saved.
    """
    for entry in read_rows(place, state):
        for window, shard in local_parts(state[entry["part"]][entry["name"]]):
            put_entry(entry, window, shard)


def read_rows(place: Path | Place, state: Mapping[str, Mapping[str, Piece]]) -> Iterator[RowsEntry]:
    """Yield changed rows of these pieces, in the order of their saves; files are mapped into memory.

    Reads only files that have rows of this rank's shards. Raises a DamagedError for one that is not as it was saved.
    """
    checksums = read_checksums(as_place(place))
    assert checksums is not None  # it was compared with the rest
    with checksums.checked(ROWS_NAME) as file:
        index = json.loads(file.read_bytes())
    for name, places in index.items():
        if any(_concerns(one, state) for one in places):
            with checksums.checked(name) as file:
                for entry in _read_rows(file, checksums.place, name):
                    if entry["name"] in state.get(entry["part"], {}):
                        yield entry


def _read_rows(file: Path, place: Place, name: str) -> list[RowsEntry]:
    try:
        return cast(list[RowsEntry], torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    except Exception as err:  # its checksum is right, so it was written like this
        raise DamagedError(damaged_part(place, name, f"cannot be read ({type(err).__name__}: {err})")) from err


def _concerns(place: RowsExtent, state: Mapping[str, Mapping[str, Piece]]) -> bool:
    part, name, first_row, end_row, first_column, end_column = place
    piece = state.get(part, {}).get(name)
    for window, shard in [] if piece is None else local_parts(piece):
        rows, *columns = window
        has_columns = all(one.start < end_column and first_column < one.stop for one in columns)
        if shard.numel() and has_columns and rows.start < end_row and first_row < rows.stop:
            return True
    return False


def put_entry(entry: RowsEntry, window: Window, shard: Tensor) -> None:
    """Copy rows into a shard, which is in this window of the unsharded piece; what is outside of it is skipped."""
    rows_N, values = entry["rows"], entry["values"]
    rows, *columns = window
    inside_N = (rows_N >= rows.start) & (rows_N < rows.stop)
    into_N = rows_N[inside_N] - rows.start
    values_here = values[inside_N]
    into = shard
    for one in columns:
        start = max(one.start, entry["first_column"])
        stop = min(one.stop, entry["first_column"] + values.shape[1])
        if start >= stop:
            return
        into = shard[:, start - one.start : stop - one.start]
        values_here = values_here[:, start - entry["first_column"] : stop - entry["first_column"]]
    if len(into_N):
        into[into_N.to(into.device)] = values_here.to(into.device, into.dtype)
