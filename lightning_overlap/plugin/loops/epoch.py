"""The length of an epoch: its batches on all ranks, how many may be fetched, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from ...distributed import SKIP_ALIKE

Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, by rank; all ranks call it and wait."""


class Epoch:
    """Number of batches of an epoch on all ranks, and how many of them may be fetched by now."""

    def __init__(self, trainer: Trainer, *, trains: bool) -> None:
        self._trainer, self._trains = trainer, trains
        self.num_batches: float = float("inf")
        """Length of the shortest rank's epoch, None batches included; `inf` if it is not known."""
        self.lengths_known = False
        """Whether the lengths of all ranks are known."""
        self.num_allowed: float = 0
        """Number of batches that may be fetched in this epoch: a later `fit` would miss any others."""

    def agree(self, own: float, gather: Gather, *, knows: bool) -> None:
        """Set the length to the shortest rank's; all ranks call this.

        `own` is the length of this rank's epoch, `inf` if it is not known; `knows`, whether it surely has that many.
        """
        lengths, known = zip(*gather((own, knows)), strict=True)
        self.num_batches, self.lengths_known = min(lengths), all(known)

    def allow(self, num_trained: int) -> None:
        """Set the number of batches that may be fetched: `max_steps` limits it after `num_trained` batches."""
        loop, trainer = self._trainer.fit_loop.epoch_loop, self._trainer
        if not self._trains or loop.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
            self.num_allowed = float("inf")
            return
        every = trainer.accumulate_grad_batches
        done_of_step = loop.batch_progress.current.ready % every
        self.num_allowed = num_trained + (loop.max_steps - loop.global_step) * every - done_of_step

    def num_none_at_end(self, nones: list[int], gather: Gather, *, goes_on: bool) -> int:
        """Return how many None batches end the epoch, the same on all ranks; all of them call this.

        `nones` numbers the None batches on this rank after the last batch that all ranks train; `goes_on` says whether
        another batch follows on this rank.

        Raises:
            RuntimeError: A rank has a None batch where another rank has a batch to train.
        """
        told: list[tuple[list[int], bool]] = gather((nones, goes_on))
        for other, (fewer, follows) in enumerate(told):
            for rank, (numbers, _) in enumerate(told):
                if follows and len(numbers) > len(fewer):
                    number = numbers[len(fewer)]
                    raise RuntimeError(f"batch {number} is None on rank {rank}, not on rank {other}. {SKIP_ALIKE}")
        return min(len(numbers) for numbers, _ in told)
