"""`ModelCheckpoint(save_last=...)`: `ckpt_path="last"` finds the newest complete checkpoint at any time."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ..compat.lightning import replace_link
from ..storage import Place, or_warn, place_at

OnCommit = Callable[[Callable[[], None]], None]  # calls a function when the save under way, if any, has succeeded


def install(trainer: Trainer, undo: ExitStack, on_commit: OnCommit) -> None:
    """Let callbacks link to complete checkpoints only; a subclass keeps a link method of its own."""
    # With save_last="link" Lightning links at once, though the new checkpoint may not be written yet.
    for callback in keeping_last(trainer):
        if callback.save_last == "link":
            replace_link(callback, partial(_link, on_commit), undo)


def stands_for(trainer: Trainer | None, place: Place) -> tuple[str, ...]:
    """Return the patterns of last checkpoints' names that are to be saved after the one at this place.

    With save_last=True Lightning saves a checkpoint under its own name, then again as the last one. Until that is
    complete, the first is the last one.
    """
    callbacks = [callback for callback in _savers_beside(trainer, place) if not is_last([callback], place.name)]
    return tuple(sorted({callback.CHECKPOINT_NAME_LAST for callback in callbacks}))


def is_last(callbacks: Iterable[ModelCheckpoint], name: str) -> bool:
    """Return whether any of the callbacks may give this name, as "last.ckpt", to its last checkpoint."""
    for callback in callbacks:
        parts = re.split(r"\{.*?\}", callback.CHECKPOINT_NAME_LAST)
        if re.match(".*".join(map(re.escape, parts)), name) and name.endswith(callback.FILE_EXTENSION):
            return True
    return False


def _savers_beside(trainer: Trainer | None, place: Place) -> list[ModelCheckpoint]:
    """Return the callbacks that keep a last checkpoint in the folder of this place."""
    folders = {callback: str(callback.dirpath or "").rstrip("/") for callback in keeping_last(trainer)}
    return [callback for callback, folder in folders.items() if folder and place.is_in(folder)]


def keeping_last(trainer: Trainer | None) -> Iterator[ModelCheckpoint]:
    """Return the trainer's callbacks that keep a last checkpoint."""
    for callback in [] if trainer is None else trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last:
            yield callback


def _link(on_commit: OnCommit, trainer: Trainer, filepath: Any, linkpath: Any) -> None:
    place, link = place_at(os.path.abspath(filepath)), place_at(os.path.abspath(linkpath))
    if trainer.is_global_zero and place != link:
        # By then users may have renamed what it leads to, or have put something else in its place.
        on_commit(partial(or_warn, partial(link.lead, place)))
    trainer.strategy.barrier()
