"""Saves beside training, saves that fail, and the memory that a save takes. Functions that ranks run."""

import dataclasses
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import full_file, read_folder, sharded_folder
from lightning_overlap.storage import DiskStore, Place, disk_store, place_at

from ..support import cases
from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model, make_batch, make_plan
from ..support.fits import make_strategy, make_trainer
from ..support.saved import files_of, is_increment, saves_of_rows
from .checkpoints import Evaluated, EvaluatedBatches, Trained, parts_of, save_to, train


class SaveAt(Callback):
    def __init__(self, path: str, step: int, written: threading.Event | None = None) -> None:
        self.path, self.step, self.written = path, step, written or threading.Event()
        self.parts: Any = None
        self.whole_at_once = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.parts = parts_of(module)
            trainer.save_checkpoint(self.path)
            self.whole_at_once = place_at(self.path).is_folder()
        if trainer.global_step == self.step + 3:
            self.written.set()

    on_validation_end = on_train_batch_end


@contextmanager
def slow_saves(*, disk_is_full: bool = False) -> Iterator[threading.Event]:
    """Write folders not before an event; an error if the disk is full."""
    event, write = threading.Event(), sharded_folder._write

    def late(*args: Any, **kwargs: Any) -> None:
        event.wait(30)
        if disk_is_full:
            raise OSError("no space left")
        write(*args, **kwargs)

    with mock.patch.object(sharded_folder, "_write", late):
        yield event


def save_while_training(case: Case, path: str) -> tuple[Trained, bool]:
    with slow_saves() as written:
        saver = SaveAt(path, 2, written)
        trained = train(case, f"{path}.others", callbacks=(saver,), async_checkpoint=True)
    return dataclasses.replace(trained, whole=saver.parts), saver.whole_at_once


def save_in_an_evaluation(path: str) -> bool:
    saver, strategy = SaveAt(path, 0), OverlapEmbeddingStrategy(sharding="table_wise", async_checkpoint=True)
    trainer = make_trainer(strategy, callbacks=[saver])
    trainer.validate(Evaluated(TABLE_WISE), datamodule=EvaluatedBatches(TABLE_WISE, 2), verbose=False)
    return saver.whole_at_once


def load_at_the_end(case: Case, path: str, checkpoint_format: str) -> tuple[Trained, Trained]:
    class LoadsAtTheEnd(Callback):
        def on_fit_end(self, trainer: Trainer, module: Any) -> None:
            trainer.strategy.load_model_state_dict(trainer.strategy.load_checkpoint(path))

    callbacks = (saver := SaveAt(path, 2), LoadsAtTheEnd())
    trained = train(case, f"{path}.others", callbacks=callbacks, checkpoint_format=checkpoint_format)
    return dataclasses.replace(trained, whole=saver.parts), trained


def fail_while_training(path: str) -> str:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    full_disk = mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("no space left"))
    with full_disk if is_last else nullcontext():
        try:
            train(TABLE_WISE, f"{path}.others", callbacks=(SaveAt(path, 2),), async_checkpoint=True)
        except OSError as err:
            return str(err)
    return ""


class FailsBesideASave(SaveAt):
    heard: Any = None

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == self.step + 2:
            raise ValueError("the same on all ranks")

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        self.written.set()
        self.heard = trainer.strategy.broadcast(trainer.global_rank)


def fail_beside_a_save(path: str, *, disk_is_full: bool) -> tuple[str, list[str], Any]:
    """Return the error that all ranks raise, its notes, and what a callback heard while it was handled."""
    with slow_saves(disk_is_full=disk_is_full) as written:
        fails = FailsBesideASave(path, 2, written)
        try:
            train(TABLE_WISE, f"{path}.others", callbacks=(fails,), async_checkpoint=True)
        except ValueError as err:
            return str(err), getattr(err, "__notes__", []), fails.heard
    return "nothing", [], None


class BatchesWithState(Batches):
    """Their loader has a state that is large, and which rank 1 perhaps cannot send."""

    can_send = True

    def loader_of(self, indices: range) -> Any:
        rank = self.trainer.global_rank
        state = {"many bytes": bytes(STATE_BYTES), "lock": None if self.can_send or rank == 0 else threading.Lock()}

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                return iter([make_batch(ROWWISE_ADAGRAD, index, rank) for index in indices])

            def __len__(self) -> int:
                return len(indices)

            def state_dict(self) -> dict[str, Any]:
                return state

            def load_state_dict(self, state: dict[str, Any]) -> None:
                pass

        return Loader()


STATE_BYTES = 100_000


def save_what_cannot_be_sent(path: str) -> str:
    """Return the error of a save, whose loader's state cannot be pickled on rank 1, or "nothing"."""
    data, model = BatchesWithState(ROWWISE_ADAGRAD, 2), Model(ROWWISE_ADAGRAD)
    data.can_send = False

    class Saves(Callback):
        said = "nothing"

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            try:
                trainer.save_checkpoint(path)
            except RuntimeError as err:
                self.said = str(err)

    saver = Saves()
    make_trainer(make_strategy(model), callbacks=[saver]).fit(model, datamodule=data)
    return saver.said


