"""The length of an epoch: its batches on all ranks, how many may be fetched, and how it ends."""

from collections.abc import Sequence

from lightning.pytorch import Trainer

from ...distributed import SKIP_ALIKE


def without_batches(has_batches: Sequence[float], epoch: int) -> str:
    """Return the message for an epoch in which only some ranks have batches; `has_batches` is each rank's number."""
    empty, others = (
        ", ".join(str(rank) for rank, has in enumerate(has_batches) if bool(has) is wanted) for wanted in (False, True)
    )
    return (
        f"The data loader of rank {empty} has no batch in epoch {epoch}, those of rank {others} have some. All ranks "
        "take the same number of batches, so nothing is trained in this epoch."
    )


def allows_empty_loaders(trainer: Trainer) -> bool:
    """Whether the user has set Lightning's flag for ranks without batches."""
    name = "allow_zero_length_dataloader_with_multiple_devices"
    return any(getattr(one, name, False) for one in (trainer.lightning_module, getattr(trainer, "datamodule", None)))


class Epoch:
    """Counts the batches of an epoch on all ranks; it takes none from a loader."""

    def __init__(self, trainer: Trainer, *, trains: bool) -> None:
        self._trainer, self._trains = trainer, trains
        self._gather = trainer.strategy.gather  # type: ignore[attr-defined]
        self.num_batches: float = float("inf")  # of the shortest rank, None batches included; `inf` if not known
        self.lengths: tuple[float, ...] = ()  # of each rank
        self.lengths_known = False  # whether the lengths of all ranks are known
        self.num_allowed: float = 0  # batches that may be fetched in this epoch: a later `fit` would miss any others

    def agree(self, own: float, *, is_certain: bool) -> None:
        """Set `num_batches` to the shortest rank's, from this rank's length; all ranks call this."""
        self.lengths, known = zip(*self._gather((own, is_certain)), strict=True)
        self.num_batches, self.lengths_known = min(self.lengths), all(known)

    def allow(self, num_trained: int) -> None:
        """Let batches be fetched as far as `max_steps` allows after `num_trained` batches."""
        loop, trainer = self._trainer.fit_loop.epoch_loop, self._trainer
        self.num_allowed = float("inf")
        if self._trains and loop.max_steps != -1 and trainer.lightning_module.automatic_optimization:
            every = trainer.accumulate_grad_batches
            done_of_step = loop.batch_progress.current.ready % every
            self.num_allowed = num_trained + (loop.max_steps - loop.global_step) * every - done_of_step

    def num_none_at_end(self, nones: list[int], *, goes_on: bool) -> int:
        """Return how many None batches end the epoch on all ranks; all of them call this."""
        # `nones` numbers this rank's after the last batch that all ranks train; with `goes_on` another batch follows.
        by_rank: list[tuple[list[int], bool]] = self._gather((nones, goes_on))
        for other, (fewer, follows) in enumerate(by_rank):
            for rank, (numbers, _) in enumerate(by_rank):
                if follows and len(numbers) > len(fewer):
                    number = numbers[len(fewer)]
                    raise RuntimeError(f"batch {number} is None on rank {rank}, not on rank {other}. {SKIP_ALIKE}")
        return min(len(numbers) for numbers, _ in by_rank)
