"""Say what a path leads to that is no checkpoint: an empty, truncated or damaged file, a text, another folder."""

import re
import zipfile
from pathlib import Path

from ..storage import COPY_AGAIN, MARKER, SAVE_NAME
from ..text import some

METADATA_NAME = "meta.pt"
"""The file of a checkpoint folder with the unsharded state: loops, callbacks, dense optimizers."""

INCREMENT_NAME = "increment.pt"
"""What a checkpoint of changed rows has in its place."""

_ZIP = b"PK\x03\x04"  # how a file of `torch.save` begins
_OLD = b"l\xfc\x9cF\xf9 j\xa8P\x19."  # in the first bytes of one of `_use_new_zipfile_serialization=False`
_LFS = b"version https://git-lfs"
_PASS = "Pass the folder or file that ModelCheckpoint or trainer.save_checkpoint wrote."


def why_no_checkpoint(path: Path, shown: object = None) -> str | None:
    """Return what an existing file or folder is instead of a checkpoint, and what to do; None if it may be one.

    Only the kind of a file is looked at. The message says `shown` for a path that is a copy. Raises an OSError if it
    cannot be read.
    """
    if path.is_dir():
        return None if (path / MARKER).is_file() else f"{path} is {_kind_of_folder(path)}"
    shown = path if shown is None else shown
    with open(path, "rb") as file:
        head = file.read(200)
    if _OLD in head[:40]:
        return None
    if not head.startswith(_ZIP):
        return f"{shown} is no checkpoint: it is {_kind_of_file(head)}"
    if not zipfile.is_zipfile(path):  # its directory is at its end
        return f"{shown} is a truncated checkpoint: the end of the file is missing or damaged. {COPY_AGAIN}"
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


def damaged(path: object, err: Exception) -> str:
    """Return the message for a file that begins like a checkpoint, and that `torch.load` cannot read."""
    problem = f"{type(err).__name__}: {err}".splitlines()[0]
    return f"{path} is a damaged checkpoint: torch.load cannot read it ({problem}). {COPY_AGAIN}"


def _kind_of_file(head: bytes) -> str:
    if not head:
        return f"an empty file. {COPY_AGAIN}"
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
    if ".metadata" in inside or any(SAVE_NAME.fullmatch(name) for name in inside):
        return (
            f"a folder without {MARKER}: a copy of a checkpoint that lacks files, or a checkpoint of another program. "
            f"{COPY_AGAIN}"
        )
    kind = "an empty folder" if not inside else f"a folder without {MARKER} and thus not a checkpoint of this strategy"
    return f"{kind}. {_PASS}"
