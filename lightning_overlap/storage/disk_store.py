"""Keep files in a folder on a disk of this host, or on a file system that hosts share."""

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from .store import Piece, Words, hidden_os_error


class DiskStore:
    """Keeps files in a folder; names may lead into folders of it, which may contain other files.

    `put` gives a file its name when it is complete and flushed to the disk. The first write makes the folder.

    Args:
        folder: A local path.
    """

    holds_both = False  # a name is that of a file or of a folder

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._given = os.fspath(folder)
        self.folder = Path(self._given).absolute()  # the working directory may change
        self.address = str(self.folder)
        advice = "Choose a folder that exists or can be made, and is writable."
        self._words = Words(repr(self.address), self.address, advice)

    def __str__(self) -> str:
        return self._given

    def __repr__(self) -> str:
        return f"DiskStore({self._given!r})"

    def shown(self, name: str) -> str:
        """Return a name with what leads to it, for messages."""
        return str(Path(self._given) / name)

    def check(self) -> None:
        """Make the folder, and write and remove a file."""
        name = f".{uuid.uuid4().hex}.check"
        self.put(name, [b"check"])
        self.remove([name])

    # -- reading

    def read(self, name: str) -> bytes:
        """Return a file; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            return (self.folder / name).read_bytes()

    @contextmanager
    def on_disk(self, name: str) -> Iterator[Path]:
        """Return the path of a file."""
        yield self.folder / name

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            return (self.folder / name).stat().st_size

    def kind(self, name: str) -> Literal["file", "directory"] | None:
        """Return what has this name, or what a link of this name leads to; None if there is nothing."""
        path = self.folder / name
        return "directory" if path.is_dir() else "file" if path.exists() else None

    def is_link(self, name: str) -> bool:
        """Return whether this name is a symbolic link's."""
        return (self.folder / name).is_symlink()

    def modified(self, name: str) -> float:
        """Return when a file or folder was written: seconds since 1970."""
        with self._words.errors("read", name):
            return (self.folder / name).stat().st_mtime

    def changed(self, name: str) -> float:
        """Return when a file or folder was written, renamed or put there: seconds since 1970."""
        with self._words.errors("read", name):
            stat = (self.folder / name).stat()
            return max(stat.st_mtime, stat.st_ctime)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all files and folders in a folder, sorted; none without it."""
        with self._words.errors("read"), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.folder / folder))
        return []

    # -- writing

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        """Keep a file, without joining its pieces."""
        self.prepared(name, pieces)()

    def prepared(self, name: str, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Write a file; return the function that gives it its name."""
        path = self.folder / name
        # Not within a folder of the name: its time would be newer than what is in it.
        is_inside = path.parent.parent == self.folder and not path.parent.name.startswith(".")
        unfinished = unfinished_name(path.parent if is_inside else path)

        def keep() -> None:
            with self._words.errors("write to"):
                try:
                    take_name(unfinished, path)
                finally:
                    unfinished.unlink(missing_ok=True)

        with self._words.errors("write to"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _flushed(unfinished) as file:
                file.writelines(pieces)
        return keep

    @contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file to write, flushed to the disk at the end of the context; its name is so after `sync`."""
        with self._words.errors("write to"), _flushed(self.folder / name) as file:
            yield file

    def tell_of_changes(self) -> None:
        """Do nothing: whoever lists a folder sees what is new."""

    def sync(self, folder: str) -> None:
        """Flush the names in a folder to the disk."""
        with suppress(OSError):  # some file systems cannot open folders
            sync_folder(self.folder / folder)

    def rename(self, name: str, other: str) -> None:
        """Give a file another name."""
        with self._words.errors("write to"):
            (self.folder / name).replace(self.folder / other)

    def link(self, name: str, to: str) -> None:
        """Let a name lead to a file of the same folder, in the place of what had it; a copy if there are no links."""
        path, target = self.folder / name, self.folder / to
        with self._words.errors("write to"):
            new = unfinished_name(path)
            try:
                new.symlink_to(os.path.relpath(target, path.parent))
            except OSError:  # Windows, some shared file systems
                shutil.copy2(target, new)
            take_name(new, path)

    def make_folder(self, name: str) -> None:
        """Make a folder."""
        with self._words.errors("write to"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def keeping_time(self, name: str) -> Iterator[None]:
        """Let a folder keep its time, by which users find the newest, though something is put or removed within it."""
        path, before = self.folder / name, None
        with suppress(OSError):
            before = path.stat()
        yield
        if before is not None:
            with suppress(OSError):
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def publish(self, folder: str, name: str) -> None:
        """Give a finished folder its name, in the place of what has it."""
        with self._words.errors("write to"):
            take_name(self.folder / folder, self.folder / name)

    def hide(self, name: str) -> str:
        """Rename a folder that is to be removed, as an unfinished one; return its name."""
        path = self.folder / name
        with self._words.errors("remove files of"):
            return path.rename(unfinished_name(path)).name

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and links."""
        with self._words.errors("remove files of"):
            for name in names:
                with suppress(NotADirectoryError):
                    (self.folder / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all that is in it, if there is one; not the store's own folder."""
        if not name.strip("/"):
            raise ValueError("the folder of a store is not removed")
        with self._words.errors("remove files of"), suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(self.folder / name)

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder that has nothing in it."""
        with suppress(OSError):
            (self.folder / name).rmdir()


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a local file to write; it gets its name at the end of the context, complete and flushed to the disk."""
    unfinished = unfinished_name(path)
    with _flushed(unfinished) as file:
        yield file
    try:
        take_name(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _flushed(path: Path) -> Iterator[IO[bytes]]:
    """Open a new local file to write; it is flushed to the disk at the end of the context, and gone after an error."""
    with path.open("xb") as file:
        try:
            with hidden_os_error():
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def unfinished_name(path: Path) -> Path:
    """Return a new name beside a path, which searches for checkpoints skip."""
    # Lightning's search for the checkpoints of requeued jobs takes every name with "hpc_ckpt_" in it.
    return path.with_name(f".{path.name.replace('hpc_ckpt_', 'hpc_')}.{uuid.uuid4().hex}.unfinished")


def take_name(new: Path, path: Path) -> None:
    """Give a complete file, link or folder its name, and remove what had it.

    A file replaces a file at once, and a folder takes a free name. Otherwise the two exchange their names, which takes
    two renames where the file system cannot do it at once (as NFS): in between nothing has the name.
    """
    both_files = not (_is_real_folder(path) or _is_real_folder(new))
    if both_files or not os.path.lexists(path):
        new.replace(path)
    elif exchange(new, path):
        _remove(new)
    else:
        old = unfinished_name(path)
        path.rename(old)
        new.rename(path)
        _remove(old)
    with suppress(OSError):  # some file systems cannot open folders
        sync_folder(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names at once; return whether the file system can."""
    renameat2: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    at_working_directory, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    paths = (at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other))
    return renameat2 is not None and renameat2(*paths, swap) == 0


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_real_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
