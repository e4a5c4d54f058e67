"""SIGTERM on any rank ends all ranks after the same step: they learn of it from the consensus about batches.

A data loader that hangs would keep its rank from that step. So it is interrupted a while after the signal; if it does
not even return to Python, the process ends.
"""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ...compat.lightning import note_sigterm, replace_sigterm_handler, replaced_sigterm_handler
from .. import first_words
from . import preemption
from .signals import Signals, in_main_thread

LOADER_S = 10.0  # how long a data loader may take for a batch once its process has got the signal
RETURN_S = 10.0  # how long it may take after that to return to Python, where an error ends it
WORKERS_S = 1.0  # how long its workers may take to end


@dataclass(eq=False)
class _Fetch:
    """A batch that is being taken from a data loader, or the loader's iterator that is being made."""

    began: float = field(default_factory=time.monotonic)
    overdue: bool = False  # whether it has taken too long
    interrupted: bool = False


@dataclass(eq=False)
class Sigterm:
    """Replaces Lightning's handler of SIGTERM, which broadcasts between any other collectives of the rank."""

    trainer: Trainer
    received: bool = False
    fetch: _Fetch | None = None  # under way
    over: bool = False  # whether the run is over; Python may still call this if Lightning's teardown has failed
    _pid: int = field(default_factory=os.getpid)

    def __call__(self, signum: int, frame: Any) -> None:
        """Forward the signal to the processes that this process launched, and note it for the next consensus."""
        if os.getpid() != self._pid:  # a process that was forked from this one, and is no rank
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        if self.over:
            return
        launcher = self.trainer.strategy.launcher
        if not self.received and launcher is not None:
            launcher.kill(signum)
        self.received = True
        if self.trainer.world_size == 1:
            note_sigterm(self.trainer)  # Lightning's loops look for it after each batch
        fetch = self.fetch
        if fetch is not None and fetch.overdue and not fetch.interrupted:
            fetch.interrupted = True
            raise RuntimeError(
                f"rank {self.trainer.global_rank} was told to end (SIGTERM), and then waited {LOADER_S:g} s for its "
                "data loader, which hangs. Other ranks wait for this one, so the run ends here and not after a step: "
                "resume from a checkpoint."
            )

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Within this context a batch is taken from a data loader, which may hang."""
        outer, self.fetch = self.fetch, (fetch := _Fetch())
        try:
            yield
        finally:
            self.fetch = outer
            if fetch.interrupted:
                with suppress(RuntimeError):  # PyTorch's about a worker that has ended
                    _end_workers()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context a thread ends a fetch that hangs after the signal; entered in the main thread."""
        signals, ended = Signals(), threading.Event()
        watcher = threading.Thread(target=self._watch, args=(signals, ended), name="sigterm", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            signals.wake()
            watcher.join()
            signals.close()

    def _watch(self, signals: Signals, ended: threading.Event) -> None:
        told: float | None = None  # when the signal came
        while not ended.is_set():
            came = signals.wait(1.0 if told is None else 0.1)
            if told is None and (self.received or signal.SIGTERM in came):
                told = time.monotonic()
            fetch = self.fetch
            if told is None or fetch is None:  # a step, a save or an exchange takes the time that it needs
                continue
            waited = time.monotonic() - max(told, fetch.began)
            if waited > LOADER_S + RETURN_S:
                self._end_process()
            elif waited > LOADER_S and not fetch.overdue:
                fetch.overdue = True
                # The handler runs in the main thread once that is in Python, and raises an error.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _end_process(self) -> None:
        """End this process, whose main thread does not return to Python; before that say so to the other ranks."""
        strategy: Any = self.trainer.strategy
        error = RuntimeError(
            f"rank {self.trainer.global_rank} was told to end (SIGTERM), and then waited {LOADER_S + RETURN_S:g} s for "
            "its data loader, which hangs in code that does not return to Python. Its process ends: resume from a "
            "checkpoint."
        )
        try:
            # Not through `sys.stderr` nor a logger: the main thread may hold their locks.
            os.write(2, f"lightning_overlap: {error}\n".encode())
            faulthandler.dump_traceback(2)
            _end_workers()
            strategy.note_cause(error)
            strategy.finish_save(error)  # the thread of an asynchronous save, if there is one
        finally:
            os._exit(1)


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let `Sigterm` handle the signal until `undo` is closed."""
    handler = Sigterm(trainer)
    replace_sigterm_handler(trainer, handler, undo)
    undo.callback(setattr, handler, "over", True)
    if in_main_thread():  # else Lightning handles no signals
        undo.enter_context(handler.watched())


def received(trainer: Trainer) -> bool:
    """Whether this process received SIGTERM."""
    handler = replaced_sigterm_handler(trainer)
    return handler.received if isinstance(handler, Sigterm) else bool(trainer.received_sigterm)


@contextmanager
def fetching(trainer: Trainer) -> Iterator[None]:
    """Within this context a batch is taken from a data loader: after SIGTERM it may take `LOADER_S` seconds."""
    handler = replaced_sigterm_handler(trainer)
    if isinstance(handler, Sigterm):
        with handler.fetching():
            yield
    else:
        yield


def leave(trainer: Trainer, told: int) -> None:
    """Raise a SIGTERMException, as all ranks do now: Lightning then ends the run in its usual way.

    `told` is a rank that received the signal, the same on all ranks.
    """
    _say(trainer, told)
    preemption.finish(trainer)  # it ends after that signal, not before
    note_sigterm(trainer)
    raise SIGTERMException


@contextmanager
def before_lightning_leaves(trainer: Trainer) -> Iterator[None]:
    """On one rank Lightning itself raises a SIGTERMException within this context: save and requeue before that."""
    try:
        yield
    except SIGTERMException:
        if trainer.world_size == 1:
            _say(trainer, trainer.global_rank)
            if (found := preemption.of(trainer)) is not None:
                found.requeue()
        raise


def _say(trainer: Trainer, told: int) -> None:
    """Log on this rank that the run ends, and where."""
    whose = "this rank" if received(trainer) else f"rank {told}"
    stage = trainer.state.stage
    where = "" if stage is None or stage == RunningStage.TRAINING else f" in stage {stage.value!r}"
    steps = f" after step {trainer.global_step}" if trainer.state.fn == TrainerFn.FITTING else ""
    first_words.tell(
        f"lightning_overlap: rank {trainer.global_rank} ends its run{steps}{where}: {whose} was told to (SIGTERM)"
    )


def _end_workers() -> None:
    """End the processes that Python ends at the exit of this one: the loader's workers, which may hang too."""
    # If a worker hangs, PyTorch waits 5 s for it, for one after the other. Its workers exit at their parent's signal.
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + WORKERS_S
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
        if worker.is_alive():
            worker.kill()
