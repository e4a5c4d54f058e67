"""Deferred updates: when each update is made, and which streams and events it waits for."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..schedules import Stage, Step, StreamName
from .flight import Flight
from .interfaces import SparseStages
from .streams import Streams
from .telemetry import Telemetry


class DeferredUpdates:
    """Owns the deferred updates of a run: those whose backward has ended and that the tables do not have yet."""

    def __init__(self, sparse: SparseStages, streams: Streams, telemetry: Telemetry) -> None:
        self._sparse, self._streams, self._telemetry = sparse, streams, telemetry
        self.reset()

    def reset(self) -> None:
        """Begin a run: no table has been updated."""
        self.to_update: dict[int, Flight] = {}  # by number, the oldest first: their update is still to come
        self.num_stepped = 0  # batches of the epoch that have ended their optimizer step
        self.num_updated = 0  # batches of the epoch that have ended their backward: updates are applied or deferred
        self._updated: Any = None  # event after the last update of a table on the lookup stream

    def note_lookup(self, flight: Flight, *, defers: bool) -> None:
        """Note at the lookup of a batch's fused tables its staleness, and whether its update is deferred."""
        flight.num_unseen = flight.index - min(self.to_update, default=self.num_updated)
        flight.defers_update = defers and self._sparse.can_defer_updates

    def refuse_writes(self) -> None:
        """Raise a RuntimeError if an update is still to come: it would change the tables that the user has written."""
        if self.to_update:
            raise RuntimeError(
                "tables were written between two steps, while an update of theirs is still to come "
                "(defer_update): it would be applied on top. Call trainer.strategy.update_tables() on all ranks "
                "before you write, or train without defer_update."
            )

    def begin_iteration(self) -> None:
        """Let go of the batches that are trained, except for their updates."""
        for flight in self.to_update.values():
            flight.batch = None  # trained: the update reads the received ids only
            flight.issued.clear()  # it has the batch too

    def start(self, flight: Flight) -> None:
        """Start the all-to-all of the embeddings' gradients of a batch whose backward has ended."""
        # After the all-reduce of dense gradients: the optimizer waits for that, and both would share the link.
        self._streams.order(StreamName.COMPUTE, then=self._streams.lookup)
        stage, stream = Stage.BACKWARD, self._streams.lookup
        with self._streams.on(stream), self._telemetry.timed(stage, flight.index, stream):
            flight.send_gradients()
        self.to_update[flight.index] = flight

    def make_all(self) -> None:
        """Make all updates, on all ranks alike; later work on the compute stream finds the tables updated."""
        row = Step(Stage.EMBEDDING_UPDATE, 0, self._streams.lookup)
        for flight in list(self.to_update.values()):
            self._make(row, flight)

    def make_up_to(
        self, index: int, row: Step, *, overlaps_dense: bool, after_part: Callable[[str, int], None] | None
    ) -> None:
        """Make the updates of all batches up to `index`.

        `overlaps_dense`: the update comes before the optimizer step of its own batch. `after_part` is called after the
        update of each part by batch `index`, as in `Flight.update`.
        """
        for flight in [flight for flight in self.to_update.values() if flight.index <= index]:
            call = after_part if flight.index == index else None
            self._make(row, flight, overlaps_dense=overlaps_dense, after_part=call)

    def _make(
        self,
        row: Step,
        flight: Flight,
        *,
        overlaps_dense: bool = False,
        after_part: Callable[[str, int], None] | None = None,
    ) -> None:
        index, stage = flight.index, row.stage
        self._telemetry.observe("issue", stage, index)
        del self.to_update[index]
        with self._telemetry.stage(stage, index):
            # The update waits for all that may have read the tables on the compute stream: code between two steps, and
            # `training_step` itself. If it overlaps with the dense part, `start` has let it wait for both.
            if not overlaps_dense:
                self._streams.order(StreamName.COMPUTE, then=row.stream)
            with self._streams.on(row.stream), self._telemetry.timed(stage, index, row.stream):
                flight.update(after_part)
        self.note_update()
        if row.offset == 0 and not overlaps_dense:  # of `make_all`, or below the optimizer step
            self.order_compute()  # code between two steps finds the tables updated

    def note_update(self) -> None:
        """Note that tables were updated on the lookup stream."""
        if not self._streams.are_same(self._streams.lookup, StreamName.COMPUTE):
            self._updated = self._streams.record(self._streams.lookup, again=self._updated)

    def order_compute(self) -> None:
        """Let the compute stream wait for the last update of a table, but not for later lookups."""
        self._streams.wait(StreamName.COMPUTE, self._updated)

    def settle(self, timeout_s: float) -> str | None:
        """After an error, make the updates that the dense weights have; return in words which of them is missing."""
        for index in [index for index in self.to_update if index >= self.num_stepped]:
            with suppress(RuntimeError):  # a broken device must not hide what broke it
                self.to_update.pop(index).forget_update()  # it gets no dense step either
        if not (due := list(self.to_update.values())):
            return None
        missing = f"the update of batch {due[0].index} is missing in the tables"
        deadline = time.monotonic() + timeout_s
        try:
            while not all(flight.gradients_are_there() for flight in due):
                if time.monotonic() > deadline:
                    return missing
                time.sleep(0.01)
            self.make_all()
        except Exception as err:
            return f"{type(err).__name__}: {err}; {missing}"
        return None
