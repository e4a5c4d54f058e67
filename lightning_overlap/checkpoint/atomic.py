"""Replace checkpoints atomically: NAME is always a complete checkpoint, the old or the new one."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..storage import sync_folder
from . import not_checkpoints
from .not_checkpoints import CHECKSUMS_NAME, others_in


def sibling(path: Path, what: str) -> Path:
    """Return a name next to a checkpoint that searches for checkpoints skip."""
    # Lightning's search for the checkpoints of requeued jobs takes every name with "hpc_ckpt_" in it.
    return path.with_name(f"{path.name.replace('hpc_ckpt_', 'hpc_')}.{what}")


def being_replaced(path: Path) -> Path:
    """Return the name of the old checkpoint between two renames; searches for checkpoints find it."""
    # No name that a user may give to a copy: it is removed.
    return path.with_name(f"{path.stem}.being_replaced{path.suffix}")


def write_synced(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file by a function of the open file; it survives a power failure. An OSError if the disk is full."""
    with disk_errors(), path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise the error of the disk that another error hides: torch writes the end of a file that it could not write."""
    try:
        yield
    except Exception as err:
        hidden: BaseException | None = err
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__cause__ or hidden.__context__
        if hidden is None or hidden is err:
            raise
        raise hidden from None


def check_replaceable(path: Path) -> None:
    """Raise a FileExistsError if `path` is a folder that no save of this strategy has written."""
    if _is_real_folder(path):
        names = [entry.name for entry in path.iterdir()]
        not_checkpoints.check_replaceable(path, names, lambda name: (path / name).read_bytes())


def make_unfinished(path: Path) -> None:
    """Make an empty folder for a checkpoint at `path`, in the place of what an interrupted save has left."""
    check_replaceable(path)
    unfinished = sibling(path, "unfinished")
    if (unfinished / CHECKSUMS_NAME).is_file():  # complete, so it may be the old one of an interrupted exchange
        _keep_others(unfinished, path)
    remove(unfinished)
    unfinished.mkdir(parents=True)


def _keep_others(old: Path, new: Path) -> None:
    """Move what users have put into a checkpoint's folder to the one that has replaced it, unless that has the name."""
    if _is_real_folder(old) and _is_real_folder(new):
        names = [entry.name for entry in old.iterdir()]
        for name in others_in(names, lambda name: (old / name).read_bytes()):
            if not os.path.lexists(new / name):
                (old / name).rename(new / name)


def atomic_replace(unfinished: Path, path: Path, also: Path | None = None) -> None:
    """Rename a complete checkpoint to `path` and remove what had that name; first give it a second name, `also`.

    A FileExistsError as `check_replaceable` raises. A user's other files in a replaced folder move to the new one.
    """
    check_replaceable(path)
    if also is not None:
        twin = sibling(also, "unfinished")
        remove(twin)
        try:
            if unfinished.is_dir():
                shutil.copytree(unfinished, twin, copy_function=os.link)
            else:
                os.link(unfinished, twin)
            atomic_replace(twin, also)
        except OSError:  # no hard links there, or somebody else has put a folder of that name there
            remove(twin)
    if _is_real_folder(unfinished):
        sync_folder(unfinished)
    if not os.path.lexists(path) or not (_is_real_folder(path) or _is_real_folder(unfinished)):
        unfinished.replace(path)
    elif exchange(unfinished, path):
        _keep_others(unfinished, path)
    else:  # as on NFS; `resolve_path` finds the old one between the renames
        _keep_others(being_replaced(path), path)  # of an interrupted save
        discard(being_replaced(path))
        with suppress(FileNotFoundError):  # somebody has just renamed or removed it
            path.rename(being_replaced(path))
        unfinished.rename(path)
    _keep_others(being_replaced(path), path)
    sync_folder(path.parent)
    remove(unfinished)  # after a swap, the old one
    discard(being_replaced(path))


def lead(link: Path, to: Path) -> None:
    """Replace `link` by a symbolic link to a checkpoint; by a copy if the file system has no links."""
    new = sibling(link, "unfinished")
    remove(new)
    try:
        new.symlink_to(os.path.relpath(to, link.parent))
    except OSError:  # Windows, some shared file systems
        (shutil.copytree if to.is_dir() else shutil.copy2)(to, new)
    atomic_replace(new, link)


def links_to(path: Path, stems: Iterable[str]) -> list[Path]:
    """Return the links in a checkpoint's folder that lead to it and whose names begin with any of `stems`."""
    starts = tuple(stems)
    named = [entry for entry in path.parent.glob("*") if entry.name.startswith(starts) and entry.suffix == path.suffix]
    return [entry for entry in named if entry.is_symlink() and entry.resolve() == path.resolve()]


def discard(path: Path) -> None:
    """Remove a checkpoint; its name never stands for a part of it."""
    if _is_real_folder(path):
        removed = sibling(path, "removed")
        remove(removed)
        with suppress(FileNotFoundError):  # somebody else has just renamed or removed it
            path = path.rename(removed)
    remove(path)


def discard_with_leftovers(path: Path) -> None:
    """Remove a checkpoint and the leftovers of interrupted saves."""
    discard(path)
    discard(being_replaced(path))
    for what in ("unfinished", "removed"):
        remove(sibling(path, what))


def remove(path: Path) -> None:
    """Remove a file, folder or link, if it exists; not the target of a link."""
    if _is_real_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; return whether the file system can."""
    renameat2: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    at_working_directory, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    paths = (at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other))
    return renameat2 is not None and renameat2(*paths, swap) == 0


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
