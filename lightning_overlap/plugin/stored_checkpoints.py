"""Find "last", and a requeued job's checkpoint, also in an object store, and only if it is whole.

Lightning 2.6 drops the protocol of what it has listed, and takes a part of a checkpoint for a whole one.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from ..compat.lightning import checkpoint_folder, last_checkpoints, wrap_checkpoint_search
from ..storage import SHARED, About, DamagedError, Manifest, is_address, place_at
from .checkpoint_links import is_last

Saver = TypeVar("Saver")

_REQUEUED = "hpc_ckpt_"  # how Lightning names the checkpoints of requeued jobs, before a number


def finds_whole_checkpoints(trainer: Trainer | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a trainer's function that finds whole checkpoints, also in object stores."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as undo:
            if trainer is not None:
                wrap_checkpoint_search(trainer, functools.partial(_search, trainer), undo)
            return function(*args, **kwargs)

    return run


def _search(trainer: Trainer, own: Callable[..., Any], fn: TrainerFn, ckpt_path: Any, **kwargs: Any) -> Any:
    """Return the path that `ckpt_path` stands for; as `own`, Lightning's search, where no object store is involved."""
    if ckpt_path in (None, "hpc") and is_address(trainer.default_root_dir):
        newest = _newest_requeued(trainer)
        if newest is not None and (ckpt_path == "hpc" or SLURMEnvironment.detect()):
            return newest
        if ckpt_path == "hpc":
            raise ValueError(
                f'`.{fn.value}(ckpt_path="hpc")` is set but no HPC checkpoint was found. Please pass an exact '
                f"checkpoint path to `.{fn.value}(ckpt_path=...)`"  # in Lightning's words
            )
    is_last = ckpt_path == "last" or (
        ckpt_path is None and trainer.state.fn == TrainerFn.FITTING and bool(_savers(trainer, OnExceptionCheckpoint))
    )
    if not is_last:
        in_part = ckpt_path is None and is_address(trainer.default_root_dir) and SLURMEnvironment.detect()
        return None if in_part and kwargs.get("model_provided") else own(fn, ckpt_path, **kwargs)
    if ckpt_path == "last":
        _refuse_broken(trainer)
    found = list(_last(trainer))
    if fn == TrainerFn.FITTING:  # a checkpoint of weights alone may have the name, too
        found = [one for one in found if one.resumes] or found
    if not found and not any(is_address(folder) for folder in _folders(trainer)):
        return own(fn, ckpt_path, **kwargs)
    if not found:
        rank_zero_warn(
            f'.{fn.value}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be '
            "loaded. HINT: Set `ModelCheckpoint(..., save_last=True)`."  # in Lightning's words
        )
        return None
    last = max(found, key=lambda one: (one.time, one.has_name, one.path))
    if not last.has_name:
        rank_zero_warn(f'ckpt_path="last": {last.path} was saved after the last checkpoint, and is loaded.')
    return last.path


def _refuse_broken(trainer: Trainer) -> None:
    """Raise a FileNotFoundError for a last checkpoint that leads to what is gone: training would go back, or anew."""
    for callback in _savers(trainer, ModelCheckpoint):
        folder = checkpoint_folder(callback, trainer).rstrip("/")
        names = place_at(f"{folder}/_").store.names()
        paths = [f"{folder}/{name}" for name in names if name.endswith(callback.FILE_EXTENSION)]
        for path in paths:
            place, manifest = place_at(path), None
            if is_last([callback], place.name):
                manifest = _manifest_at(path)
                gone = _leans_on(manifest) if manifest is not None else ""
                if place.store.is_link(place.name) and not place.exists():
                    gone = os.readlink(path)
                if gone:
                    others = [one for one in map(place_at, paths) if one != place and one.exists()]
                    newest = max(others, key=lambda one: one.about().time, default=None)
                    advice = f'Pass ckpt_path="{newest}", the newest checkpoint there. ' if newest else ""
                    raise FileNotFoundError(
                        f'ckpt_path="last": {path} leads to {gone}, which is gone. {advice}To begin anew, leave '
                        "ckpt_path out."
                    )


def _savers(trainer: Trainer, kind: type[Saver]) -> list[Saver]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, kind)]


def _folders(trainer: Trainer) -> list[str]:
    folders = [checkpoint_folder(one, trainer) for one in _savers(trainer, ModelCheckpoint)]
    return [*folders, *(str(one.dirpath) for one in _savers(trainer, OnExceptionCheckpoint))]


class _Found(NamedTuple):
    """A checkpoint that may be the last one."""

    time: float
    has_name: bool  # whether it has the name of a last one, and not only stands for it
    path: str
    resumes: bool


def _last(trainer: Trainer) -> Iterator[_Found]:
    """Yield each whole last checkpoint, and each that was saved in its place."""
    paths = {str(one.ckpt_path): True for one in _savers(trainer, OnExceptionCheckpoint)}
    for callback in _savers(trainer, ModelCheckpoint):
        folder = checkpoint_folder(callback, trainer)
        if not is_address(folder):
            paths |= dict.fromkeys(map(str, last_checkpoints(callback, trainer)), True)
        for path in _names_in(folder, "", callback.FILE_EXTENSION):
            has_name = is_last([callback], path.rpartition("/")[2])
            if has_name or callback.CHECKPOINT_NAME_LAST in _about(path).stands_for:
                paths.setdefault(path, has_name)
    for path, has_name in paths.items():
        if place_at(path).exists():
            about = _about(path)
            yield _Found(about.time, has_name, path, about.resumes)


def _about(path: str) -> About:
    with suppress(DamagedError):  # a load says so
        return place_at(path).about()
    return About()


def _manifest_at(path: str) -> Manifest | None:
    with suppress(DamagedError):  # a load says so
        return place_at(path).manifest()
    return None


def _leans_on(manifest: Manifest) -> str:
    """Return the name of another checkpoint whose files a manifest lists, if any of these is gone."""
    others = sorted(save for save in manifest.saves() if not save.startswith((f"{manifest.name}/", f"{SHARED}/")))
    return others[0].partition("/")[0] if others and manifest.gone() else ""


def _names_in(folder: str, stem: str, suffix: str) -> set[str]:
    folder = folder.rstrip("/")
    return {f"{folder}/{name}" for name in place_at(f"{folder}/{stem or '_'}").names_beside(stem, suffix)}


def _newest_requeued(trainer: Trainer) -> str | None:
    """Return the address of the newest whole checkpoint of a requeued job; None without one."""
    folder = str(trainer.default_root_dir).rstrip("/")
    names = {path.rpartition("/")[2] for path in _names_in(folder, _REQUEUED, "")}
    numbers = {int(found.group(1)): name for name in names if (found := re.match(rf"{_REQUEUED}(\d+)\.ckpt$", name))}
    return f"{folder}/{numbers[max(numbers)]}" if numbers else None
