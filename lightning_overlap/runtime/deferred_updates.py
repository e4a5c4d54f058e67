"""Updates of tables that come later than their backward: when each is made, and what it waits for."""

from __future__ import annotations

from typing import Any

from ..schedules import Stage, Step, StreamName
from .inflight import InFlightBatch
from .interfaces import Observer, SparseStages, timed
from .lookup_order import LookupOrder
from .profiler_ranges import InStage


class DeferredUpdates:
    """The updates of a run that are still to come (`order.to_update`), each made once, the oldest first.

    Args:
        sparse: Makes them; None: there are none.
        order: Of the stream that they are made on.
        observer: Told of each.
        rank: Named in errors.
    """

    def __init__(self, sparse: SparseStages | None, order: LookupOrder, observer: Observer, rank: int) -> None:
        self._sparse, self._order, self._streams = sparse, order, order.streams
        self._observe, self._rank = observer, rank
        self._to_update = order.to_update
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self._between_steps: Any = None  # event after what came between the last two steps, where updates wait
        self.num_stepped = 0
        """Batches whose step is over."""
        self.num_updated = 0
        """Batches whose update has been issued, or is still to come."""

    def num_before(self, index: int) -> int:
        """Return how many batches before this one have their update still to come."""
        return sum(other < index for other in self._to_update)

    def num_unseen_by(self, index: int) -> int:
        """Return how many updates, those of the batches right before it, a batch that is looked up now does not see."""
        return index - min(self._to_update, default=self.num_updated)

    def refuse_writes(self) -> None:
        """Raise where tables were written whose update is still to come."""
        if self._to_update:
            raise RuntimeError(
                "tables were written between two steps, while an update of theirs is still to come "
                "(defer_update): it would be applied on top. Call trainer.strategy.update_tables() on all ranks "
                "before you write, or train without defer_update."
            )

    def begin_iteration(self) -> None:
        """Say that what came between two steps has been issued."""
        self._between_steps = self._streams.record(StreamName.COMPUTE) if self._to_update else None

    def start(self, inflight: InFlightBatch) -> None:
        """Send back the gradients of a batch whose backward is over."""
        assert self._sparse is not None
        # After the all-reduce of dense gradients, which is over by now: the optimizer waits for it, and these would
        # take their share of the link.
        self._order.lookup_waits()
        stream = self._order.lookup
        with self._order.on_lookup(), timed(self._order.timer, Stage.BACKWARD, inflight.index, stream):
            self._sparse.start_update(inflight)
        self._to_update[inflight.index] = inflight

    def make_all(self) -> None:
        """Make the updates that are still to come, on all ranks alike: what follows a step finds the tables written."""
        if self._to_update:
            step = Step(Stage.EMBEDDING_UPDATE, 0, self._order.lookup)
            for index in sorted(self._to_update):
                self.make(step, index)

    def make(self, step: Step, index: int, *, beside_forward: bool = False) -> None:
        """Make the update of a batch, unless that was done already.

        Args:
            step: Of the schedule.
            index: Of the batch.
            beside_forward: Whether no forward that was issued on the compute stream has read tables.
        """
        inflight = self._to_update.pop(index, None)
        if inflight is None:
            return
        assert self._sparse is not None
        self._observe("issue", step.stage, index)
        with InStage(step.stage, index, self._rank):
            # After its gradients, and after what read the tables on the compute stream: between two steps, or in a
            # module's own forward. Not after any other forward, which it is to overlap with.
            after = self._between_steps if beside_forward else self._streams.record(StreamName.COMPUTE)
            self._streams.wait(step.stream, after)
            with self._streams.on(step.stream), timed(self._order.timer, step.stage, index, step.stream):
                self._sparse.embedding_update(inflight)
        self._order.note_update()
        if step.offset == 0:
            self._order.compute_waits_for_update()  # what comes between two steps finds it made

    def settle(self, timeout_s: float) -> str | None:
        """After an error, complete the updates of batches whose step is over, and drop the others.

        Args:
            timeout_s: How long to wait for gradients that are on their way.

        Returns:
            What is missing in the tables, or None.
        """
        stepped = [index for index in sorted(self._to_update) if index < self.num_stepped]
        for index in list(self._to_update):
            if index not in stepped:
                del self._to_update[index]  # neither the dense step nor the update
        try:
            batches = [self._to_update[index] for index in stepped]
            if self._sparse is not None and self._sparse.gradients_are_there(batches, timeout_s):
                self.make_all()
        except Exception as err:
            return f"{type(err).__name__}: {err}; the update of batch {stepped[0]} is missing in the tables"
        return f"the update of batch {stepped[0]} is missing in the tables" if self._to_update else None
