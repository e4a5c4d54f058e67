"""Checkpoint folders in object stores, by fsspec: whole or nothing without a renaming, by a marker that is put last.

    DIR/NAME/checksums.json    the marker: the checkpoint NAME is what it lists, and there is none without it
    DIR/NAME/SAVE/...          the files of a save; nobody reads them before a marker lists them

A new save of NAME replaces the marker, which is atomic, and then the old save's files are removed. Several markers may
list files of one save, also of another checkpoint in DIR: a save is removed once no marker in DIR lists its files.
A checkpoint that was copied from a disk has its files beside the marker, and in `base/`; no other marker lists them.
"""

import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any

import fsspec
from torch.distributed.checkpoint.filesystem import FileSystemBase
from typing_extensions import override

from ..text import message_without_secrets, without_secrets
from .checksums import CheckpointFiles, Checksums, read_checksums
from .not_checkpoints import BASE_FOLDER, CHECKSUMS_NAME, OF_A_DISK, SAVE_NAME, DamagedError, check_replaceable
from .places import MERGED_NAME, LocalPlace, Place, StoppedError

_ON_DISK = ("file://", "local://")  # fsspec's addresses of local files
READ_ONLY = ("http://", "https://")


def is_address(path: object) -> bool:
    """Return whether a path is an address that fsspec reads, and not a local file."""
    return "://" in str(path) and not str(path).startswith(_ON_DISK)


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
        for start in _ON_DISK:
            text = text.removeprefix(start)
        return LocalPlace(Path(text))
    return StorePlace(text, storage_options)


def or_warn(action: Callable[[], None]) -> None:
    """Call a function that is not needed for a whole checkpoint; a warning if the store fails: training goes on."""
    try:
        action()
    except OSError as err:
        warnings.warn(f"the checkpoint is whole, but old files may be left: {err}", stacklevel=2)


