"""`ModelCheckpoint(save_last=...)`: what "last" finds is the newest whole checkpoint at any time.

With "link", Lightning removes the link and makes a new one, at once, whether or not what it leads to is written
already; and it removes the checkpoint that the link leads to before it does so. With True, it saves a checkpoint under
its own name first, and then once more as the last one: until that one is whole, a link `last.new.ckpt` leads to the
first, which Lightning's search for "last" finds as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import module as lightning_module
from lightning.pytorch.core import saving

from ..checkpoint import discard, is_folder, lead

WhenWhole = Callable[[Callable[[], None]], None]
"""Calls what it is given as soon as the save under way has succeeded; at once where there is none."""


@contextmanager
def installed(trainer: Trainer, on_commit: WhenWhole) -> Iterator[None]:
    """Let callbacks link when what the link leads to is whole; classes of the user's do as they like."""
    linking = [callback for callback in _keeping_last(trainer) if callback.save_last == "link"]
    for callback in linking:
        if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
            callback._link_checkpoint = partial(_link, on_commit)  # type: ignore[method-assign]
    yield
    for callback in linking:
        vars(callback).pop("_link_checkpoint", None)


def stems(trainer: Trainer | None) -> set[str]:
    """Return how the names of last checkpoints begin."""
    return {callback.CHECKPOINT_NAME_LAST for callback in _keeping_last(trainer)}


def bridges(trainer: Trainer | None, path: Path) -> list[tuple[Path, bool]]:
    """Return the links that "last" finds in the place of a last checkpoint that is not whole yet.

    For each callback that saves where `path` is being saved, with whether `path` is a last checkpoint itself.
    """
    found = {}
    for callback in _keeping_last(trainer):
        stem = callback.CHECKPOINT_NAME_LAST
        if callback.dirpath is not None and Path(callback.dirpath).absolute() == path.absolute().parent:
            found[path.with_name(f"{stem}.new{callback.FILE_EXTENSION}")] = path.name.startswith(stem)
    return list(found.items())


def _keeping_last(trainer: Trainer | None) -> Iterator[ModelCheckpoint]:
    for callback in [] if trainer is None else trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last:
            yield callback


def _link(on_commit: WhenWhole, trainer: Trainer, filepath: Any, linkpath: Any) -> None:
    path, link = Path(os.path.abspath(filepath)), Path(os.path.abspath(linkpath))
    if trainer.is_global_zero and path != link:
        on_commit(partial(lead, link, path))
        for bridge, _ in bridges(trainer, link):
            on_commit(partial(discard, bridge))
    trainer.strategy.barrier()


# -- loading a folder as a file ---------------------------------------------------------------------------------


def explain_folders() -> None:
    """Let `Module.load_from_checkpoint` say what to do with a folder, which Lightning opens as a file.

    The only thing of Lightning's that stays changed once this package is imported: the error gets a note. A user's
    class calls into Lightning there with no trainer, strategy or reader of this package's in the way, often in a
    process that has none of them. Until a folder is given, the function does what Lightning's does.
    """
    if getattr(lightning_module, "_load_from_checkpoint", None) is saving._load_from_checkpoint:
        lightning_module._load_from_checkpoint = _load  # type: ignore[attr-defined]


@functools.wraps(saving._load_from_checkpoint)
def _load(cls: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return saving._load_from_checkpoint(cls, checkpoint_path, *args, **kwargs)
    except IsADirectoryError as err:
        if isinstance(checkpoint_path, (str, Path)) and is_folder(Path(checkpoint_path)):
            err.add_note(
                f"{checkpoint_path} is a sharded checkpoint, a folder with a file for each rank. To load it into the "
                "unsharded module, make one file of it:\n"
                f"  python -m lightning.pytorch.utilities.consolidate_checkpoint {checkpoint_path}\n"
                f"  {cls.__name__}.load_from_checkpoint('{checkpoint_path}.consolidated')\n"
                "or save with OverlapEmbeddingStrategy(checkpoint_format='full'). To go on training, give the folder "
                "as ckpt_path= of trainer.fit, validate, test or predict."
            )
        raise
