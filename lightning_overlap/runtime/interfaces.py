"""The inputs of an executor: a source of batches, the sparse stages, an observer and a timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ..schedules import Stage, StreamName, WeightOwner
from .inflight import InFlightBatch

ModulePart = tuple[str, int]
"""Name of a sharded module, and number of one of its parts: TorchRec has a lookup and an output dist for each."""

Observer = Callable[[str, Stage, int], None]
"""Called with ("issue" | "wait", stage, batch number) for every issued stage and every wait for a result."""


def observe_nothing(kind: str, stage: Stage, index: int) -> None:
    """The observer of a run without an observer."""


class FetchedBatch(NamedTuple):
    """A batch from a source."""

    batch: Any
    batch_idx: int
    """Its number in its data loader; None batches count."""
    dataloader_idx: int
    """Index of its data loader."""
    latest_none: int = -1
    """Number in its data loader of the last None batch before it in the epoch; -1 if there is none."""
    loader_states: Any = None
    """States of the data loaders after it, for checkpoints."""


class BatchSource(Protocol):
    """Where batches come from; `plugin.BatchStream` takes them from Lightning's loaders.

    `fetch` returns None after the last batch, and while `max_steps` excludes the batch; the timer times the wait for
    the data loader.
    """

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
    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None: ...


class Inputs(Protocol):
    """The input dist of one batch; `sparse.SparseInputs` implements it with TorchRec, and documents the methods.

    Here and below, a method named as a `Stage` issues that stage on the current stream.
    """

    @property
    def ready(self) -> bool: ...
    def discover(self, inflight: InFlightBatch) -> None: ...
    def make_inputs(self, inflight: InFlightBatch) -> None: ...
    def input_splits_dist(self, inflight: InFlightBatch) -> None: ...
    def input_data_dist(self, inflight: InFlightBatch) -> None: ...
    def receive_input(self, inflight: InFlightBatch) -> Any: ...
    def drain(self, inflight: InFlightBatch) -> None: ...


class Lookups(Protocol):
    """The lookup of one batch, from the cache to the end of its use; `sparse.SparseLookups` implements it."""

    def prefetch(self, inflight: InFlightBatch) -> None: ...
    def forget_prefetched(self) -> None: ...
    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool: ...
    def embedding_lookup(
        self, inflight: InFlightBatch, owners: frozenset[WeightOwner], only: ModulePart | None = None
    ) -> None: ...
    def forward(self, inflight: InFlightBatch, send_next: Callable[[], None]) -> AbstractContextManager[None]: ...
    def forget_received(self, inflight: InFlightBatch) -> None: ...
    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool: ...
    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None: ...
    def drop_lookups(self, inflight: InFlightBatch) -> None: ...


class Updates(Protocol):
    """The backward of one batch and its update of the tables; `sparse.TableUpdates` implements them."""

    @property
    def can_defer_updates(self) -> bool: ...
    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool: ...
    def start_update(self, inflight: InFlightBatch) -> None: ...
    def embedding_update(
        self, inflight: InFlightBatch, updated: Callable[[ModulePart], None] | None = None
    ) -> None: ...
    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool: ...
    def drop_update(self, inflight: InFlightBatch) -> None: ...
    def count_lookups(self, inflight: InFlightBatch, times: int) -> None: ...
    def update_replicas(self) -> None: ...
    def hold_replicas(self) -> None: ...


class SparseStages(NamedTuple):
    """The sparse stages of a model."""

    inputs: Inputs
    lookups: Lookups
    updates: Updates


class WeightGradients(Protocol):
    """The second half of a backward: `dense.SplitLayers` computes the weight gradients of the dense part."""

    def begin_step(self, *, splits: bool) -> None: ...
    def end_forward(self) -> None: ...
    def begin_backward(self, loss: Any) -> None: ...
    def compute(self) -> None: ...
    def finish(self) -> None: ...


class StageTimer(Protocol):
    """Context managers that time parts of a step; `profiling.SpanRecorder` records their spans.

    `during` times a stage, perhaps inside another one, `copy` a batch's copies to the device, `data` the wait for the
    data loader, `merge` the compute stream's wait for embeddings.
    """

    def during(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]: ...
    def copy(self) -> AbstractContextManager[None]: ...
    def data(self) -> AbstractContextManager[None]: ...
    def merge(self, batch: int) -> AbstractContextManager[None]: ...
