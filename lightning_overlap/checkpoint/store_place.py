"""Checkpoint folders in object stores, by fsspec: whole or nothing without a renaming, by a marker that is put last.

    DIR/NAME/checksums.json    the marker: the checkpoint NAME is what it lists, and there is none without it
    DIR/NAME/SAVE/...          the files of a save; nobody reads them before a marker lists them

A new save of NAME replaces the marker, which is atomic, and then the old save's files are removed. Several markers may
list files of one save, also of another checkpoint in DIR: a save is removed once no marker in DIR lists its files.
A checkpoint that was copied from a disk has its files beside the marker, and in `base/`; no other marker lists them.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from torch.distributed.checkpoint.filesystem import FileSystemBase
from typing_extensions import override

from ..storage import ObjectStore, is_address, without_protocol
from ..text import without_secrets
from .checksums import CheckpointFiles, Checksums, read_checksums
from .not_checkpoints import (
    BASE_FOLDER,
    CHECKSUMS_NAME,
    LEFTOVER,
    OF_A_DISK,
    SAVE_NAME,
    DamagedError,
    check_replaceable,
)
from .places import LocalPlace, Place

READ_ONLY = ("http://", "https://")


def can_hold_folders(path: object) -> bool:
    """Return whether a path is an address at which checkpoint folders may be: of fsspec, and written to."""
    if not is_address(path) or str(path).startswith(READ_ONLY) or "::" in str(path):
        return False
    with suppress(ImportError):
        try:
            fsspec.get_filesystem_class(str(path).partition("://")[0])
        except ValueError:
            return False  # perhaps a CheckpointIO of the user's knows it
    return True


def place_at(path: Any, storage_options: Mapping[str, Any] | None = None) -> Place:
    """Return the place of a checkpoint: of a local path, or an address of fsspec (`s3://bucket/run/last.ckpt`).

    Raises:
        ImportError: The package that fsspec needs for the address is not installed.
        ValueError: There is no such kind of address, or it cannot have folders of checkpoints.
    """
    text = os.fspath(path)
    if not is_address(text):
        return LocalPlace(Path(without_protocol(text)))
    return StorePlace(text, storage_options)


def or_warn(action: Callable[[], None]) -> None:
    """Call a function that is not needed for a whole checkpoint; a warning if the store fails: training goes on."""
    try:
        action()
    except OSError as err:
        warnings.warn(f"the checkpoint is whole, but old files may be left: {err}", stacklevel=2)


# A save may go on in a thread while another checkpoint is removed. Who reads the markers, to remove what none of them
# lists, has to see all of them.
_one_change = threading.RLock()


class StorePlace:
    """A checkpoint folder in an object store. See `Place`.

    Args:
        address: `PROTOCOL://.../DIR/NAME`.
        options: Options of fsspec's file system; None or a mapping.
    """

    is_store = True

    def __init__(self, address: str, options: Mapping[str, Any] | None = None) -> None:
        self.address, self._options = address.rstrip("/"), dict(options or {})
        if "::" in address or address.startswith(READ_ONLY):
            raise ValueError(
                f"a sharded checkpoint cannot be at {without_secrets(address)}: the address must be one that is "
                "written to, as s3://bucket/folder/name, and not http or a chain of addresses."
            )
        folder, _, self.name = self.address.rpartition("/")
        self._store = ObjectStore(f"{folder}/", self._options)  # of the checkpoints beside this one, too

    def __str__(self) -> str:
        return without_secrets(self.address)

    def __repr__(self) -> str:
        return f"StorePlace({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePlace) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def beside(self, name: str) -> "StorePlace":
        """Return the place of another checkpoint in the same folder."""
        return StorePlace(f"{self.address.rpartition('/')[0]}/{name}", self._options)

    def inside(self, name: str) -> "StorePlace":
        """Return the place of a checkpoint within this one."""
        return StorePlace(f"{self.address}/{name}", self._options)

    def is_in(self, folder: str) -> bool:
        """Return whether the checkpoint lies in this folder."""
        return folder.rstrip("/") == self.address.rpartition("/")[0]

    def has(self, name: str) -> bool:
        """Return whether the checkpoint is a folder with this file."""
        return self._store.kind(f"{self.name}/{name}") == "file"

    def modified(self) -> float:
        """Return when the checkpoint, which is whole, was written: seconds by the store's clock."""
        return self._store.modified(self._marker if self.has(CHECKSUMS_NAME) else self.name)

    # -- reading

    def read(self, name: str) -> bytes:
        """Return a small file of the checkpoint."""
        return self._store.read(f"{self.name}/{name}")

    def size(self, name: str, where: str) -> int:
        """Return the size of a file in bytes."""
        return self._store.size(self._file(name, where))

    def on_disk(self, name: str, where: str) -> AbstractContextManager[Path]:
        """Copy a file to a temporary folder (of `TMPDIR`), and remove it after the context."""
        return self._store.on_disk(self._file(name, where))

    # -- writing

    def where(self, save: str) -> str:
        """Return the folder of a save."""
        return save

    def begin(self, save: str) -> None:
        """Make the folder of a save, where the store has folders; a FileExistsError as `check_replaceable` raises."""
        self.check_replaceable()
        self._store.make_folder(f"{self.name}/{save}")

    def check_replaceable(self) -> None:
        """Raise a FileExistsError if this is somebody else's folder: a save would remove some of its files."""
        check_replaceable(self, self._store.names(self.name), self.read, in_store=True)

    def writer_files(self, save: str) -> tuple[FileSystemBase, str]:
        """Return files that are uploaded as they are written."""
        return _UploadedFiles(self._store), f"{self.name}/{save}"

    def write(self, save: str, name: str, content: bytes | memoryview) -> None:
        """Upload a file."""
        self._store.put(f"{self.name}/{save}/{name}", [content])

    def commit(self, checksums: Checksums, also: Place | None) -> None:
        """Put the marker, and then remove what it replaces; a warning if that is not possible."""
        with _one_change:
            before = self._marked_saves()
            if isinstance(also, StorePlace):
                also._put_marker(checksums.seen_from(also))
            self._put_marker(checksums)
            or_warn(partial(self._remove_replaced, before))

    def _remove_replaced(self, before: set[str]) -> None:
        if self.is_file():  # a full file of this name
            self._store.remove([self.name])
        self._remove_unused(before)

    def lacks_files_of_others(self, checksums: Checksums) -> bool:
        """Return whether files of other saves are gone that a marker is to list; somebody may have removed them."""
        listed: dict[str, set[str]] = {}  # names by folder
        for part in (checksums, checksums.base):
            for name, file in {} if part is None else part.files.items():
                if file.where.startswith("../"):
                    listed.setdefault(file.where, set()).add(name)
        return any(not names <= set(self._store.names(self._file("", where))) for where, names in listed.items())

    def drop(self, save: str) -> None:
        """Remove the files of a save that gets no marker; what the present marker lists stays."""
        self._store.remove_folder(f"{self.name}/{save}")

    def _put_marker(self, checksums: Checksums) -> None:
        self._store.put(self._marker, [checksums.encode()])
        self._store.tell_of_changes()

    # -- names

    def exists(self) -> bool:
        """Return whether there is a whole checkpoint, or a full file."""
        return self.has(CHECKSUMS_NAME) or self.is_file()

    def is_file(self) -> bool:
        """Return whether this name is a full file."""
        return self._store.kind(self.name) == "file"

    def holds_files(self) -> bool:
        """Return whether this name is a folder, whole or not."""
        return self._store.kind(self.name) == "directory"

    def names_beside(self, stem: str, suffix: str) -> list[str]:
        """Return the names in the same folder that begin with `stem` and end with `suffix`, of what is whole."""
        names = [name for name in self._store.names() if name.startswith(stem) and name.endswith(suffix)]
        return [name for name in names if self.beside(name).exists()]

    def lead(self, to: Place) -> None:
        """Put a marker that lists the files of the other checkpoint."""
        checksums = read_checksums(to)
        if checksums is None:
            raise FileNotFoundError(f"{to} is no whole checkpoint")
        with _one_change:
            before = self._marked_saves()
            self._put_marker(checksums.seen_from(self))
            self._remove_unused(before)

    def links_to(self, stems: Iterable[str]) -> list[Place]:
        """Return nothing: a marker keeps the files that it lists, so none dangles."""
        return []

    def discard(self) -> None:
        """Remove the marker, and then the saves that it listed and those of its name, unless another marker has them.

        A full file of this name is removed too.
        """
        self.discard_folder()
        if self.is_file():
            self._store.remove([self.name])
        self._store.tell_of_changes()

    def discard_folder(self) -> None:
        """Do as `discard` does, without a full file of this name."""
        with _one_change:
            before = self._marked_saves()
            self._store.remove([self._marker])
            self._store.tell_of_changes()
            self._remove_unused(before)
        self._store.remove_empty_folder(self.name)

    def _marked_saves(self) -> set[str]:
        """Return the saves that the marker lists, as "NAME/SAVE"; none without a marker that can be read."""
        try:
            checksums = read_checksums(self)
        except DamagedError:
            return set()
        return set() if checksums is None else checksums.saves()

    def _remove_unused(self, saves: Iterable[str]) -> None:
        """Remove those of `saves`, and of the saves under this name, that no marker beside it lists.

        Files that lie under this name itself are removed too: its marker, which is gone or new, does not list them.
        """
        store = self._store
        names = store.names(self.name)
        store.remove(f"{self.name}/{name}" for name in names if OF_A_DISK.fullmatch(name) or LEFTOVER.fullmatch(name))
        if BASE_FOLDER in names:
            base = f"{self.name}/{BASE_FOLDER}"
            inside = [name for name in store.names(base) if OF_A_DISK.fullmatch(name)]
            store.remove(f"{base}/{name}" for name in [CHECKSUMS_NAME, *inside])
        unused = {*saves, *(f"{self.name}/{name}" for name in names if SAVE_NAME.fullmatch(name))}
        for name in store.names() if unused else ():
            try:
                checksums = read_checksums(self.beside(name))
            except DamagedError:
                return  # nobody knows what it lists
            unused -= set() if checksums is None else checksums.saves()
        for save in sorted(unused):
            store.remove_folder(save)

    @property
    def _marker(self) -> str:
        return f"{self.name}/{CHECKSUMS_NAME}"

    def _file(self, name: str, where: str) -> str:
        folder = where[3:] if where.startswith("../") else f"{self.name}/{where}"
        return "/".join(part for part in (folder.rstrip("/"), name) if part)


