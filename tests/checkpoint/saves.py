"""Saves beside training, saves that fail, and the memory that a save takes. Functions that ranks run."""

import dataclasses
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import full_file, sharded_folder
from lightning_overlap.plugin.host_memory import TOP_PAD

from ..support import cases
from ..support.cases import TABLE_WISE, Batches, Case, Model, make_plan
from ..support.fits import make_trainer
from .checkpoints import EPOCH, Trained, parts_of, save_to, train

# -- asynchronous saves -----------------------------------------------------------------------------------------


class SaveAt(Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step
        self.parts: Any = None
        self.whole_at_once = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.parts = parts_of(module, trainer)
            trainer.save_checkpoint(self.path)
            self.whole_at_once = Path(self.path).exists()


def save_while_training(case: Case, path: str) -> tuple[Trained, bool]:
    trained_on = threading.Event()
    write = sharded_folder._write

    def late(*args: Any) -> None:
        trained_on.wait(30)
        write(*args)

    class GoOn(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == saver.step + 3:
                trained_on.set()

    saver = SaveAt(path, 2)
    with mock.patch.object(sharded_folder, "_write", late):
        trained = train(case, f"{path}.others", callbacks=(saver, GoOn()), async_checkpoint=True)
    return dataclasses.replace(trained, whole=saver.parts), saver.whole_at_once


def save_in_an_evaluation(path: str, *, fails: bool) -> str:
    class Saves(Callback):
        def on_validation_end(self, trainer: Trainer, module: Any) -> None:
            trainer.save_checkpoint(path)

    def no_space(*args: Any) -> None:
        raise OSError("no space")

    model, data = Model(TABLE_WISE), Batches(TABLE_WISE, 2)
    data.val_dataloader = data.train_dataloader  # type: ignore[method-assign]
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", async_checkpoint=True)
    with mock.patch.object(sharded_folder, "_write", no_space if fails else sharded_folder._write):
        try:
            make_trainer(strategy, callbacks=[Saves()]).validate(model, datamodule=data, verbose=False)
        except OSError as err:
            return str(err)
    return "whole" if sharded_folder.is_folder(Path(path)) else "nothing"


def load_at_the_end(case: Case, path: str, checkpoint_format: str) -> tuple[Trained, Trained]:
    class LoadsAtTheEnd(Callback):
        def on_fit_end(self, trainer: Trainer, module: Any) -> None:
            trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(path))

    callbacks = (saver := SaveAt(path, 2), LoadsAtTheEnd())
    trained = train(case, f"{path}.others", callbacks=callbacks, checkpoint_format=checkpoint_format)
    return dataclasses.replace(trained, whole=saver.parts), trained


def fail_while_training(path: str) -> list[str]:
    save = sharded_folder.save

    def failing(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            kwargs["storage_writer"] = _FullDisk(kwargs["storage_writer"].path)
        return save(*args, **kwargs)

    with mock.patch.object(sharded_folder, "save", failing):
        try:
            train(TABLE_WISE, f"{path}.others", callbacks=(SaveAt(path, 2),), async_checkpoint=True)
        except OSError as err:
            return [str(err)]
    return []


def fail_beside_a_save(path: str, *, disk_is_full: bool) -> tuple[str, list[str], Any, Any]:
    """All ranks fail alike while a slow save goes on beside training; return the error, its notes, what was heard."""
    failing = threading.Event()
    write = sharded_folder._write

    def late(*args: Any) -> None:
        if dist.get_rank() == 0:
            failing.wait(30)
        if disk_is_full:
            raise OSError("no space left")
        write(*args)

    class Fails(Callback):
        heard: Any = None

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 4:
                raise ValueError("the same on all ranks")

        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            failing.set()
            self.heard = trainer.strategy.broadcast(trainer.global_rank)

    model, fails = Model(TABLE_WISE), Fails()
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", async_checkpoint=True)
    trainer = make_trainer(strategy, callbacks=[SaveAt(path, 2), fails])
    with mock.patch.object(sharded_folder, "_write", late):
        try:
            trainer.fit(model, datamodule=Batches(TABLE_WISE, EPOCH))
        except ValueError as err:
            return str(err), getattr(err, "__notes__", []), fails.heard, trainer.state.stage
    return "nothing", [], fails.heard, trainer.state.stage


class _FullDisk(torch.distributed.checkpoint.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("no space left")


def memory_of_saving(path: str, checkpoint_format: str) -> float:
    """Return the peak of this process's memory while saving, beyond what it held before, in tables."""
    case = dataclasses.replace(TABLE_WISE, tables=tuple(cases.TableSpec(f"t{i}", (f"f{i}",)) for i in range(6)))
    # A table is more than the heap grows by at once: a copy that fits there stays resident after it is freed.
    num_rows = 5 * TOP_PAD // 4 // (8 * 4)
    with mock.patch.object(cases, "NUM_ROWS", num_rows):
        model = Model(case, device="meta")
        plan = make_plan(case, model, dist.get_world_size())
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=plan, checkpoint_format=checkpoint_format))
        trainer.fit(model, datamodule=Batches(case, 1))
    gc.set_threshold(700)  # as in a user's process; `interpreters` collects less often
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = _memory_bytes("VmRSS")
    trainer.save_checkpoint(path)
    return (_memory_bytes("VmHWM") - before) / (num_rows * 8 * 4)


def _memory_bytes(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


# -- failures ---------------------------------------------------------------------------------------------------


def save_and_fail(path: str, checkpoint_format: str) -> str:
    where = full_file if checkpoint_format == "full" else sharded_folder
    with mock.patch.object(where, "atomic_replace", side_effect=OSError("no space left")):
        return save_to(path, checkpoint_format=checkpoint_format)


def kill_while_saving(path: str, checkpoint_format: str) -> None:
    where, name = (full_file, "gather") if checkpoint_format == "full" else (sharded_folder, "save")
    real = getattr(where, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    with mock.patch.object(where, name, dying):
        save_to(path, checkpoint_format=checkpoint_format)
