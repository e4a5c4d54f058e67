"""A mode with its options: one value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from .modes import ASYNC_LOOKUP, MODES, ModeName, async_lookup, defer_update, frozen_window
from .options import named
from .schedule import Schedule
from .sequential import Schedules, with_exact_warmup


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode with its options, for `OverlapEmbeddingStrategy(pipeline=Mode("semi_sync", start_batch=1000))`.

    Args:
        name: A mode's name (see `lightning_overlap.MODES`), or a `Schedule`.
        staleness: For `async_lookup`: how many updates, in batches, a lookup does not see; from 1 on. None: 2.
        defer_update: In a mode with a staleness, overlap the all-to-all of gradients with the optimizer step and the
            next forward, and update the tables then. The staleness stays what it is. An evaluation, a checkpoint and
            the end of an epoch find the tables up to date; a callback at the end of a batch finds them without that
            batch's update.
        frozen_window: With `accumulate_grad_batches=k`, in an exact mode with sparse stages: update the tables with
            the optimizer step, the k batches' updates in their order. All k lookups see the tables as of the step
            before, so only one of k waits for an update. Without it the backward of each batch updates the tables.
        stash_gradients: In a mode of staleness k, let each step of the dense optimizers apply the gradients of k steps
            before, so that they are as old as the embeddings. The first k steps have none to apply; the gradients of
            the last k steps are applied at the end of `fit`. A checkpoint holds those that wait.
        start_batch: A mode with a staleness begins with this batch, counted over all epochs. Batches before it train
            exactly, as in `fused_sparse_dist`. The switch loses no batch, looks up none twice, and does not wait for
            the device.
        end_batch: From this batch on training is exact again; lookups that are under way are still used.

    Raises:
        ValueError: No mode has this name (the nearest names are listed), or the mode does not take one of the options.
        TypeError: An option has the wrong type.
    """

    name: ModeName | Schedule = "fused_sparse_dist"
    staleness: int | None = None
    defer_update: bool = False
    frozen_window: bool = False
    stash_gradients: bool = False
    start_batch: int = 0
    end_batch: int | None = None

    def __post_init__(self) -> None:
        schedule = self.schedule
        with_exact_warmup(schedule, self.start_batch, self.end_batch)
        if self.stash_gradients and not schedule.staleness:
            raise ValueError(
                f"stash_gradients: {schedule.name!r} has a staleness of 0, and so does its dense part. The option is "
                "for semi_sync and async_lookup."
            )

    @property
    def schedule(self) -> Schedule:
        """The mode's table, with its options applied."""
        if self.name == "auto":
            raise ValueError(
                "pipeline='auto' tries modes of the same losses, and takes no options of a mode. Name one."
            )
        schedule = self.name if isinstance(self.name, Schedule) else named("pipeline", self.name, MODES, ("auto",))
        if self.staleness is not None:
            if self.name != ASYNC_LOOKUP.name:
                raise ValueError(
                    f"staleness={self.staleness!r}: {schedule.name!r} has a staleness of {schedule.staleness} by its "
                    f"order of stages. To choose the staleness take Mode({ASYNC_LOOKUP.name!r}, staleness=...)."
                )
            schedule = async_lookup(self.staleness)
        if self.defer_update:
            schedule = defer_update(schedule)
        return frozen_window(schedule) if self.frozen_window else schedule

    @property
    def schedules(self) -> Schedules:
        """The tables to walk, batch by batch: those before `start_batch` and from `end_batch` on are exact."""
        return with_exact_warmup(self.schedule, self.start_batch, self.end_batch)


def resolve_mode(pipeline: str | Schedule | Mode) -> Mode:
    """Return the mode of a name or a schedule; a `Mode` as it is."""
    return pipeline if isinstance(pipeline, Mode) else Mode(pipeline)  # type: ignore[arg-type]
