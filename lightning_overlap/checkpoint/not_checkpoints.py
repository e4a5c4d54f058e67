"""Say what a path leads to that is no checkpoint: an empty, truncated or damaged file, a text, another folder."""

import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from ..text import some

METADATA_NAME = "meta.pt"
"""The file that marks a checkpoint folder and has the unsharded state: loops, callbacks, dense optimizers."""

INCREMENT_NAME = "increment.pt"
"""What a folder of changed rows has in its place."""

CHECKSUMS_NAME = "checksums.json"
"""The file of a checkpoint folder that says what its other files are; in an object store it is written last."""

OF_A_DISK = re.compile(r"meta\.pt|increment\.pt|\.metadata|__\d+_\d+\.distcp|rows\.json|rows_\d+_\d+\.pt")
"""The names of the files of a checkpoint that lie in its folder itself: on a disk, or copied from one."""

LEFTOVER = re.compile(r"\..+\.[0-9a-f]{32}\.unfinished")
"""The names of files that a killed process has not written to their end."""

SAVE_NAME = re.compile(r"[0-9a-f]{32}")
"""The identity of a save, and the name of its folder in an object store."""

BASE_FOLDER = "base"
"""The folder in a checkpoint of changed rows that has the files of a whole one."""

_IS_OURS = re.compile(rb'"save": *"[0-9a-f]{32}"')  # in `checksums.json`
_ZIP = b"PK\x03\x04"  # how a file of `torch.save` begins
_OLD = b"l\xfc\x9cF\xf9 j\xa8P\x19."  # in the first bytes of one of `_use_new_zipfile_serialization=False`
_LFS = b"version https://git-lfs"
_PASS = "Pass the folder or file that ModelCheckpoint or trainer.save_checkpoint wrote."
_AGAIN = "Copy it again, or load another checkpoint."
_END = b"PK\x05\x06"  # how the last record of a zip archive begins, which ends with the comment's length
_END_SIZE, _MOST_COMMENT = 22, (1 << 16) - 1


class DamagedError(ValueError):
    """A checkpoint does not have what was saved: bytes changed, a file is missing, or files are of different saves."""


def is_own_file(name: str) -> bool:
    """Return whether a file of a checkpoint on a disk may have this name."""
    return name == CHECKSUMS_NAME or any(one.fullmatch(name) for one in (OF_A_DISK, LEFTOVER))


def others_in(names: Iterable[str], read: Callable[[str], bytes], *, in_store: bool = False) -> list[str]:
    """Return those names in a folder that no file of a checkpoint of this strategy has; `read` as below."""
    inside = set(names)
    # The folder of a save is a checkpoint's own if its checksums name it, as in a copy from a store.
    listed = read(CHECKSUMS_NAME) if CHECKSUMS_NAME in inside and any(map(SAVE_NAME.fullmatch, inside)) else b""
    saves = {one for one in inside if SAVE_NAME.fullmatch(one) and (in_store or one.encode() in listed)}
    base = {BASE_FOLDER} if in_store or INCREMENT_NAME in inside else set()
    return sorted(name for name in inside - saves - base if not is_own_file(name))


def check_replaceable(
    shown: object, names: Iterable[str], read: Callable[[str], bytes], *, in_store: bool = False
) -> None:
    """Raise a FileExistsError if a save would remove a folder that no save of this strategy has written.

    `names` are those in the folder, and `read` returns the bytes of one. A damaged checkpoint may be replaced, unless
    the folder has other files as well.
    """
    inside = list(names)
    left = (SAVE_NAME, LEFTOVER)
    if all(in_store and any(one.fullmatch(name) for one in left) for name in inside):  # nothing, or what a save left
        return
    others = others_in(inside, read, in_store=in_store)
    if CHECKSUMS_NAME in inside and (not others or _IS_OURS.search(read(CHECKSUMS_NAME))):
        return
    has = some(others or sorted(inside))
    raise FileExistsError(
        f"{shown} is a folder with {has}, which this strategy has not written: a save would replace it. Save under "
        "another name, or move the folder away."
    )