# Increments are merged in one thread, and saved in another. Who reads the markers, to remove what none of them lists,
# has to see all of them.
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
        self._files: Any = None
        with self._errors("open"):
            # Other ranks write there too: a listing that is kept may be old.
            self._files, self._path = fsspec.core.url_to_fs(self.address, use_listings_cache=False, **self._options)
        self._folder, _, self.name = self._path.rpartition("/")

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

    @property
    def merged(self) -> "StorePlace":
        """The place of what increments are merged to."""
        return self.beside(MERGED_NAME)

    def inside(self, name: str) -> "StorePlace":
        """Return the place of a checkpoint within this one."""
        return StorePlace(f"{self.address}/{name}", self._options)

    def is_in(self, folder: str) -> bool:
        """Return whether the checkpoint lies in this folder."""
        return folder.rstrip("/") == self.address.rpartition("/")[0]

    def has(self, name: str) -> bool:
        """Return whether the checkpoint is a folder with this file."""
        return self._is(f"{self._path}/{name}", "file")

    def _is(self, path: str, kind: str) -> bool:
        """Return whether there is a "file" or "directory"; an OSError if the store fails.

        Not by fsspec's `isfile` and `isdir`: they return False for every error, as if there were none.
        """
        with self._errors("read"):
            try:
                return bool(self._files.info(path)["type"] == kind)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def modified(self) -> float:
        """Return when the checkpoint, which is whole, was written: seconds by the store's clock."""
        with self._errors("read"):
            marker = f"{self._path}/{CHECKSUMS_NAME}"
            when = self._files.modified(marker if self.has(CHECKSUMS_NAME) else self._path)
            return float(when.timestamp() if isinstance(when, datetime) else when)

    # -- reading

    def read(self, name: str) -> bytes:
        """Return a small file of the checkpoint."""
        with self._errors("read"):
            return bytes(self._files.cat_file(f"{self._path}/{name}"))

    def size(self, name: str, where: str) -> int:
        """Return the size of a file in bytes."""
        with self._errors("read"):
            return int(self._files.info(self._file(name, where))["size"])

    @contextmanager
    def on_disk(self, name: str, where: str) -> Iterator[Path]:
        """Copy a file to a temporary folder (of `TMPDIR`), and remove it after the context."""
        with tempfile.TemporaryDirectory(prefix="lightning_overlap.") as folder:
            path = Path(folder) / "file"
            with self._errors("read"):
                self._files.get_file(self._file(name, where), str(path))
            yield path

    # -- writing

    def where(self, save: str) -> str:
        """Return the folder of a save."""
        return save

    def begin(self, save: str) -> None:
        """Make the folder of a save, where the store has folders; a FileExistsError as `check_replaceable` raises."""
        self.check_replaceable()
        with self._errors("write to"):
            self._files.makedirs(f"{self._path}/{save}", exist_ok=True)

    def check_replaceable(self) -> None:
        """Raise a FileExistsError if this is somebody else's folder: a save would remove some of its files."""
        check_replaceable(self, self._names(self._path), self.read, in_store=True)

    def writer_files(self, save: str) -> tuple[FileSystemBase, str]:
        """Return files that are uploaded as they are written."""
        return _UploadedFiles(self), f"{self._path}/{save}"

    def write(self, save: str, name: str, content: bytes | memoryview) -> None:
        """Upload a file."""
        self._put(f"{self._path}/{save}/{name}", content)

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
            self._remove_files([self._path])
        self._remove_unused(before)

    def lacks_files_of_others(self, checksums: Checksums) -> bool:
        """Return whether files of other saves are gone that a marker is to list; somebody may have removed them."""
        listed: dict[str, set[str]] = {}  # names by folder
        for part in (checksums, checksums.base):
            for name, file in {} if part is None else part.files.items():
                if file.where.startswith("../"):
                    listed.setdefault(file.where, set()).add(name)
        return any(not names <= set(self._names(self._file("", where))) for where, names in listed.items())

    def drop(self, save: str) -> None:
        """Remove the files of a save that gets no marker; what the present marker lists stays."""
        with self._errors("remove files of"), suppress(FileNotFoundError):
            self._remove_folder(f"{self._path}/{save}")

    def _put_marker(self, checksums: Checksums) -> None:
        self._put(f"{self._path}/{CHECKSUMS_NAME}", checksums.encode())
        self._tell_of_changes()

    def _put(self, path: str, content: bytes | memoryview) -> None:
        with self._errors("write to"):
            self._files.pipe_file(path, bytes(content))

    # -- names

    def exists(self) -> bool:
        """Return whether there is a whole checkpoint, or a full file."""
        return self.has(CHECKSUMS_NAME) or self.is_file()

    def is_file(self) -> bool:
        """Return whether this name is a full file."""
        return self._is(self._path, "file")

    def holds_files(self) -> bool:
        """Return whether this name is a folder, whole or not."""
        return self._is(self._path, "directory")

    def names_beside(self, stem: str, suffix: str) -> list[str]:
        """Return the names in the same folder that begin with `stem` and end with `suffix`, of what is whole."""
        names = [name for name in self._names(self._folder) if name.startswith(stem) and name.endswith(suffix)]
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
            self._remove_files([self._path])
        self._tell_of_changes()

    def discard_folder(self) -> None:
        """Do as `discard` does, without a full file of this name."""
        with _one_change:
            before = self._marked_saves()
            with self._errors("remove files of"), suppress(FileNotFoundError):
                self._files.rm_file(f"{self._path}/{CHECKSUMS_NAME}")
            self._tell_of_changes()
            self._remove_unused(before)
        with suppress(Exception):  # only some stores have empty folders
            self._files.rmdir(self._path)

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
        names = self._names(self._path)
        self._remove_files(f"{self._path}/{name}" for name in names if OF_A_DISK.fullmatch(name))
        if BASE_FOLDER in names:
            inside = [name for name in self._names(f"{self._path}/{BASE_FOLDER}") if OF_A_DISK.fullmatch(name)]
            self._remove_files(f"{self._path}/{BASE_FOLDER}/{name}" for name in [CHECKSUMS_NAME, *inside])
        unused = {*saves, *(f"{self.name}/{name}" for name in names if SAVE_NAME.fullmatch(name))}
        for name in self._names(self._folder) if unused else ():
            try:
                checksums = read_checksums(self.beside(name))
            except DamagedError:
                return  # nobody knows what it lists
            unused -= set() if checksums is None else checksums.saves()
        with self._errors("remove files of"):
            for save in sorted(unused):
                with suppress(FileNotFoundError):
                    self._remove_folder(f"{self._folder}/{save}")

    def _remove_folder(self, path: str) -> None:
        if not has_magic(path):
            self._files.rm(path, recursive=True)  # some stores remove many files by one call
            return
        self._remove_files(self._files.find(path))  # `rm` would take the name for a pattern

    def _remove_files(self, paths: Iterable[str]) -> None:
        with self._errors("remove files of"):
            for path in paths:
                with suppress(FileNotFoundError):
                    self._files.rm_file(path)

    def _names(self, path: str) -> list[str]:
        """Return the names in a folder; none without it."""
        with self._errors("read"), suppress(FileNotFoundError):
            listed = [one.rstrip("/") for one in self._files.ls(path, detail=False)]
            return [one.rpartition("/")[2] for one in listed if one != path]  # a file lists itself
        return []

    def _tell_of_changes(self) -> None:
        """Let callbacks of Lightning see what is new: they list with a file system of their own, which keeps lists."""
        with suppress(Exception):
            fsspec.core.url_to_fs(self.address)[0].invalidate_cache()

    def _file(self, name: str, where: str) -> str:
        above, rest = (self._folder, where[3:]) if where.startswith("../") else (self._path, where)
        return "/".join(part for part in (above, rest, name) if part)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise an OSError for any error of the store, without secrets, which other ranks can be sent.

        A FileNotFoundError and a PermissionError stay such; at the opening an ImportError and a ValueError, too.
        """
        try:
            yield
        except Exception as err:
            if isinstance(err, StoreError | StoppedError):  # the latter is none of the store
                raise
            kinds = (FileNotFoundError, PermissionError, *((ImportError, ValueError) if what == "open" else ()))
            kind = next((kind for kind in kinds if isinstance(err, kind)), StoreError)
            options = self._options if self._files is None else self._files.storage_options  # and its configuration
            secrets = [value for name, value in _texts(options) if _SECRET.search(name)]
            text = message_without_secrets(str(err), self.address)
            for secret in secrets:
                text = text.replace(secret, "***")
            hides = bool(secrets) or str(self) != self.address
            problem = f"cannot {what} {self}: {type(err).__name__}: {text}"
            raise kind(problem) from (None if hides else err)


class StoreError(OSError):
    """An error of a store, in words for the user."""


_SECRET = re.compile(r"(?i)secret|token|passw|key|credential")


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all texts in options."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and value:
            yield str(name), value


class _UploadedFiles(CheckpointFiles):
    """Files that a writer of `torch.distributed.checkpoint` writes: each is uploaded as it is written.

    Not torch's FsspecWriter: its files get `os.sync()`, which waits for every disk of the host, and a file whose
    writing fails is completed.
    """

    def __init__(self, place: StorePlace) -> None:
        self._place, self._files = place, place._files

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._place._errors("write to"):
            file = self._files.open(path, mode)
            try:
                yield file
                file.close()
            except BaseException:
                with suppress(Exception):
                    file.discard()
                with suppress(AttributeError):
                    file.closed = True  # its end would complete it
                raise

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        with self._place._errors("write to"):
            self._files.cp_file(path, new_path)
        with suppress(Exception):  # it is in the way of nothing, and not everybody may remove
            self._files.rm_file(path)

    @override
    def mkdir(self, path: Any) -> None:
        """Do nothing: `begin` has made the folder."""

    @override
    def exists(self, path: Any) -> bool:
        with self._place._errors("read"):
            return bool(self._files.exists(path))

    @override
    def rm_file(self, path: Any) -> None:
        with self._place._errors("write to"):
            self._files.rm_file(path)


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
