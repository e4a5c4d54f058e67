"""Where a checkpoint is: the face that local disks and object stores have in common, and the local one."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from . import atomic
from .not_checkpoints import CHECKSUMS_NAME

if TYPE_CHECKING:
    from .checksums import Checksums


class Place(Protocol):
    """The place of one checkpoint, `name`, beside others; `str()` of it is shown in messages and has no secrets.

    A save of a folder calls `begin`, writes files by `writer_files` and `write`, and ends with `commit`, which alone
    makes the checkpoint the one of that name: until then the place has the previous checkpoint, or none. Methods that
    write or remove are called on one rank. All raise an OSError if the disk or store fails.
    """

    @property
    def name(self) -> str:
        """The checkpoint's name, without what leads to it."""
        ...

    @property
    def is_store(self) -> bool:
        """Whether this is in an object store: it has no links, and nothing can be renamed."""
        ...

    def beside(self, name: str) -> "Place":
        """Return the place of another checkpoint in the same folder."""
        ...

    def is_in(self, folder: str) -> bool:
        """Return whether the checkpoint lies in this folder."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the checkpoint is a folder with this file."""
        ...

    # -- reading

    def read(self, name: str) -> bytes:
        """Return a small file of the checkpoint; a FileNotFoundError if it has none."""
        ...

    def size(self, name: str, where: str) -> int:
        """Return the size of a file in bytes; a FileNotFoundError if it is missing.

        `where` is its folder, relative to the checkpoint: "" for the checkpoint itself.
        """
        ...

    def on_disk(self, name: str, where: str) -> AbstractContextManager[Path]:
        """Within this context a file lies at the returned path of this host: itself, or a temporary copy of it."""
        ...

    # -- writing

    def where(self, save: str) -> str:
        """Return the folder, relative to the checkpoint, in which the files of a save will lie."""
        ...

    def begin(self, save: str) -> None:
        """Make room for the files of a save; a FileExistsError if the name is a folder of somebody else's."""
        ...

    def writer_files(self, save: str) -> tuple[FileSystemBase, str]:
        """Return how torch.distributed.checkpoint writes files of a save, and the folder to write them to."""
        ...

    def write(self, save: str, name: str, content: bytes | memoryview) -> None:
        """Write a file of a save."""
        ...

    def commit(self, checksums: "Checksums", also: "Place | None") -> None:
        """Write `checksums.json`, and make the save that it lists the checkpoint; first under the name `also`."""
        ...

    # -- names

    def exists(self) -> bool:
        """Return whether there is anything of this name."""
        ...

    def names_beside(self, stem: str, suffix: str) -> list[str]:
        """Return the names in the same folder that begin with `stem` and end with `suffix`, of what exists."""
        ...

    def lead(self, to: "Place") -> None:
        """Let this name lead to another checkpoint in the same folder, in the place of what had this name."""
        ...

    def links_to(self, stems: Iterable[str]) -> list["Place"]:
        """Return the links beside the checkpoint that would dangle without it and begin with any of `stems`."""
        ...

    def discard(self) -> None:
        """Remove the checkpoint, its name never stands for a part of it; and the leftovers of interrupted saves."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """A checkpoint on a local disk, or on a file system that hosts share. See `Place`."""

    path: Path

    is_store = False

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def beside(self, name: str) -> "LocalPlace":
        """Return the place of another checkpoint in the same folder."""
        return LocalPlace(self.path.with_name(name))

    def is_in(self, folder: str) -> bool:
        """Return whether the checkpoint lies in this folder."""
        return Path(folder).absolute() == self.path.absolute().parent

    def has(self, name: str) -> bool:
        """Return whether the checkpoint is a folder with this file."""
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        """Return a small file of the checkpoint."""
        return (self.path / name).read_bytes()

    def size(self, name: str, where: str) -> int:
        """Return the size of a file in bytes."""
        return (self.path / where / name).stat().st_size

    @contextmanager
    def on_disk(self, name: str, where: str) -> Iterator[Path]:
        """Return the path of a file."""
        yield self.path / where / name

    def where(self, save: str) -> str:
        """Return "": the files lie in the checkpoint's folder itself, which gets its name by a renaming."""
        return ""

    def begin(self, save: str) -> None:
        """Make the folder that is to be renamed; a FileExistsError as `check_replaceable` raises."""
        atomic.make_unfinished(self.path)

    def writer_files(self, save: str) -> tuple[FileSystemBase, str]:
        """Return torch's own file system."""
        return FileSystem(), str(self.unfinished)

    def write(self, save: str, name: str, content: bytes | memoryview) -> None:
        """Write a file, which survives a power failure."""
        atomic.write_synced(self.unfinished / name, lambda file: file.write(content))

    def commit(self, checksums: "Checksums", also: Place | None) -> None:
        """Rename the folder."""
        self.write(checksums.save, CHECKSUMS_NAME, checksums.encode())
        atomic.atomic_replace(self.unfinished, self.path, also.path if isinstance(also, LocalPlace) else None)

    def exists(self) -> bool:
        """Return whether there is anything of this name; a link that leads nowhere is not."""
        return self.path.exists()

    def names_beside(self, stem: str, suffix: str) -> list[str]:
        """Return the names in the same folder that begin with `stem` and end with `suffix`, of what exists."""
        return [one.name for one in self.path.parent.glob(f"{stem}*{suffix}") if one.exists()]

    def lead(self, to: Place) -> None:
        """Make a symbolic link; a copy if the file system has no links."""
        assert isinstance(to, LocalPlace)
        atomic.lead(self.path, to.path)

    def links_to(self, stems: Iterable[str]) -> list[Place]:
        """Return the symbolic links to the checkpoint."""
        return [LocalPlace(path) for path in atomic.links_to(self.path, stems)]

    def check_replaceable(self) -> None:
        """Raise a FileExistsError if this is somebody else's folder."""
        atomic.check_replaceable(self.path)

    def discard(self) -> None:
        """Remove file, folder or link, and leftovers."""
        atomic.discard_with_leftovers(self.path)

    @property
    def unfinished(self) -> Path:
        """The folder that gets this name when it is complete."""
        return atomic.sibling(self.path, "unfinished")


def as_place(path: Path | Place) -> Place:
    """Return a place; a path is one of a local disk."""
    return LocalPlace(path) if isinstance(path, Path) else path
