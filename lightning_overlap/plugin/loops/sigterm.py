"""SIGTERM on any rank ends all ranks after the same step: they learn of it from the consensus about batches."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ...compat.lightning import note_sigterm, replace_sigterm_handler, replaced_sigterm_handler
from . import preemption


@dataclass(eq=False)
class Sigterm:
    """Replaces Lightning's handler of SIGTERM, which broadcasts between any other collectives of the rank."""

    trainer: Trainer
    received: bool = False

    def __call__(self, signum: int, frame: Any) -> None:
        """Forward the signal to the processes that this process launched, and note it for the next consensus."""
        launcher = self.trainer.strategy.launcher
        if not self.received and launcher is not None:
            launcher.kill(signum)
        self.received = True


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let `Sigterm` handle the signal until `undo` is closed, if there are several ranks."""
    if trainer.world_size > 1:
        replace_sigterm_handler(trainer, Sigterm(trainer), undo)


def received(trainer: Trainer) -> bool:
    """Whether this process received SIGTERM."""
    handler = replaced_sigterm_handler(trainer)
    return handler.received if isinstance(handler, Sigterm) else bool(trainer.received_sigterm)


def leave(trainer: Trainer) -> None:
    """Raise a SIGTERMException, as all ranks do now: Lightning then ends the run in its usual way."""
    preemption.finish(trainer)  # it ends after that signal, not before
    note_sigterm(trainer)
    raise SIGTERMException
