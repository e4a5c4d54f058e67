"""What an executor is given: where batches come from, what does the sparse stages, who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from ..schedules import Stage, StreamName, WeightOwner
from .inflight import InFlightBatch

Observer = Callable[[str, Stage, int], None]
"""Called with ("issue" | "wait", stage, batch) as the executor goes; for tests and timelines."""


def observe_nothing(kind: str, stage: Stage, index: int) -> None:
    """The observer of runs that nobody watches.

    Args:
        kind: "issue" before a stage is issued, "wait" before the host waits for other ranks.
        stage: Which stage.
        index: Number of the batch.
    """


class BatchSource(Protocol):
    """Where batches come from."""

    @property
    def exhausted(self) -> bool:
        """Whether it is known that no batch is left."""

    @property
    def length_known(self) -> bool:
        """Whether every rank is known to have as many batches, so that only the last one has to be agreed on."""

    @property
    def num_batches(self) -> float:
        """How many batches every rank's epoch has, those that are None among them; `inf` if that is not known."""

    @property
    def num_skipped(self) -> int:
        """How many batches of this epoch were None, so far."""

    @property
    def num_certain(self) -> int:
        """How many batches after the one fetched last `fetch` is sure to return, whenever it is called; 0 if unsure."""

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to end."""

    def fetch(self) -> tuple[Any, int, int] | None:
        """Return the next staged `(batch, batch_idx, dataloader_idx)`, or None where there is none (yet)."""


class SparseStages(Protocol):
    """What each sparse stage does for one batch; `sparse.SparsePipeline` does it with TorchRec."""

    @property
    def ready(self) -> bool:
        """Whether it is known which part of a batch feeds which module."""

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward; not where no gradient travels that it could wait for."""

    def discover(self, inflight: InFlightBatch) -> bool:
        """Learn that from a forward that was just run; True if it was learnt now."""

    def forward(self, inflight: InFlightBatch) -> AbstractContextManager[None]:
        """Serve early results to the modules' callers while a `training_step` runs.

        Where a module runs its own forward for a batch instead, `inflight.ran_unpipelined` says so.
        """

    def input_splits_dist(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of split sizes."""

    def input_data_dist(self, inflight: InFlightBatch) -> None:
        """Read the sizes; start the all-to-alls of lengths, ids and weights."""

    def receive_input(self, inflight: InFlightBatch) -> Any:
        """Wait for these and return what the lookup will read."""

    def prefetch(self, inflight: InFlightBatch) -> None:
        """Bring the rows that the lookup will read into the cache of the tables that have one."""

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not looked up: no batch is going to."""

    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool:
        """Whether a batch has tables of these owners still to look up."""

    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        """Look up the tables of these owners and start the all-to-all of embeddings."""

    def finish_lookups(self) -> None:
        """Wait for the lookups that run in threads; start the all-to-all of what they found."""

    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool:
        """Have a function called where the backward of a batch first waits for other ranks, before it writes a table.

        Args:
            inflight: The batch; its forward has run.
            stage: The first stage that the function issues.
            call: Has no arguments; may be called several times in one backward.

        Returns:
            False if no backward will call it, or if that stage had better be issued before the backward.
        """

    def drop_lookups(self, inflight: InFlightBatch) -> None:
        """Forget early results; the modules' own forward will run instead."""

    def count_lookups(self, inflight: InFlightBatch, times: int) -> None:
        """Count the early lookups of a batch for the fused optimizers so many times more; -1: take them back."""

    def start_update(self, inflight: InFlightBatch) -> None:
        """Start the all-to-alls of gradients of a batch whose backward is over; keep what its update needs."""

    def embedding_update(self, inflight: InFlightBatch) -> None:
        """Wait for the gradients of a batch and update the tables."""

    def drop_update(self, inflight: InFlightBatch) -> None:
        """Wait for the gradients of a batch, leave the tables as they are, and take its lookups back."""

    def update_replicas(self) -> None:
        """Make the updates of replicated tables that have waited for an optimizer step."""

    def drop_replica_updates(self) -> None:
        """Leave them out: the step is not going to come."""

    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool:
        """Whether somebody has written tables of this rank after they were looked up for one of these batches."""

    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None:
        """Leave the early results of these batches aside, on all ranks alike: the tables were written since."""

    def forget_received(self, inflight: InFlightBatch) -> None:
        """Let go of the embeddings of a batch whose backward is over."""

    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool:
        """Whether the gradients of these batches' updates arrive within a time."""

    def drain(self, inflight: InFlightBatch) -> None:
        """Complete every collective that was started for a batch that will not be trained."""


class StageTimer(Protocol):
    """What the executor and the sparse stages tell."""

    def begin(self, stage: Stage, batch: int, stream: StreamName) -> None:
        """A stage begins; stages may begin inside others.

        Args:
            stage: Which stage.
            batch: Number of the batch.
            stream: The stream that it is issued on.
        """

    def end(self) -> None:
        """The stage that began last has been issued."""

    def copy(self) -> AbstractContextManager[None]:
        """Go around the copies of a batch to the device, on their stream."""

    def data(self) -> AbstractContextManager[None]:
        """Go around the wait for a batch of the data loader."""

    def merge(self, batch: int) -> AbstractContextManager[None]:
        """Go around the wait of the compute stream for embeddings."""


_NO_TIMER: AbstractContextManager[Any] = nullcontext()


def waiting_for_data(timer: StageTimer | None) -> AbstractContextManager[None]:
    """Go around the wait for a batch of the data loader, and time it.

    Args:
        timer: Takes the times; None: nothing is timed.
    """
    return _NO_TIMER if timer is None else timer.data()


def timed(timer: StageTimer | None, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]:
    """Go around a stage and time it.

    Args:
        timer: Takes the times; None: nothing is timed.
        stage: Which stage.
        batch: Number of the batch.
        stream: The stream that the stage is issued on.
    """
    return _NO_TIMER if timer is None else _timed_stage(timer, stage, batch, stream)


@contextmanager
def _timed_stage(timer: StageTimer, stage: Stage, batch: int, stream: StreamName) -> Iterator[None]:
    timer.begin(stage, batch, stream)
    try:
        yield
    finally:
        timer.end()
