"""Keep files in an object store, or another file system that fsspec knows."""

import os
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import IO, Any, Literal

import fsspec
from fsspec.spec import AbstractFileSystem

from ..text import without_secrets
from .store import Piece, Words, joined

_WHOLE_PUTS = frozenset(  # file systems with atomic writes
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "ossfs", "r2", "oci", "cos", "obs", "tos", "memory"}
)
_RENAMES_OVER = frozenset({"file", "local", "sftp", "ssh", "hdfs", "arrow_hdfs"})  # whose `mv` replaces a file
_OPENING = (ImportError, ValueError)
_ADVICE = "Choose a folder that exists or can be made, and is writable."


class ObjectStore:
    """Keeps each file in a folder of an object store; names may lead into folders of it.

    On other file systems a file is renamed when it is complete. The folder may contain other files.

    Args:
        address: An address of fsspec (`s3://bucket/folder`, `memory://folder`).
        options: Options of fsspec's file system.

    Raises:
        ImportError: The package that fsspec needs for the address is not installed.
        ValueError: fsspec does not know the address's protocol.
    """

    holds_both = True  # a name may be that of a file and of a folder

    def __init__(self, address: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.address, options = os.fspath(address), dict(options or {})
        self._words = Words(str(self), self.address, _ADVICE, options)
        with self._words.errors("open", keeps=_OPENING):
            # Others write there too: a listing that is kept may be old.
            self._files, self._folder = fsspec.core.url_to_fs(self.address, use_listings_cache=False, **options)
        self._words = Words(str(self), self.address, _ADVICE, self._files.storage_options)  # and its configuration

    def __str__(self) -> str:
        return without_secrets(self.address)

    def __repr__(self) -> str:
        return f"ObjectStore({str(self)!r})"

    def shown(self, name: str) -> str:
        """Return a name with what leads to it, for messages: without secrets."""
        return f"{str(self).rstrip('/')}/{name}"

    def check(self) -> None:
        """Make the folder, and write and remove a file."""
        name = f".{uuid.uuid4().hex}.check"
        self.make_folder("")
        self.put(name, [b"check"])
        self.remove([name])

    # -- reading

    def read(self, name: str) -> bytes:
        """Return a file; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            return bytes(self._files.cat_file(self._path(name)))

    @contextmanager
    def on_disk(self, name: str) -> Iterator[Path]:
        """Within this context a copy of a file lies at the returned path, in a temporary folder (of `TMPDIR`)."""
        with tempfile.TemporaryDirectory(prefix="lightning_overlap.") as folder:
            path = Path(folder) / "file"
            with self._words.errors("read", name):
                self._files.get_file(self._path(name), str(path))
            yield path

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            return int(self._files.info(self._path(name))["size"])

    def kind(self, name: str) -> Literal["file", "directory"] | None:
        """Return what has this name; None if nothing has it.

        Not by fsspec's `isfile` and `isdir`: they return False for every error, as if there were none.
        """
        with self._words.errors("read", name):
            try:
                found: Literal["file", "directory"] = self._files.info(self._path(name))["type"]
                return found
            except (FileNotFoundError, NotADirectoryError):
                return None

    def modified(self, name: str) -> float:
        """Return when a file was written: seconds by the store's clock."""
        with self._words.errors("read", name):
            when = self._files.modified(self._path(name))
            return float(when.timestamp() if isinstance(when, datetime) else when)

    changed = modified

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none without it."""
        path = self._path(folder)
        with self._words.errors("read"), suppress(FileNotFoundError):
            self._files.invalidate_cache(path)
            listed = [one.rstrip("/") for one in self._files.ls(path, detail=False)]
            return sorted(one.rpartition("/")[2] for one in listed if one != path.rstrip("/"))  # a file lists itself
        return []

    # -- writing

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        """Keep a file."""
        files, path = self._files, self._path(name)
        with self._words.errors("write to"):
            if self._is_any_of(_WHOLE_PUTS):
                files.pipe_file(path, joined(pieces))
                return
            folder, _, last = path.rpartition("/")
            files.makedirs(folder, exist_ok=True)
            # fsspec's own `mv` copies, and takes a name for a pattern. Others rename, some only to a new name.
            renames = type(files).mv is not AbstractFileSystem.mv
            if not renames or (files.exists(path) and not self._is_any_of(_RENAMES_OVER)):
                files.pipe_file(path, joined(pieces))
                return
            unfinished = f"{folder}/.{last}.{uuid.uuid4().hex}.unfinished"
            try:
                files.pipe_file(unfinished, joined(pieces))
                files.mv(unfinished, path)
            except BaseException:
                with suppress(Exception):
                    files.rm_file(unfinished)
                raise

    def prepared(self, name: str, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Return the function that keeps a file."""
        return partial(self.put, name, pieces)

    def _is_any_of(self, protocols: Collection[str]) -> bool:
        own = self._files.protocol
        return any(one in protocols for one in ([own] if isinstance(own, str) else own))

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to write: uploaded as it is written, and whole at the end of the context; none after an error."""
        with self._words.errors("write to"):
            file = self._files.open(self._path(name), "wb")
            try:
                yield file
                file.close()
            except BaseException:
                with suppress(Exception):
                    file.discard()
                with suppress(AttributeError):
                    file.closed = True  # its end would complete it
                raise

    def sync(self, folder: str) -> None:
        """Do nothing: what is written is durable."""

    def rename(self, name: str, other: str) -> None:
        """Give a file another name: copy it, and remove it."""
        with self._words.errors("write to"):
            self._files.cp_file(self._path(name), self._path(other))
        with suppress(OSError):  # it is in the way of nothing, and not everybody may remove
            self.remove([name])

    def make_folder(self, name: str) -> None:
        """Make a folder, where the store has folders."""
        with self._words.errors("write to"):
            self._files.makedirs(self._path(name), exist_ok=True)

    @contextmanager
    def keeping_time(self, name: str) -> Iterator[None]:
        """Do nothing: folders have no time."""
        yield

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        with self._words.errors("remove files of"):
            for name in names:
                with suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it, if there is one; not the store's own folder."""
        if not name.strip("/"):
            raise ValueError("the folder of a store is not removed")
        path = self._path(name)
        with self._words.errors("remove files of"), suppress(FileNotFoundError):
            if not has_magic(path):
                self._files.rm(path, recursive=True)  # some stores remove many files by one call
                return
            for file in self._files.find(path):  # `rm` would take the name for a pattern
                self._files.rm_file(file)

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder that has nothing in it; only some stores have such folders."""
        with suppress(Exception):
            self._files.rmdir(self._path(name))

    def tell_of_changes(self) -> None:
        """Let others in this process see what is new: they list with a file system of their own, which keeps lists."""
        with suppress(Exception):
            fsspec.core.url_to_fs(self.address)[0].invalidate_cache()

    def is_link(self, name: str) -> bool:
        """Return False: there are no links."""
        return False

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}" if name else self._folder


def put_file(address: str, content: bytes) -> None:
    """Write a file at an exact address of fsspec, also one without a folder (http, a chain of addresses)."""
    # Not by Lightning's CheckpointIO: it goes on without a word if the store denies access.
    with Words(without_secrets(address), address, _ADVICE).errors("write to"):
        files, path = fsspec.core.url_to_fs(address)
        with files.transaction:
            files.pipe_file(path, content)
