"""`ModelCheckpoint(save_last=...)`: `ckpt_path="last"` finds the newest complete checkpoint at any time."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ..checkpoint import Place, or_warn, place_at
from ..compat.lightning import replace_link

OnCommit = Callable[[Callable[[], None]], None]  # calls a function when the save under way, if any, has succeeded


def install(trainer: Trainer, undo: ExitStack, on_commit: OnCommit) -> None:
    """Let callbacks link to complete checkpoints only; a subclass keeps a link method of its own."""
    # With save_last="link" Lightning links at once, though the new checkpoint may not be written yet.
    for callback in keeping_last(trainer):
        if callback.save_last == "link":
            replace_link(callback, partial(_link, on_commit), undo)


def bridges(trainer: Trainer | None, place: Place) -> list[tuple[Place, bool]]:
    """Return the bridges beside a checkpoint that is being saved, each with whether it is a last checkpoint itself."""
    # With save_last=True Lightning saves a checkpoint under its own name, then again as the last one. Until that is
    # complete, a bridge (the link `last.new.ckpt`) leads to the first; Lightning's search for "last" finds it.
    found: dict[Place, bool] = {}
    for callback in keeping_last(trainer):
        stem = callback.CHECKPOINT_NAME_LAST
        if callback.dirpath is not None and place.is_in(str(callback.dirpath)):
            found[place.beside(f"{stem}.new{callback.FILE_EXTENSION}")] = place.name.startswith(stem)
    return list(found.items())


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
        for bridge, _ in bridges(trainer, link):
            on_commit(partial(or_warn, bridge.discard))
    trainer.strategy.barrier()
