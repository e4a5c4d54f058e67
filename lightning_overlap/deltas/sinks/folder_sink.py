"""Store the files of cuts in a folder on a local disk, a shared file system or an object store."""

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...text import without_secrets
from ..files import FileName, Piece, joined
from .sink import as_sink_error

_WHOLE_PUTS = frozenset(  # file systems with atomic writes
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "ossfs", "r2", "oci", "cos", "obs", "tos", "memory"}
)


class FolderSink:
    """Stores each file in a folder, where it gets its name when it is complete, on a local disk also flushed.

    The folder may contain other files. The first write makes the folder.

    Args:
        path: A folder: a local path or an fsspec URL (`s3://bucket/folder`, `memory://folder`).
        **options: Options of fsspec's file system.

    Raises:
        ImportError: The package that fsspec needs for the URL is not installed.
        SinkError: fsspec does not know the URL's protocol.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.path = self._given = os.fspath(path)
        if "://" not in self.path and "::" not in self.path:
            self.path = os.path.abspath(self.path)  # the working directory may change
        with self._as_sink_error("open"):
            self._files, self._root = fsspec.core.url_to_fs(self.path, use_listings_cache=False, **options)

    def __repr__(self) -> str:
        return f"FolderSink({without_secrets(self._given)!r})"

    def check(self) -> None:
        """Make the folder, and write and remove a file."""
        with self._as_sink_error("write to"):
            name = f".{uuid.uuid4().hex}.check"
            self.write_pieces(name, [b"check"])
            self._files.rm_file(self._file(name))

    def write(self, name: str, content: bytes) -> None:
        """Store a file; on a local disk it is flushed to the disk."""
        self.write_pieces(name, [content])

    def write_pieces(self, name: str, pieces: Sequence[Piece]) -> None:
        """Store a file from pieces, on a local disk without joining them."""
        files, path = self._files, self._file(name)
        with self._as_sink_error("write to"):
            files.makedirs(self._root, exist_ok=True)
            if _WHOLE_PUTS.intersection([files.protocol] if isinstance(files.protocol, str) else files.protocol):
                files.pipe_file(path, joined(pieces))
                return
            if isinstance(files, LocalFileSystem):
                write_whole(path, lambda file: file.writelines(pieces))
                return
            unfinished = self._file(f".{name}.{uuid.uuid4().hex}.unfinished")
            try:
                files.pipe_file(unfinished, joined(pieces))
                files.mv(unfinished, path)
            except BaseException:
                with suppress(Exception):
                    files.rm_file(unfinished)
                raise

    def names(self) -> list[str]:
        """Return the names of all files of cuts; empty without the folder."""
        found: list[str] = []
        with self._as_sink_error("read"), suppress(FileNotFoundError):
            self._files.invalidate_cache(self._root)
            found = self._files.ls(self._root, detail=False)
        return sorted(filter(FileName.parse, (path.rstrip("/").rpartition("/")[2] for path in found)))

    def read(self, name: str) -> bytes:
        """Return a file."""
        with self._as_sink_error("read"):
            try:
                return bytes(self._files.cat_file(self._file(name)))
            except FileNotFoundError:
                raise KeyError(name) from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        with self._as_sink_error("remove files of"):
            for name in names:
                with suppress(FileNotFoundError):
                    self._files.rm_file(self._file(name))

    def close(self) -> None:
        """Do nothing: fsspec keeps its file systems."""

    def _file(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _as_sink_error(self, what: str) -> AbstractContextManager[None]:
        return as_sink_error(
            f"cannot {what} the folder of embedding deltas {without_secrets(self.path)!r}",
            self.path,
            "Choose a folder that exists or can be made, and is writable.",
            *(OSError, ValueError),
        )


def write_whole(path: str, write: Callable[[IO[bytes]], object]) -> None:
    """Write a local file, which gets its name when it is complete and flushed to the disk."""
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot open folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
