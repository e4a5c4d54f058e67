"""A batch in flight, and the inputs of an executor: source of batches, sparse stages, observer and timer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..schedules import Stage, StreamName, WeightOwner

ModulePart = tuple[str, int]  # name of a sharded module, number of one of its parts: each has a lookup of its own
OnUpdated = Callable[[ModulePart], None]  # called after the update of each part of a module
Observer = Callable[[str, Stage, int], None]
"""Called with ("issue" | "wait", stage, batch number) for every issued stage and every wait for a result."""


def _nothing_to_compare() -> None:
    """Take the place of `Rates.compare` on one rank, and in an evaluation."""


class Rates(NamedTuple):
    """The learning rates of this rank. Ranks send the digest with a batch."""

    digest: int = 0  # not negative, below 1 << 31
    compare: Callable[[], None] = _nothing_to_compare  # raises if the rates differ; if digests do, all ranks call it


NO_RATES = Rates()


class FetchedBatch(NamedTuple):
    """A batch from a source."""

    batch: Any
    batch_idx: int  # its number in its data loader; None batches count
    dataloader_idx: int
    latest_none: int = -1  # number in its data loader of the last None batch before it in the epoch; -1: none
    loader_states: Any = None  # states of the data loaders after it, for checkpoints
    rates: Rates = NO_RATES  # when it was fetched


@dataclass(slots=True)
class InFlightBatch:
    """A batch in flight. It keeps alive every tensor that a queued kernel or collective still reads."""

    index: int  # number of batches fetched earlier in the epoch
    batch: Any  # the same object that `training_step` gets; these six fields are those of `FetchedBatch`
    batch_idx: int = 0
    dataloader_idx: int = 0
    latest_none: int = -1
    loader_states: Any = None
    rates: Rates = NO_RATES
    done: dict[Stage, tuple[StreamName, Any]] = field(default_factory=dict)  # stages issued: stream and event after it
    modules: dict[str, Any] = field(default_factory=dict)  # state of pipelined modules by name, of the sparse stages
    missing: frozenset[str] = frozenset()  # modules whose input only some ranks have; known once sizes are read
    sizes: Any = None  # the exchange of split sizes of all modules, while it is under way; the sparse stages own it
    defers_update: bool = False  # whether its backward leaves its update to `DeferredUpdates`; set at its lookup
    ran_unpipelined: bool = False  # whether a module ran its own forward for it, and no backward has followed yet
    consumed: bool = False  # whether its `training_step` has begun
    num_unseen: int = 0  # staleness: the number of earlier batches whose updates its fused lookup did not see
    counted: Any = None  # the count of its stale rows (`sparse.StaleCounts`), which may be under way


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


class Inputs(Protocol):
    """The input dist of a batch: `sparse.SparseInputs`. A method named as a `Stage` issues it on the current stream."""

    @property
    def ready(self) -> bool: ...
    def discover(self, inflight: InFlightBatch) -> None: ...
    def input_splits_dist(self, inflight: InFlightBatch) -> None: ...
    def input_data_dist(self, inflight: InFlightBatch) -> None: ...
    def receive_input(self, inflight: InFlightBatch) -> Any: ...
    def drain(self, inflight: InFlightBatch) -> None: ...


class Lookups(Protocol):
    """The lookup of a batch, from the cache to the end of its use: `sparse.SparseLookups`."""

    def prefetch(self, inflight: InFlightBatch) -> None: ...
    def forget_prefetched(self) -> None: ...
    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool: ...
    def embedding_lookup(
        self, inflight: InFlightBatch, owners: frozenset[WeightOwner], only: ModulePart | None = None
    ) -> None: ...
    def forward(self, inflight: InFlightBatch, send_next: Callable[[], None]) -> AbstractContextManager[None]: ...
    def end_part(self, inflight: InFlightBatch) -> None: ...
    def forget_received(self, inflight: InFlightBatch) -> None: ...
    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool: ...
    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None: ...
    def drop_lookups(self, inflight: InFlightBatch) -> None: ...


class Updates(Protocol):
    """The backward of a batch and its update of the tables: `sparse.TableUpdates`."""

    @property
    def can_defer_updates(self) -> bool: ...
    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool: ...
    def start_update(self, inflight: InFlightBatch) -> None: ...
    def embedding_update(self, inflight: InFlightBatch, updated: OnUpdated | None = None) -> None: ...
    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool: ...
    def forget_update(self, inflight: InFlightBatch) -> None: ...
    def count_lookups(self, inflight: InFlightBatch, times: int) -> None: ...


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
    """Context managers that time a stage, copies to the device, the wait for the data loader, or for embeddings."""

    def during(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]: ...
    def copy(self) -> AbstractContextManager[None]: ...
    def data(self) -> AbstractContextManager[None]: ...
    def merge(self, batch: int) -> AbstractContextManager[None]: ...
