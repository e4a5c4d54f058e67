"""Fits under Slurm's variables that get a preemption signal, and the fits that go on. Functions that ranks run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_overlap.compat.lightning import logged_step
from lightning_overlap.storage import Place

from ..checkpoint import object_store
from ..checkpoint.resumes import StatefulBatches, Watched
from ..support.cases import ROWWISE_ADAGRAD, Case, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

JOB = "4711"
IN_STORE = "objects://bucket/run"
VALIDATION = 100  # index of the first validation batch


class Signal(NamedTuple):
    """Sent by a rank to itself: at a hook's call for this step, or so many seconds after the run has begun."""

    ranks: tuple[int, ...]
    place: str = ""
    step: int = 0
    signum: int = signal.SIGUSR1
    after_s: float = 0.0


class Sends(Callback):
    def __init__(self, signals: Sequence[Signal]) -> None:
        self.signals = [one for one in signals if int(os.environ["RANK"]) in one.ranks]
        self.timers: list[threading.Timer] = []

    def _begin(self) -> None:
        if not self.timers:
            pid = os.getpid()
            self.timers = [
                threading.Timer(one.after_s, os.kill, (pid, one.signum)) for one in self.signals if not one.place
            ]
            for timer in self.timers:
                timer.start()

    def end(self) -> None:
        for timer in self.timers:
            timer.cancel()
            timer.join()

    def send(self, place: str, step: int) -> None:
        for one in [one for one in self.signals if (one.place, one.step) == (place, step)]:
            self.signals.remove(one)
            os.kill(os.getpid(), one.signum)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self._begin()
        self.send("sanity check", 0)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._begin()
        self.send("on_train_start", 0)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.send("on_train_batch_start", trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.send("on_train_batch_end", trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.send("on_train_epoch_end", trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
        self.send("on_save_checkpoint", trainer.global_step)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if not trainer.sanity_checking and batch_idx == 1:
            self.send("on_validation_batch_end", trainer.global_step)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.send("on_validation_end", trainer.global_step)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.send("on_test_batch_end", batch_idx)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.end()
        self.send("on_train_end", 0)


class Data(StatefulBatches):
    def __init__(self, loader: str, num_validation: int) -> None:
        super().__init__(loader)
        self.num_validation = num_validation

    def val_dataloader(self) -> Any:
        rank, indices = self.trainer.global_rank, range(VALIDATION, VALIDATION + self.num_validation)
        return DataLoader([make_batch(self.case, index, rank) for index in indices], batch_size=None)

    test_dataloader = val_dataloader


class Measured(Watched):
    """Takes its time, so that signals meet every part of a fit; notes what it saw in each validation."""

    step_s = 0.0

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.validations: list[tuple[int, list[float]]] = []
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.validated = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.step_s)
        self.validated.append(float(self(batch)))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.trainer.global_step, self.validated))


class Stops(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step


class Life(NamedTuple):
    """What one start of the job did on a rank."""

    result: Result | None  # of a fit
    seen: list[tuple[int, int, int]]
    epochs: list[int]
    validations: list[tuple[int, list[float]]]
    progress: tuple[Any, ...]
    ended_by: str  # the class of the exception that ended it
    handlers_are_back: bool  # whether all signals have the handlers that they had before
    seconds: float


@contextlib.contextmanager
def slurm(folder: str, **variables: str) -> Iterator[None]:
    """Within this context the rank is a task of a job, whose `scontrol` writes down how it is called."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    tools = Path(folder, "bin")
    if rank == "0":
        tools.mkdir(parents=True, exist_ok=True)
        (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n')
        (tools / "scontrol").chmod(0o755)
    before = dict(os.environ)
    os.environ.update(SLURM_JOB_ID=JOB, SLURM_JOB_NAME="train", SLURM_NTASKS=size, SLURM_NTASKS_PER_NODE=size)
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0", SLURM_NODELIST="localhost")
    os.environ.update(variables, PATH=f"{tools}:{os.environ['PATH']}")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def live(
    folder: str | None,
    pipeline: str,
    signals: Sequence[Signal] = (),
    *,
    step_s: float = 0.0,
    saves_every: int = 0,
    stops_after: int = -1,
    num_validation: int = 3,
    requeue_signal: int | None = None,
    variables: dict[str, str] | None = None,
    entry: str = "fit",
    loader: str = "own-sized",
    strategy: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Life:
    """Start the job once; it goes on from its last preemption, as the script of a requeued job does.

    Without a folder it is no job, and writes nothing.
    """
    torch.manual_seed(3)
    model, sends = Measured(ROWWISE_ADAGRAD), Sends(signals)
    model.step_s = step_s
    callbacks, before, start = [sends, Stops(stops_after)], _handlers(), time.monotonic()
    options = {"max_epochs": 2, "val_check_interval": 3, "default_root_dir": folder, **kwargs}
    ended_by = ""
    with contextlib.nullcontext() if folder is None else slurm(folder, **(variables or {})):
        if folder is not None:
            requeue = None if requeue_signal is None else signal.Signals(requeue_signal)
            options["plugins"] = [SLURMEnvironment(requeue_signal=requeue)]
            if saves_every:
                name = f"{folder}/saved"
                callbacks.append(ModelCheckpoint(name, every_n_train_steps=saves_every, save_top_k=-1, save_last=True))
                options["enable_checkpointing"] = True
        trainer = make_trainer(make_strategy(model, pipeline, **(strategy or {})), callbacks=callbacks, **options)
        try:
            getattr(trainer, entry)(model, datamodule=Data(loader, num_validation))
        except (SIGTERMException, OSError) as error:
            ended_by = type(error).__name__
        finally:
            sends.end()
    seconds = time.monotonic() - start
    progress: tuple[Any, ...] = (trainer.global_step, trainer.current_epoch, logged_step(trainer))
    result = None
    if entry == "fit":
        [optimizer] = trainer.optimizers
        result = collect(model, optimizer, model.losses or [torch.zeros(())])
        progress = (*progress, optimizer.param_groups[0]["lr"])
    are_back = _handlers() == before
    return Life(result, model.seen, model.epochs, model.validations, progress, ended_by, are_back, seconds)


def live_and_break_a_save(folder: str, pipeline: str, signals: Sequence[Signal]) -> Life:
    """Fail on rank 0 just before a checkpoint gets its name, as if the job were killed there."""
    with mock.patch.object(Place, "commit", side_effect=OSError("killed")):
        return live(folder, pipeline, signals)


def live_in_store(store: str, folder: str, refused: str, *args: Any, **kwargs: Any) -> Life:
    """Start the job with its `default_root_dir` in an object store, which refuses objects with `refused` in their name.

    Without a text it refuses none.
    """

    def refuse(what: str, path: str) -> None:
        if refused and what == "put" and refused in path:
            raise PermissionError(path)

    with object_store.store_in(store), object_store.before_each_change(refuse):
        return live(folder, *args, default_root_dir=IN_STORE, **kwargs)


def live_with_own_handler(folder: str, pipeline: str, signals: Sequence[Signal]) -> tuple[bool, list[int]]:
    """Handle the signal; return whether the handler is back, and what it was called with."""
    heard: list[int] = []

    def handle(signum: int, frame: Any) -> None:
        heard.append(signum)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        return live(folder, pipeline, signals).handlers_are_back, heard
    finally:
        signal.signal(signal.SIGUSR1, before)


def _handlers() -> dict[int, Any]:
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return {signum: signal.getsignal(signum) for signum in catchable}