class SavesBeside(NamedTuple):
    """What saves are, and what happens while training stands for them."""

    found: list[tuple[str, list[str]]]  # for each save what it was, and the exchanges and written files meanwhile
    largest_to_all: int  # bytes that a rank sends to all others at once


def save_beside_training(folder: str) -> SavesBeside:
    """Save after each step; note each exchange with other ranks, barriers among them, and each file."""
    found: list[tuple[str, list[str]]] = []
    seen: list[str] = []
    sizes = [0]

    def noting(what: str, action: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append(what)
            if what == "all_gather_object":
                sizes.append(len(pickle.dumps(args[1])))
            return action(*args, **kwargs)

        return noted

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.strategy.finish_save()
            seen.clear()
            path = Path(folder) / f"{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            time.sleep(0.1)  # what is written later has time to be written too early
            now = list(seen)
            trainer.strategy.finish_save()
            found.append(("rows" if is_increment(path) else "whole", now))

    names = ("barrier", "broadcast_object_list", "all_gather_object", "gather_object", "all_reduce")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, noting(name, getattr(dist, name))))
        for kind, name in ((Place, "begin"), (DiskStore, "put"), (DiskStore, "opened"), (Place, "commit")):
            stack.enter_context(mock.patch.object(kind, name, noting("file", getattr(kind, name))))
        model = Model(ROWWISE_ADAGRAD)
        options = {"checkpoint_format": "incremental", "async_checkpoint": True, "most_increments": 10}
        trainer = make_trainer(make_strategy(model, **options), callbacks=[Saves()])
        trainer.fit(model, datamodule=BatchesWithState(ROWWISE_ADAGRAD, 3))
    return SavesBeside(found, max(sizes))


class Saved(NamedTuple):
    """What an incremental checkpoint of a fit is."""

    saves_of_rows: set[str]  # the numbers of the saves that have files of rows; none in a whole checkpoint
    is_exact: bool  # whether it has the tables as they were when it was saved
    num_bytes: int  # of its files of rows; of a whole one, of all


def save_each_step(
    folder: str, *, asynchronous: bool, most: float, others: bool = False, name: str = ""
) -> list[Saved]:
    """Save an incremental checkpoint after each step; perhaps save the weights alone, too."""
    found: list[Saved] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            path = Path(folder) / (name or f"{trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            if others:
                trainer.save_checkpoint(beside := path.with_name("weights.ckpt"), weights_only=True)
                trainer.strategy.remove_checkpoint(beside)
            tables = {table.name: trainer.strategy.table(table.name) for table in ROWWISE_ADAGRAD.tables}
            weights = read_folder(path, weights_only=True)["state_dict"]
            is_exact = all(torch.equal(weights[f"ebc.embedding_bags.{name}.weight"], tables[name]) for name in tables)
            files = files_of(path)
            rows = [file for name, file in files.items() if name.startswith("rows_")]
            num_bytes = sum(file.stat().st_size for file in rows or files.values())
            found.append(Saved(saves_of_rows(path), is_exact, num_bytes))
            dist.barrier()

    model = Model(ROWWISE_ADAGRAD)
    options = {"checkpoint_format": "incremental", "async_checkpoint": asynchronous, "most_increments": most}
    trainer = make_trainer(make_strategy(model, replicate_tables=False, **options), callbacks=[Saves()])
    trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 5))
    return found


def write_after_a_save(folder: str) -> tuple[str, list[str]]:
    """Announce writes to tables after the third save; return what the fit raises, and the names of its checkpoints."""

    class Writes(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                trainer.strategy.tables_changed()

    model = Model(ROWWISE_ADAGRAD)
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    strategy = make_strategy(
        model, checkpoint_format="incremental", async_checkpoint=True, most_increments=10, replicate_tables=False
    )
    trainer = make_trainer(strategy, callbacks=[saver, Writes()], enable_checkpointing=True)
    said = ""
    try:
        trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 6))
    except OSError as err:
        said = str(err)
    return said, sorted(path.name for path in Path(folder).glob("*.ckpt"))


def memory_of_saving(path: str, checkpoint_format: str) -> float:
    """Return the peak of this process's memory while saving, beyond what it held before, in tables."""
    case = dataclasses.replace(TABLE_WISE, tables=tuple(cases.TableSpec(f"t{i}", (f"f{i}",)) for i in range(6)))
    num_rows = (80 << 20) // (8 * 4)  # a table of 80 MiB: malloc gives so large a block back once it is freed
    with mock.patch.object(cases, "NUM_ROWS", num_rows):
        model = Model(case, device="meta")
        plan = make_plan(case, model, dist.get_world_size())
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=plan, checkpoint_format=checkpoint_format))
        trainer.fit(model, datamodule=Batches(case, 1))
    gc.set_threshold(700)  # as in a user's process; `preloaded` collects less often
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = _memory_kb("VmRSS")
    trainer.save_checkpoint(path)
    return 1024 * (_memory_kb("VmHWM") - before) / (num_rows * 8 * 4)


def _memory_kb(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def save_and_fail(path: str, checkpoint_format: str) -> str:
    where, name = (disk_store, "take_name") if checkpoint_format == "full" else (Place, "commit")
    with mock.patch.object(where, name, side_effect=OSError("no space left")):
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
