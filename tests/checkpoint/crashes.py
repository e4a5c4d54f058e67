"""Fits that crash at any instant, and what the next run finds then. Functions that ranks run."""

import functools
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import read_folder, sharded_folder
from lightning_overlap.plugin.stored_checkpoints import finds_whole_checkpoints
from lightning_overlap.storage import SHARED, disk_store, place_at

from ..support.cases import NUM_ROWS, Batch, Batches, Case, TableSpec, make_collection
from ..support.disk_changes import before_each_change, killed_before
from ..support.fits import make_trainer
from ..support.saved import manifest_of

ONE_TABLE = Case("one_table", (TableSpec("t0", ("f0",)),))
NUM_STEPS = 2


@dataclass
class Left:
    """What a crash at an instant leaves, and what the next run would go on from."""

    last: int  # the step that `ckpt_path="last"` gives; 0: it begins anew
    newest: int  # the step of the newest `*.ckpt`
    whole: int  # the step of the newest whole checkpoint
    names: list[str]


def fit_and_crash(
    folder: str,
    how: str,
    save_last: Any,
    *,
    exchanges: bool = True,
    before: tuple[str, Any] | None = None,
    num_resumed: int = 0,
    num_steps: int = NUM_STEPS,
) -> tuple[list[Left], list[str], dict[str, bool]]:
    """Fit, in the folder of a fit `before` perhaps, and look at what a crash at any instant of it would leave.

    Returns what is left; the names at the end; whether the fits, after `num_resumed` crashes of different kinds, that
    went on from "last" did so at its step.
    """
    place, copies = Path(folder) / "checkpoints", Path(folder) / "copies"
    places: list[Path] = []

    def copy() -> None:
        if place.exists():
            places.append(copies / str(len(places)))
            shutil.copytree(place, places[-1], symlinks=True, copy_function=_copy)

    no_exchange = mock.patch.object(disk_store, "exchange", return_value=False)
    with warnings.catch_warnings(action="ignore"), no_exchange if not exchanges else warnings.catch_warnings():
        if before is not None:
            _fit(place, *before)
        num_steps *= 1 if before is None else 2
        with before_each_change(copy):
            _fit(place, how, save_last, num_steps=num_steps, resume=before is not None)
        copy()
        sums: dict[int, set[float]] = {}
        known: dict[str, int] = {}
        left: dict[Any, Left] = {}
        began: dict[str, bool] = {}
        for copied in places:
            key = str(_looks(copied))
            if key in left:
                continue
            every = [_step_of(path, sums, known) for path in copied.glob("*.ckpt")]
            last, newest = _last(copied), max(copied.glob("*.ckpt"), key=os.path.getmtime, default=None)
            steps = [0 if path is None else _step_of(path, sums, known) for path in (last, newest)]
            left[key] = Left(*steps, max(every, default=0), sorted(path.name for path in copied.glob("*.ckpt")))
            kind = "" if last is None else f"{last.name} {last.is_symlink()} {len(every)}"
            if last is not None and kind not in began and len(began) < num_resumed:
                next_step = steps[0] + 1
                began[kind] = _fit(copied, how, save_last, num_steps=next_step, resume=True) == (steps[0], next_step)
    assert all(len(of_step) == 1 for of_step in sums.values()), "parts of two checkpoints in one"
    lists = [path for path in place.glob("*.ckpt") if path.is_dir()]
    shared = {save for path in lists for save in manifest_of(path).saves() if save.startswith(SHARED)}
    left_over = sorted({f"{SHARED}/{path.name}" for path in place.glob(f"{SHARED}/*")} ^ shared)
    names = sorted(path.name for path in place.iterdir() if path.name != SHARED)
    return list(left.values()), [*names, *left_over], began


def fit_until_killed(folder: str, how: str, rank: int, num: int) -> None:
    """Fit and save after every step; SIGKILL ends a rank before its `num`th change of the file system."""
    with killed_before(num) if dist.get_rank() == rank else nullcontext():
        _fit(Path(folder), how, "link", num_steps=50)


def go_on(folder: str, how: str, num_steps: int) -> tuple[int, int]:
    """Go on from "last"; return the first step and the last one."""
    return _fit(Path(folder), how, "link", num_steps=num_steps, resume=True)


