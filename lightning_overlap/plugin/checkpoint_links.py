"""`ModelCheckpoint(save_last=...)`: `ckpt_path="last"` finds the newest complete checkpoint at any time."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import module as lightning_module
from lightning.pytorch.core import saving

from ..checkpoint import discard, is_folder, lead, why_no_checkpoint
from ..compat.lightning import replace_link

OnCommit = Callable[[Callable[[], None]], None]  # calls a function when the save under way, if any, has succeeded


def install(trainer: Trainer, undo: ExitStack, on_commit: OnCommit) -> None:
    """Let callbacks link to complete checkpoints only; a subclass keeps a link method of its own."""
    # With save_last="link" Lightning links at once, though the new checkpoint may not be written yet.
    for callback in keeping_last(trainer):
        if callback.save_last == "link":
            replace_link(callback, partial(_link, on_commit), undo)


def bridges(trainer: Trainer | None, path: Path) -> list[tuple[Path, bool]]:
    """Return the bridges beside a checkpoint that is being saved, each with whether it is a last checkpoint itself."""
    # With save_last=True Lightning saves a checkpoint under its own name, then again as the last one. Until that is
    # complete, a bridge (the link `last.new.ckpt`) leads to the first; Lightning's search for "last" finds it.
    found = {}
    for callback in keeping_last(trainer):
        stem = callback.CHECKPOINT_NAME_LAST
        if callback.dirpath is not None and Path(callback.dirpath).absolute() == path.absolute().parent:
            found[path.with_name(f"{stem}.new{callback.FILE_EXTENSION}")] = path.name.startswith(stem)
    return list(found.items())


def keeping_last(trainer: Trainer | None) -> Iterator[ModelCheckpoint]:
    """Return the trainer's callbacks that keep a last checkpoint."""
    for callback in [] if trainer is None else trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last:
            yield callback


def _link(on_commit: OnCommit, trainer: Trainer, filepath: Any, linkpath: Any) -> None:
    path, link = Path(os.path.abspath(filepath)), Path(os.path.abspath(linkpath))
    if trainer.is_global_zero and path != link:
        on_commit(partial(lead, link, path))
        for bridge, _ in bridges(trainer, link):
            on_commit(partial(discard, bridge))
    trainer.strategy.barrier()


def explain_folders() -> None:
    """Let `Module.load_from_checkpoint` explain errors about its path: the only change of Lightning that stays."""
    if getattr(lightning_module, "_load_from_checkpoint", None) is saving._load_from_checkpoint:
        lightning_module._load_from_checkpoint = _load  # type: ignore[attr-defined]


@functools.wraps(saving._load_from_checkpoint)
def _load(cls: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    is_local = isinstance(checkpoint_path, (str, Path)) and Path(checkpoint_path).exists()
    try:
        return saving._load_from_checkpoint(cls, checkpoint_path, *args, **kwargs)
    except Exception as err:
        if not is_local:
            raise
        if (why := why_no_checkpoint(Path(checkpoint_path))) is not None:
            raise ValueError(why) from err
        if is_folder(Path(checkpoint_path)):
            err.add_note(
                f"{checkpoint_path} is a sharded checkpoint, a folder with the shards of all ranks. To load it into "
                "the unsharded module, make one file of it:\n"
                f"  python -m lightning.pytorch.utilities.consolidate_checkpoint {checkpoint_path}\n"
                f"  {cls.__name__}.load_from_checkpoint('{checkpoint_path}.consolidated', weights_only=True)\n"
                "or save with OverlapEmbeddingStrategy(checkpoint_format='full'). To continue with a Trainer, pass the "
                "folder as ckpt_path= to trainer.fit, validate, test or predict."
            )
        raise
