"""A batch in flight: what is known of it, and the stages that it goes through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..schedules import Stage, WeightOwner
from .streams import Made

ModulePart = tuple[str, int]  # name of a sharded module, number of one of its parts: each has a lookup of its own


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
    balanced: Any = None  # what balancing across ranks did to it


@dataclass(slots=True)
class Flight:
    """A batch in flight. It keeps alive every tensor that a queued kernel or collective still reads.

    A `Walker` calls the methods below, each for a stage of this batch on the current stream. The sparse stages
    (`sparse.SparseFlight`) implement them for all sharded modules of a model.
    """

    index: int  # number of batches fetched earlier in the epoch
    batch: Any  # the same object that `training_step` gets; these seven fields are those of `FetchedBatch`
    batch_idx: int = 0
    dataloader_idx: int = 0
    latest_none: int = -1
    loader_states: Any = None
    rates: Rates = NO_RATES
    balanced: Any = None
    issued: dict[Stage, Made] = field(default_factory=dict)  # by issued stage, what it makes, for other streams
    defers_update: bool = False  # whether its backward leaves its update to a later row; set at its lookup
    ran_unpipelined: bool = False  # whether a module ran its own forward for it, and no backward has followed yet
    ids_received: bool = False  # whether `receive_ids` has been called
    consumed: bool = False  # whether its `training_step` has begun
    is_padding: bool = False  # whether this rank has no batch of this number, and only takes part in lookups of others
    num_unseen: int = 0  # staleness: the number of earlier batches whose updates its fused lookup did not see

    def send_sizes(self) -> None:
        """Start the all-to-all of sizes (`INPUT_SPLITS_DIST`)."""
        raise NotImplementedError

    def send_ids(self) -> None:
        """Read the sizes on the host; start the all-to-all of lengths, ids and weights (`INPUT_DATA_DIST`)."""
        raise NotImplementedError

    def receive_ids(self) -> Any:
        """Wait for the ids that this rank looks up, on the stream of `send_ids`; return all that holds them."""
        raise NotImplementedError

    def prefetch(self) -> None:
        """Copy the rows that the lookup will read into the cache (`PREFETCH`)."""
        raise NotImplementedError

    def needs_lookup(self, owners: frozenset[WeightOwner]) -> bool:
        """Whether tables of these owners are still to be looked up."""
        raise NotImplementedError

    def look_up(self, owners: frozenset[WeightOwner], only: ModulePart | None = None) -> None:
        """Look up the tables of these owners, or one part; start the all-to-all of rows (`EMBEDDING_LOOKUP`)."""
        raise NotImplementedError

    def serve(self, send_next: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context around `training_step`, in which modules give the early embeddings.

        `send_next` sends sizes and ids of the next batches. It may be called in the context, once the link is idle.
        """
        raise NotImplementedError

    def take_part(self) -> None:
        """Call the sharded modules without ids, in the place of the user's step (`is_padding`)."""
        raise NotImplementedError

    def end_phase(self) -> None:
        """End the phase of a step before a backward in it (manual optimization)."""

    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        """Let the backward call a function, perhaps repeatedly, where it waits for ranks before it writes tables.

        `stage` is the first stage that the function issues. Returns whether the backward will call it; else the caller
        has to.
        """
        return False

    def end_backward(self) -> None:
        """Let go of what only the backward has read."""

    def send_gradients(self) -> None:
        """Start the all-to-all of gradients of a deferred update."""
        raise NotImplementedError

    def gradients_are_there(self) -> bool:
        """Whether all gradients of a deferred update have arrived; does not wait."""
        raise NotImplementedError

    def update(self, after_part: Callable[[str, int], None] | None = None) -> None:
        """Wait for the gradients and update the tables (`EMBEDDING_UPDATE`).

        With `after_part` each part of a module is updated as soon as its own gradients are there; then the function is
        called with the module's name and the part's number, while gradients of other parts are under way.
        """
        raise NotImplementedError

    def forget_update(self) -> None:
        """Leave the tables without a deferred update, after an error; waits for no rank."""
        raise NotImplementedError

    def count_lookups(self, times: int) -> None:
        """Add its early lookups to the iteration counts of fused optimizers; with `times=-1` subtract them."""

    def abandon(self) -> list[Any]:
        """Drop a deferred update after an error; return what holds the tensors of collectives that may be under way."""
        return []

    def drain(self) -> None:
        """Complete the exchanges of sizes and ids that were started, on all ranks alike."""
        raise NotImplementedError

    def drop(self) -> None:
        """Wait for the early lookups and drop them: its modules will run in their own forward."""
        raise NotImplementedError
