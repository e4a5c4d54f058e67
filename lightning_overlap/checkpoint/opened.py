"""A checkpoint of any format as an open file, for what reads files alone: `LightningModule.load_from_checkpoint`."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import fsspec
import torch

from ..storage import Place, is_address, place_at, read_seal
from ..text import without_secrets
from .sharded_folder import folder_at, read_folder, resolve_path


def open_checkpoint(path: str | Path, *, weights_only: bool | None = None) -> IO[bytes]:
    """Return a checkpoint of any format as an open file, which `LightningModule.load_from_checkpoint` can read.

    Several ranks write a checkpoint as a folder, and Lightning opens a path as a file. It takes an open file as well:

        with open_checkpoint("checkpoints/last.ckpt") as file:
            module = MyModule.load_from_checkpoint(file)

    A folder is read as `python -m lightning_overlap.consolidate` reads it: whole, in this process alone, each file
    compared with its checksum. Its content lies in a temporary file (`TMPDIR`) until the file is closed.

    Args:
        path: A checkpoint on a disk or in an object store: a folder, or a full file, which is opened as it is.
        weights_only: Of the objects of a folder, as in `torch.load`.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: What is there is no checkpoint, or it is damaged.
        RuntimeError: The folder has objects that `weights_only` rejects.
    """
    place = find_checkpoint(path)
    if place is None:
        return cast(IO[bytes], fsspec.open(str(path), "rb").open())
    if not place.is_folder():
        if (seal := read_seal(place.path)) is not None:
            seal.check()
        return open(place.path, "rb")
    with ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        torch.save(read_folder(place, weights_only=weights_only), file)
        file.seek(0)
        undo.pop_all()  # open from here on: the caller closes it
    return file


def find_checkpoint(path: Any) -> Place | None:
    """Return the place of a checkpoint, a folder or a local file; None for an address that may be one of a file.

    Raises a FileNotFoundError if there is nothing, and a ValueError for what is no checkpoint.
    """
    place = place_at(path)  # raises for an address that is none
    return folder_at(path) if is_address(path) else resolve_path(place)


def find_folder(path: Any) -> Place:
    """Return the place of a checkpoint folder; raise as `find_checkpoint` does, and a ValueError for a file."""
    place = find_checkpoint(path)
    if place is None or not place.is_folder():
        raise ValueError(f"{without_secrets(str(path))} is no checkpoint folder, but perhaps a file already.")
    return place
