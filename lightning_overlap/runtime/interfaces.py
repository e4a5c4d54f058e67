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
    """The observer of runs that nobody watches."""


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
    def ready(self) -> bool: ...
    @property
    def can_defer_updates(self) -> bool: ...
    def discover(self, inflight: InFlightBatch) -> None: ...
    def forward(self, inflight: InFlightBatch) -> AbstractContextManager[None]: ...

    def input_splits_dist(self, inflight: InFlightBatch) -> None: ...
    def input_data_dist(self, inflight: InFlightBatch) -> None: ...
    def receive_input(self, inflight: InFlightBatch) -> Any: ...
    def prefetch(self, inflight: InFlightBatch) -> None: ...
    def forget_prefetched(self) -> None: ...
    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool: ...
    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None: ...
    def finish_lookups(self) -> None: ...

    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool: ...
    def start_update(self, inflight: InFlightBatch) -> None: ...
    def embedding_update(self, inflight: InFlightBatch) -> None: ...
    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool: ...
    def update_replicas(self) -> None: ...
    def forget_received(self, inflight: InFlightBatch) -> None: ...

    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool: ...
    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None: ...
    def drop_lookups(self, inflight: InFlightBatch) -> None: ...
    def drop_update(self, inflight: InFlightBatch) -> None: ...
    def drop_replica_updates(self) -> None: ...
    def count_lookups(self, inflight: InFlightBatch, times: int) -> None: ...
    def drain(self, inflight: InFlightBatch) -> None: ...


class StageTimer(Protocol):
    """What the executor and the sparse stages tell; `profiling.SpanRecorder` writes it down.

    A stage may begin inside another one: `end` is of the one that began last. `copy`, `data` and `merge` go around the
    copies of a batch to the device, the wait for the data loader, and that of the compute stream for embeddings.
    """

    def begin(self, stage: Stage, batch: int, stream: StreamName) -> None: ...
    def end(self) -> None: ...
    def copy(self) -> AbstractContextManager[None]: ...
    def data(self) -> AbstractContextManager[None]: ...
    def merge(self, batch: int) -> AbstractContextManager[None]: ...


_NO_TIMER: AbstractContextManager[Any] = nullcontext()


def waiting_for_data(timer: StageTimer | None) -> AbstractContextManager[None]:
    """Go around the wait for a batch of the data loader, and time it where there is a timer."""
    return _NO_TIMER if timer is None else timer.data()


def timed(timer: StageTimer | None, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]:
    """Go around a stage of a batch on a stream, and time it where there is a timer."""
    return _NO_TIMER if timer is None else _timed_stage(timer, stage, batch, stream)


@contextmanager
def _timed_stage(timer: StageTimer, stage: Stage, batch: int, stream: StreamName) -> Iterator[None]:
    timer.begin(stage, batch, stream)
    try:
        yield
    finally:
        timer.end()
