"""`ModelCheckpoint(save_last=...)`: `ckpt_path="last"` finds the newest complete checkpoint at any time."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ..compat.lightning import replace_link
from ..storage import Place, is_address, or_warn, place_at

OnCommit = Callable[[Callable[[], None]], None]  # calls a function when the save under way, if any, has succeeded


def install(trainer: Trainer, undo: ExitStack, on_commit: OnCommit) -> None:
    """Let callbacks link to complete checkpoints only; a subclass keeps a link method of its own."""
    # With save_last="link" Lightning links at once, though the new checkpoint may not be written yet.
    for callback in keeping_last(trainer):
        if callback.save_last == "link":
            replace_link(callback, partial(_link, on_commit), undo)


def stems_of(trainer: Trainer | None, place: Place) -> list[str]:
    """Return how the names of last checkpoints begin that are to be saved after the one at this place.

    With save_last=True Lightning saves a checkpoint under its own name, then again as the last one. Until that is
    complete, the first is the last one.
    """
    callbacks = _savers_beside(trainer, place)
    stems = sorted({callback.CHECKPOINT_NAME_LAST.partition("{")[0] for callback in callbacks})
    return [stem for stem in stems if not place.name.startswith(stem)]


def last_ones(trainer: Trainer | None, place: Place) -> list[Place]:
    """Return the full files of last checkpoints that will be replaced after the one at this place."""
    paths = [callback.last_model_path for callback in _savers_beside(trainer, place)]
    last = [place_at(path) for path in paths if path and not is_address(path)]
    return [one for one in last if one != place and one == place.beside(one.name)]


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