def _copy(path: str, to: str) -> None:
    # What has its name already is not written to any more.
    (shutil.copy2 if ".unfinished" in path or os.path.islink(path) else os.link)(path, to, follow_symlinks=False)


def _looks(place: Path) -> list[tuple[Any, ...]]:
    stats = [(path, path.lstat()) for path in sorted(place.rglob("*"))]
    return [
        (str(path.relative_to(place)), stat.st_mode, stat.st_mtime_ns, path.is_file() and stat.st_size)
        for path, stat in stats
    ]


class Small(LightningModule):
    """A table and as little as there can be beside it: each tensor is a file."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = make_collection(ONE_TABLE.tables, NUM_ROWS)
        self.top = nn.Linear(ONE_TABLE.tables[0].dim, 1, bias=False)
        self.began = 0

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        rows = self.ebc(batch.inputs["sparse"][0])
        return nn.functional.binary_cross_entropy_with_logits(self.top(rows.values()).squeeze(1), batch.labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), 0.1)


def options_of(how: str) -> dict[str, Any]:
    """Return a strategy's options; "renewed": increments, whole again after each."""
    if how == "async":
        return {"async_checkpoint": True}
    if how.startswith("renewed"):
        return {"checkpoint_format": "incremental", "most_increments": 0, "async_checkpoint": how.endswith("async")}
    return {"checkpoint_format": how, "most_increments": 10}


def _fit(
    place: Path,
    how: str,
    save_last: Any,
    *,
    num_steps: int = NUM_STEPS,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> tuple[int, int]:
    form = options_of(how)
    sgd = (torch.optim.SGD, {"lr": 0.5})
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=sgd, **form)
    saved: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 1, "save_last": save_last}
    saver = ModelCheckpoint(place, enable_version_counter=False, **saved)
    more: dict[str, Any] = {"callbacks": [*callbacks, saver], "max_steps": num_steps, "max_epochs": -1}
    trainer = make_trainer(strategy, enable_checkpointing=True, **more)
    model = Small()
    trainer.fit(model, datamodule=Batches(ONE_TABLE, NUM_STEPS), ckpt_path="last" if resume else None)
    return model.began, trainer.global_step


@functools.cache
def _searcher() -> tuple[Trainer, ModelCheckpoint]:
    callback = ModelCheckpoint("_", save_last=True)
    return Trainer(accelerator="cpu", logger=False, callbacks=[callback]), callback


def last_at(place: Path | str) -> str | None:
    """Return what `ckpt_path="last"` finds in a folder or at an address."""
    trainer, callback = _searcher()
    callback.dirpath = str(place)

    def search() -> Any:
        connector = trainer._checkpoint_connector
        return connector._parse_ckpt_path(TrainerFn.FITTING, "last", model_provided=True, model_connected=True)

    found: str | None = finds_whole_checkpoints(trainer, search)()
    return found


def _last(place: Path) -> Path | None:
    found = last_at(place)
    return None if found is None else Path(found)


def _step_of(path: Path, sums: dict[int, set[float]], known: dict[str, int]) -> int:
    place = sharded_folder.resolve_path(place_at(path))
    looks = str(_looks(path) if path.is_dir() else path.stat().st_mtime_ns)
    if looks in known:
        return known[looks]
    content = read_folder(place, weights_only=True) if path.is_dir() else torch.load(path, weights_only=True)
    known[looks] = step = int(content["global_step"])
    sums.setdefault(step, set()).add(sum(float(tensor.double().sum()) for tensor in content["state_dict"].values()))
    return step


def check(left: list[Left], first: int = 0) -> None:
    """Every `*.ckpt` is whole, the newest is the last saved, and "last" is that, or for an instant the one before."""
    before = first, first
    for state in left:
        assert state.newest == state.whole, state
        assert state.last in {state.whole, max(first, state.whole - 1)}, state
        assert (state.last, state.newest) >= before, state
        assert state.last or not state.whole, state
        before = state.last, state.newest
    assert before == (left[-1].whole,) * 2
    behind = [state for state in left if state.last != state.whole]
    assert len(behind) <= 2 * (left[-1].whole - first), behind