def why_no_checkpoint(path: Path, shown: object = None) -> str | None:
    """Return what an existing file or folder is instead of a checkpoint, and what to do; None if it may be one.

    Only the kind of a file is looked at. The message says `shown` for a path that is a copy. Raises an OSError if it
    cannot be read.
    """
    if path.is_dir():
        is_one = (path / METADATA_NAME).is_file() or (path / INCREMENT_NAME).is_file()
        return None if is_one else f"{path} is {_kind_of_folder(path)}"
    shown = path if shown is None else shown
    with open(path, "rb") as file:
        head = file.read(200)
    if _OLD in head[:40]:
        return None
    if not head.startswith(_ZIP):
        return f"{shown} is no checkpoint: it is {_kind_of_file(head)}"
    if not zipfile.is_zipfile(path):  # its directory is at its end
        return f"{shown} is a truncated checkpoint: the end of the file is missing or damaged. {_AGAIN}"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, MemoryError):
        raise
    except Exception as err:  # the bytes may be anything
        return damaged(shown, err)
    if any(name.endswith("/constants.pkl") for name in names):
        return f"{shown} is no checkpoint: it is a TorchScript archive, of torch.jit.save. {_PASS}"
    if not any(name.endswith("/data.pkl") for name in names):
        return f"{shown} is no checkpoint: it is a zip archive that torch.save has not written. {_PASS}"
    return None


def zip_comment(path: Path) -> tuple[bytes, int]:
    """Return what follows the last record of a zip archive, and its length by that record; (b"", 0) without one."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_SIZE - _MOST_COMMENT))
        _, found, record = file.read().rpartition(_END)
    at = _END_SIZE - len(_END)
    return (record[at:], int.from_bytes(record[at - 2 : at], "little")) if found else (b"", 0)


def damaged(path: object, err: Exception) -> str:
    """Return the message for a file that begins like a checkpoint, and that `torch.load` cannot read."""
    problem = f"{type(err).__name__}: {err}".splitlines()[0]
    return f"{path} is a damaged checkpoint: torch.load cannot read it ({problem}). {_AGAIN}"


def damaged_part(path: object, name: str, what: str) -> str:
    """Return the message for a file of a folder, or (with the name "") a full file, that differs from the saved one."""
    return f"{path} is a damaged checkpoint: {f'its {name}' if name else 'it'} {what}. {_AGAIN}"


def is_another(has: str) -> str:
    """Return the words for bytes whose checksum is another one."""
    return f"{has} other bytes than were saved, by their checksum: they changed, or are of another save"


def _kind_of_file(head: bytes) -> str:
    if not head:
        return f"an empty file. {_AGAIN}"
    if head.startswith(_LFS):
        return "a pointer of Git LFS, and not the file that it stands for. Run git lfs pull."
    line = head.partition(b"\n")[0][:60]
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and text:
        return f"a text file that begins with {text!r}. {_PASS}"
    return f"a file that torch.save has not written; it begins with {head[:8]!r}. {_PASS}"


def _kind_of_folder(path: Path) -> str:
    inside = sorted(one.name for one in path.iterdir())
    checkpoints = [name for name in inside if name.endswith(".ckpt")]
    if checkpoints:
        return f"a folder of checkpoints. Pass one of them: {some(checkpoints)}."
    if any(re.fullmatch(r"g\d+-s\d+-r.*\.arrow", name) for name in inside):
        return f"a folder of deltas. To begin from what they have, pass ckpt_path='deltas://{path}'."
    if ".metadata" in inside:
        return (
            f"a folder without {METADATA_NAME}: a copy of a checkpoint that lacks files, or a checkpoint of another "
            f"program. {_AGAIN}"
        )
    kind = (
        "an empty folder"
        if not inside
        else f"a folder without {METADATA_NAME} and thus not a checkpoint of this strategy"
    )
    return f"{kind}. {_PASS}"
