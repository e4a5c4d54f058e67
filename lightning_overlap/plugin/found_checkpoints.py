"""Compare what all ranks find at `ckpt_path` before they load it: a rank that finds nothing would wait in vain."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from typing_extensions import override

from ..compat.lightning import wrap_resume_start
from ..distributed import Group, gather_objects
from ..text import without_secrets

T = TypeVar("T")

_SHARE = (
    "All ranks load the same checkpoint, and each reads it: keep it on a file system that all hosts share, and give "
    "default_root_dir and the dirpath of ModelCheckpoint the same value on every rank."
)


def install(trainer: Trainer, undo: ExitStack, gather: Callable[[Any], list[Any]]) -> None:
    """Let all ranks compare their `ckpt_path` before they load it, until `undo` is closed."""
    wrap_resume_start(trainer, partial(_resume, gather), undo)


def _resume(
    gather: Callable[[Any], list[Any]], resume_start: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Call Lightning's `resume_start`, unless some ranks have a checkpoint to load and others have none."""
    # A wrong type is not raised yet: ranks that found a path would wait in `gather`.
    found = gather((None if not path else without_secrets(str(path)), socket.gethostname()))
    if path and not isinstance(path, str | os.PathLike):
        raise TypeError(
            "ckpt_path is the path of a checkpoint, or 'last', 'best', 'hpc' or 'registry', got a "
            f"{type(path).__name__}. Pass the path, not what torch.load has read from it."
        )
    without = [f"rank {rank} (on {host})" for rank, (one, host) in enumerate(found) if one is None]
    paths = [f"rank {rank} (on {host}) found {one}" for rank, (one, host) in enumerate(found) if one is not None]
    if without and paths:
        raise FileNotFoundError(
            f"ckpt_path: {', '.join(without[:8])} found no checkpoint to load, {', '.join(paths[:8])}. {_SHARE}"
        )
    if path and without_secrets(str(path)) != str(path):
        path = _Address(path)
    resume_start(path, *args, **kwargs)


class _Address(str):
    """An address with secrets, which Lightning's messages show without them."""

    __slots__ = ()

    @override
    def __format__(self, spec: str) -> str:
        return format(without_secrets(self), spec)


def read_alike(read: Callable[[], tuple[T, bool]], path: Any, group: Group) -> T:
    """Return what a function reads at a path on every rank; it also says whether that is a folder.

    Raises:
        RuntimeError: Only some ranks could read it, or they found different things. If all fail, each raises its error.
    """
    content, is_folder, error, shown = None, False, None, without_secrets(str(path))
    try:
        content, is_folder = read()
    except Exception as err:
        error = err
    problem = None if error is None else f"{type(error).__name__}: {error}"
    by_rank: list[tuple[str | None, bool, str]] = gather_objects((problem, is_folder, socket.gethostname()), group)
    failed = [f"rank {rank} (on {host}): {err}" for rank, (err, _, host) in enumerate(by_rank) if err is not None]
    if error is not None and len(failed) == len(by_rank):
        raise error
    if failed:
        raise RuntimeError(f"some ranks cannot load {shown}. {'; '.join(failed[:8])}. {_SHARE}") from error
    if len({kind for _, kind, _ in by_rank}) > 1:
        names = {True: "a folder", False: "a file"}
        kinds = [f"rank {rank} (on {host}): {names[kind]}" for rank, (_, kind, host) in enumerate(by_rank)]
        raise RuntimeError(f"the ranks find different checkpoints at {shown}. {', '.join(kinds[:8])}. {_SHARE}")
    assert content is not None
    return content
