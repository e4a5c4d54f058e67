"""A preemption signal on any rank saves one checkpoint at the end of a step and requeues the job once (Slurm)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from ...compat.lightning import replace_requeue_handler, requeue_handler


class Preemption:
    """Replaces Lightning's handler of the requeue signal, which saves wherever the signal finds a rank.

    The handler only notes the signal. The ranks learn of it from the polls about batches, as they learn of SIGTERM.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Lightning's own handler finalizes loggers, saves `hpc_ckpt_N.ckpt` and calls `scontrol requeue` on rank 0.
        self._save_and_requeue = requeue_handler(trainer)
        self._received = False  # whether this process got the signal
        self._agreed = False  # whether all ranks know that one of them did
        self._is_over = False  # whether the job was requeued: once in a run
        self.saving = False  # while the checkpoint is saved
        self.validates = False  # whether a validation belongs to the latest step

    def __call__(self, signum: int, frame: Any) -> None:
        """Note the signal for the next poll."""
        self._received = True

    @property
    def wanted(self) -> bool:
        """Whether this process got the signal and the job is not requeued yet."""
        return self._received and not self._is_over

    @property
    def due(self) -> bool:
        """Whether to save and requeue at the next suitable point; alike on all ranks."""
        return (self._agreed or (self._received and self._trainer.world_size == 1)) and not self._is_over

    def note_result(self, agreed: bool) -> None:
        """Note the result of a poll about the signal, on all ranks alike."""
        self._agreed |= agreed

    def poll(self) -> None:
        """Poll all ranks about the signal; all ranks call this and wait."""
        strategy: Any = self._trainer.strategy
        self.note_result(strategy.any_rank(self.wanted))

    def requeue(self) -> None:
        """Save a checkpoint and requeue the job if that is due; all ranks call this at the same point."""
        if not self.due:
            return
        strategy: Any = self._trainer.strategy
        self._is_over = self.saving = True
        try:
            with strategy.saving_at_once():  # a requeued job is killed, with the thread of an asynchronous save
                self._save_and_requeue(strategy.cluster_environment.requeue_signal, None)
        finally:
            self.saving = False


def install(trainer: Trainer, undo: ExitStack) -> None:
    """Let `Preemption` handle the requeue signal until `undo` is closed, if Lightning would handle it."""
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        replace_requeue_handler(trainer, Preemption(trainer), undo)


def of(trainer: Trainer) -> Preemption | None:
    """Return the handler of this run; None if Lightning does not requeue its job."""
    found = requeue_handler(trainer)
    return found if isinstance(found, Preemption) else None


def finish(trainer: Trainer) -> None:
    """Save and requeue at the last opportunity, if any rank got the signal; all ranks call this alike."""
    if (preemption := of(trainer)) is not None:
        preemption.poll()
        preemption.requeue()
