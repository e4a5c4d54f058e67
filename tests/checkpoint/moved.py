"""Functions that ranks run: a fit whose checkpoints somebody renames, removes and replaces at any time."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_overlap.checkpoint import read_folder, sharded_folder
from lightning_overlap.storage import DamagedError, Place, place_at

from ..support.cases import ROWWISE_ADAGRAD, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.saved import files_of
from .object_store import Objects, store_in
from .stores import RUN

CASE = ROWWISE_ADAGRAD
DONE = ("rename", "remove", "replace", "back", "remove_a_file", "remove_shared")
WHEN = ("before", "in_thread", "committed")


@dataclass(frozen=True)
class Draw:
    done: str
    when: str
    is_async: bool

    @property
    def victim(self) -> str:
        return "6.ckpt" if self.when == "committed" else "4.ckpt"


@dataclass
class Found:
    tables: dict[str, dict[str, Tensor]]  # by checkpoint
    warned: list[str]
    there: list[str] = field(default_factory=list)  # of checkpoints in a store: those that are whole
    wrong: list[str] = field(default_factory=list)  # those that do not have the tables of their step


def harm(path: Path, done: str) -> None:
    """Do what a user may do to a checkpoint; once."""
    if not path.exists():
        return
    kept = path.with_name("kept.ckpt")
    if done in ("rename", "back"):
        path.rename(kept)
    if done == "back":
        kept.rename(path)
    if done == "remove":
        shutil.rmtree(path)
    if done == "replace":
        path.rename(kept)
        shutil.copytree(path.with_name("0.ckpt"), path)
    if done == "remove_a_file":
        files_of(path)[".metadata"].unlink()
    if done == "remove_shared":
        files = files_of(path)
        shutil.rmtree(files[next(name for name in files if name.startswith("rows_"))].parent)


class Moves(Callback):
    """Saves after each second step, and harms the checkpoint of step 4, or that of 6, while the latter is saved."""

    def __init__(self, draw: Draw, folder: str) -> None:
        self.draw, self.folder = draw, Path(folder)
        self.tables: dict[str, dict[str, Tensor]] = {}
        self.is_due = False

    def do(self) -> None:
        if self.is_due:
            self.is_due = False
            harm(self.folder / self.draw.victim, self.draw.done)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step % 2 or step > 10:
            return
        self.tables[f"{step}.ckpt"] = {spec.name: trainer.strategy.table(spec.name).clone() for spec in CASE.tables}
        self.is_due = step == 6 and trainer.is_global_zero
        if self.draw.when == "before":
            self.do()
        trainer.save_checkpoint(self.folder / f"{step}.ckpt")
        if step == 2 and trainer.is_global_zero:
            trainer.strategy.finish_save()
            shutil.copytree(self.folder / "2.ckpt", self.folder / "0.ckpt")


def beside_calls(module: Any, name: str, do: Callable[[], None], *, after: bool = False) -> Callable[[], None]:
    """Let `do` run right before each call of a function, or after it; return what undoes it."""
    own = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not after:
            do()
        found = own(*args, **kwargs)
        if after:
            do()
        return found

    setattr(module, name, call)
    return lambda: setattr(module, name, own)


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return what warnings say of files that increments share."""
    texts = (str(one.message) for one in caught)
    return [text for text in texts if "the next increment was to share" in text]


def fit(draw: Draw, folder: str) -> Found:
    moves, model = Moves(draw, folder), Model(CASE)
    undo = {
        "before": lambda: lambda: None,
        "in_thread": lambda: beside_calls(sharded_folder, "_writer_of", moves.do),
        "committed": lambda: beside_calls(Place, "commit", moves.do, after=True),
    }[draw.when]()
    options = {"checkpoint_format": "incremental", "async_checkpoint": draw.is_async, "most_increments": 100.0}
    trainer = make_trainer(make_strategy(model, **options), callbacks=[moves])
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            trainer.fit(model, datamodule=Batches(CASE, 12))
        finally:
            undo()
    return Found(moves.tables, texts_of(caught))


def fit_all(draws: list[Draw], folder: str) -> list[Found]:
    found = []
    for number, draw in enumerate(draws):
        torch.manual_seed(0)
        (inside := Path(folder) / str(number)).mkdir(exist_ok=True)
        found.append(fit(draw, str(inside)))
    return found


class RemovesFromStore(Moves):
    """Does the same in an object store: removes a checkpoint, or the files that all share."""

    def do(self) -> None:
        if self.is_due:
            self.is_due = False
            Objects().rm(f"{RUN}/{self.draw.done}", recursive=True)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step % 2 or step > 10:
            return
        self.tables[f"{step}.ckpt"] = {spec.name: trainer.strategy.table(spec.name).clone() for spec in CASE.tables}
        self.is_due = step == 6 and trainer.is_global_zero
        if self.draw.when == "before":
            self.do()
        trainer.save_checkpoint(f"{RUN}/{step}.ckpt")


def fit_in_store(draw: Draw, folder: str) -> Found:
    """Fit, saving to a store; `draw.done` is what is removed."""
    with store_in(folder):
        removes, model = RemovesFromStore(draw, folder), Model(CASE)
        undo = beside_calls(sharded_folder, "_writer_of", removes.do if draw.when == "in_thread" else lambda: None)
        options = {"checkpoint_format": "incremental", "async_checkpoint": draw.is_async, "most_increments": 100.0}
        trainer = make_trainer(make_strategy(model, **options), callbacks=[removes])
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                trainer.fit(model, datamodule=Batches(CASE, 12))
            finally:
                undo()
        found = Found(
            removes.tables,
            texts_of(caught),
        )
        trainer.strategy.barrier()
        for name, tables in found.tables.items():
            place = place_at(f"{RUN}/{name}")
            if not place.exists():
                continue
            found.there.append(name)
            try:
                state = read_folder(place, weights_only=True)["state_dict"]
            except DamagedError:
                found.wrong.append(name)
                continue
            mine = {key.split(".")[-2]: value for key, value in state.items()}
            if not all(torch.equal(mine[table], value) for table, value in tables.items()):
                found.wrong.append(name)
        return found
