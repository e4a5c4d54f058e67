"""Deferred updates of the tables: when each update is issued, and which streams and events it waits for."""

from contextlib import suppress

from ..schedules import Stage, Step, StreamName
from .interfaces import InFlightBatch, OnUpdated, Updates
from .lookup_order import LookupOrder
from .profiler_ranges import InStage


class DeferredUpdates:
    """Owns the deferred updates of a run: those whose backward has ended and that the tables do not have yet."""

    def __init__(self, tables: Updates, order: LookupOrder) -> None:
        self._tables, self._order, self._streams = tables, order, order.streams
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self.to_update: dict[int, InFlightBatch] = {}  # by number, the oldest first: their update is still to come
        self.num_stepped = 0  # batches of the epoch that have ended their optimizer step
        self.num_updated = 0  # batches of the epoch that have ended their backward: updates are applied or deferred

    def note_lookup(self, inflight: InFlightBatch, *, defers: bool) -> None:
        """Note at the lookup of a batch's fused tables its staleness, and whether its update is deferred."""
        inflight.num_unseen = inflight.index - min(self.to_update, default=self.num_updated)
        inflight.defers_update = defers and self._tables.can_defer_updates

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
        for inflight in self.to_update.values():
            inflight.batch = None  # trained: the update reads the received ids only

    def start(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of the embeddings' gradients of a batch whose backward has ended."""
        # After the all-reduce of dense gradients: the optimizer waits for that, and both would share the link.
        self._order.lookup_waits()
        with self._order.on(Stage.BACKWARD, inflight.index, self._order.lookup):
            self._tables.start_update(inflight)
        self.to_update[inflight.index] = inflight

    def make_all(self) -> None:
        """Issue all updates, on all ranks alike; later work on the compute stream finds the tables updated."""
        step = Step(Stage.EMBEDDING_UPDATE, 0, self._order.lookup)
        for inflight in list(self.to_update.values()):
            self._make(step, inflight)

    def make_up_to(self, index: int, step: Step, overlaps_dense: bool, updated: OnUpdated | None) -> None:
        """Issue the updates of all batches up to `index`; call `updated` after each part of a module by that batch."""
        for inflight in [inflight for inflight in self.to_update.values() if inflight.index <= index]:
            last = updated if inflight.index == index else None
            self._make(step, inflight, overlaps_dense, last)

    def _make(
        self,
        step: Step,
        inflight: InFlightBatch,
        overlaps_dense: bool = False,
        updated: OnUpdated | None = None,
    ) -> None:
        index = inflight.index
        self._order.observe("issue", step.stage, index)
        del self.to_update[index]
        with InStage(step.stage, index, self._order.rank):
            # The update waits for all that may have read the tables on the compute stream: code between two steps, and
            # `training_step` itself. If it overlaps with the dense part, `start` has let it wait for both.
            if not overlaps_dense:
                self._streams.wait(step.stream, self._streams.record(StreamName.COMPUTE))
            with self._order.on(step.stage, index, step.stream):
                self._tables.embedding_update(inflight, updated)
        self._order.note_update()
        if step.offset == 0 and not overlaps_dense:
            self._order.compute_waits_for_update()  # code between two steps finds the tables updated

    def settle(self, timeout_s: float) -> str | None:
        """After an error, make the updates that the dense weights have; return in words which of them is missing."""
        for index in [index for index in self.to_update if index >= self.num_stepped]:
            with suppress(RuntimeError):  # a broken device must not hide what broke it
                self._tables.forget_update(self.to_update.pop(index))  # it gets no dense step either
        if not (due := list(self.to_update.values())):
            return None
        missing = f"the update of batch {due[0].index} is missing in the tables"
        try:
            if self._tables.gradients_are_there(due, timeout_s):
                self.make_all()
        except Exception as err:
            return f"{type(err).__name__}: {err}; {missing}"
        return missing if self.to_update else None
