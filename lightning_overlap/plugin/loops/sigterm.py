"""SIGTERM on any rank ends all ranks after the same step: they learn of it from the consensus about batches.

A data loader that hangs would keep its rank from that step. So it is interrupted a while after the signal.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ...compat.lightning import note_sigterm, replace_sigterm_handler, replaced_sigterm_handler
from .. import first_words
from . import preemption

LOADER_S = 10.0  # how long a data loader may take for a batch once its process has got the signal


@dataclass(eq=False)
class Sigterm:
    """Replaces Lightning's handler of SIGTERM, which broadcasts between any other collectives of the rank."""

    trainer: Trainer
    received: bool = False
    _pid: int = field(default_factory=os.getpid)
    _fetch: object = None  # the fetch from a data loader that is under way
    _overdue: object = None  # the fetch that has taken too long
    _interrupted: bool = False

    def __call__(self, signum: int, frame: Any) -> None:
        """Forward the signal to the processes that this process launched, and note it for the next consensus."""
        if os.getpid() != self._pid:  # a process that was forked from this one, and is no rank
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        launcher = self.trainer.strategy.launcher
        if not self.received and launcher is not None:
            launcher.kill(signum)
        self.received = True
        if self.trainer.world_size == 1:
            note_sigterm(self.trainer)  # Lightning's loops look for it after each batch
        if self._fetch is None:
            return
        if self._overdue is not self._fetch:
            self._watch()
        elif not self._interrupted:
            self._interrupted = True
            _end_workers()
            raise RuntimeError(
                f"rank {self.trainer.global_rank} was told to end (SIGTERM), and then waited {LOADER_S:g} s for its "
                "data loader, which hangs. Other ranks wait for this one, so the run ends here and not after a step: "
                "resume from a checkpoint."
            )

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Within this context a batch is taken from a data loader, which may hang."""
        self._fetch = object()
        try:
            if self.received:
                self._watch()
            yield
        finally:
            self._fetch = None

    def _watch(self) -> None:
        watcher = threading.Timer(LOADER_S, self._interrupt, [self._fetch])
        watcher.daemon = True
        watcher.start()

    def _interrupt(self, fetch: object) -> None:
        """If a fetch is still under way, let this handler run in the main thread, where it raises an error."""
        if self._fetch is not fetch:
            return
        self._overdue = fetch
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let `Sigterm` handle the signal until `undo` is closed."""
    replace_sigterm_handler(trainer, Sigterm(trainer), undo)


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


def leave(trainer: Trainer) -> None:
    """Raise a SIGTERMException, as all ranks do now: Lightning then ends the run in its usual way."""
    _say(trainer)
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
            _say(trainer)
            if (found := preemption.of(trainer)) is not None:
                found.requeue()
        raise


def _say(trainer: Trainer) -> None:
    """Log on this rank that the run ends, and where."""
    whose = "this rank" if received(trainer) else "another rank"
    stage = trainer.state.stage
    where = "" if stage is None or stage == RunningStage.TRAINING else f" in stage {stage.value!r}"
    steps = f" after step {trainer.global_step}" if trainer.state.fn == TrainerFn.FITTING else ""
    first_words.tell(
        f"lightning_overlap: rank {trainer.global_rank} ends its run{steps}{where}: {whose} was told to (SIGTERM)"
    )


def _end_workers() -> None:
    """End the processes that Python ends at the exit of this one: the loader's workers, which may hang too."""
    # If a worker hangs, PyTorch waits 5 s for it, for one after the other. Its workers exit at their parent's signal.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
