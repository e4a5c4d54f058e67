"""`ModelCheckpoint(save_last="link")`: its link leads to a whole checkpoint at any time.

Lightning removes the link and makes a new one, at once, whether or not what it leads to is written already; and it
removes the checkpoint that the link leads to before it does so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from .atomic import lead
from .versions import check_names

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {"ModelCheckpoint": ("_link_checkpoint",)}
"""What this file uses of Lightning beyond its public interface, by the class that has it."""

WhenWhole = Callable[[Callable[[], None]], None]
"""Does something when the save under way, if any, has succeeded."""


def install(trainer: Trainer, when_whole: WhenWhole) -> None:
    """Let the callbacks of a trainer link when what the link leads to is whole; classes of the user's do as they like.

    Args:
        trainer: Whose checkpoint callbacks.
        when_whole: What makes the links.
    """
    check_names("lightning", PRIVATE_NAMES, {"ModelCheckpoint": ModelCheckpoint})
    for callback in _linking(trainer):
        if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
            callback._link_checkpoint = partial(_link, when_whole)  # type: ignore[method-assign]


def uninstall(trainer: Trainer) -> None:
    """Give the callbacks Lightning's own way back."""
    for callback in _linking(trainer):
        vars(callback).pop("_link_checkpoint", None)


def stems(trainer: Trainer | None) -> set[str]:
    """Return how the names of the links begin that the callbacks of a trainer make."""
    return set() if trainer is None else {callback.CHECKPOINT_NAME_LAST for callback in _linking(trainer)}


def _linking(trainer: Trainer) -> Iterator[ModelCheckpoint]:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
            yield callback


def _link(when_whole: WhenWhole, trainer: Trainer, filepath: Any, linkpath: Any) -> None:
    path, link = Path(os.path.abspath(filepath)), Path(os.path.abspath(linkpath))
    if trainer.is_global_zero and path != link:
        when_whole(partial(lead, link, path))
    trainer.strategy.barrier()