class _UploadedFiles(CheckpointFiles):
    """Files that a writer of `torch.distributed.checkpoint` writes: each is uploaded as it is written.

    Not torch's FsspecWriter: its files get `os.sync()`, which waits for every disk of the host, and a file whose
    writing fails is completed.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._store.opened(path) as file:
            yield file

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        self._store.copy(path, new_path)
        with suppress(OSError):  # it is in the way of nothing, and not everybody may remove
            self._store.remove([path])

    @override
    def mkdir(self, path: Any) -> None:
        """Do nothing: `begin` has made the folder."""

    @override
    def exists(self, path: Any) -> bool:
        return self._store.kind(path) is not None

    @override
    def rm_file(self, path: Any) -> None:
        self._store.remove([path])


class StoredBase:
    """The base of an incremental checkpoint, as the marker of an object store lists it. To read only: see `Place`."""

    def __init__(self, place: Place, listed: Checksums) -> None:
        self.is_store, self._place, self._listed = place.is_store, place, listed.encode()

    def __str__(self) -> str:
        return str(self._place)

    def read(self, name: str) -> bytes:
        """Return the checksums, which are all that is read by name."""
        assert name == CHECKSUMS_NAME
        return self._listed

    def size(self, name: str, where: str) -> int:
        """Return the size of a file in bytes."""
        return self._place.size(name, where)

    def on_disk(self, name: str, where: str) -> AbstractContextManager[Path]:
        """Copy a file to a temporary folder."""
        return self._place.on_disk(name, where)
