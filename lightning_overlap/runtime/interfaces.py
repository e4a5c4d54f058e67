"""What a walker is given: the source of batches, the sparse stages, the weight gradients, an observer, a timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..schedules import Stage, StreamName
from .flight import FetchedBatch, Flight

Observer = Callable[[str, Stage, int], None]
"""Called with ("issue" | "wait", stage, batch number) for every issued stage and every wait for a result."""


class BatchSource(Protocol):
    """Where batches come from: `plugin.BatchStream`. `fetch` returns None at the end, or if `max_steps` excludes it."""

    @property
    def exhausted(self) -> bool: ...
    @property
    def length_known(self) -> bool: ...
    @property
    def num_batches(self) -> float: ...
    @property
    def num_certain(self) -> int: ...
    @property
    def stop_requested(self) -> bool: ...
    @property
    def save_requested(self) -> bool: ...
    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None: ...


class SparseStages(Protocol):
    """The sparse stages of all sharded modules of a model: `sparse.SparsePipeline`."""

    @property
    def ready(self) -> bool:
        """Whether it is known which input of a batch feeds which module."""

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward."""

    def make_flight(self, index: int, fetched: FetchedBatch) -> Flight:
        """Return a flight for a batch that was copied to the device."""

    def make_padding(self, index: int) -> Flight:
        """Return the flight of a rank whose batches to evaluate have ended, while other ranks have more.

        All ranks call this if any lacks the batch. Raises a RuntimeError on all of them if it is the first one of all.
        """

    def all_called(self) -> bool:
        """Whether every rank has called all modules that may be looked up early in this step; all ranks call this."""

    def discover(self, current: Flight) -> None:
        """Learn from a forward which input feeds which module; all ranks call this after the same forward."""

    def forget_prefetched(self) -> None:
        """Drop prefetches without a lookup."""

    def are_overwritten(self, flights: Iterable[Flight]) -> bool:
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""

    def drop_overwritten(self, flights: Iterable[Flight]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written afterwards."""


class WeightGradients(Protocol):
    """The second half of a backward: `dense.SplitLayers` computes the weight gradients of the dense part."""

    def begin_step(self, *, splits: bool) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self, loss: Any) -> None: ...
    def compute(self) -> None: ...
    def finish(self) -> None: ...


class StageTimer(Protocol):
    """Context managers that time a stage, copies to the device, the wait for the data loader, or for embeddings."""

    def during(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]: ...
    def copy(self) -> AbstractContextManager[None]: ...
    def data(self) -> AbstractContextManager[None]: ...
    def merge(self, batch: int) -> AbstractContextManager[None]: ...
