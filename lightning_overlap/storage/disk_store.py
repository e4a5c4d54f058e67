"""Keep files in a folder on a disk of this host, or on a file system that hosts share."""

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .store import Piece, Words


class DiskStore:
    """Keeps each file in a folder, where it gets its name when it is complete and flushed to the disk.

    The folder may contain other files. The first write makes the folder.

    Args:
        folder: A local path.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._given = os.fspath(folder)
        self.folder = Path(os.path.abspath(self._given))  # the working directory may change
        advice = "Choose a folder that exists or can be made, and is writable."
        self._words = Words(repr(str(self.folder)), str(self.folder), advice)

    def __repr__(self) -> str:
        return f"DiskStore({self._given!r})"

    def check(self) -> None:
        """Make the folder, and write and remove a file."""
        name = f".{uuid.uuid4().hex}.check"
        self.put(name, [b"check"])
        self.remove([name])

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        """Keep a file, without joining its pieces."""
        with self._words.errors("write to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / name) as file:
                file.writelines(pieces)

    def read(self, name: str) -> bytes:
        """Return a file; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            return (self.folder / name).read_bytes()

    def names(self) -> list[str]:
        """Return the names of all files and folders; empty without the folder."""
        with self._words.errors("read"), suppress(FileNotFoundError):
            return sorted(os.listdir(self.folder))
        return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        with self._words.errors("remove files of"):
            for name in names:
                (self.folder / name).unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a local file to write; it gets its name at the end of the context, complete and flushed to the disk."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot open folders
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
