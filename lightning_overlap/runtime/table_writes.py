"""Tables that the user's code writes between two steps, after they were looked up for the batches to come."""

from __future__ import annotations

from collections.abc import Callable

from .deferred_updates import DeferredUpdates
from .inflight import InFlightBatch
from .interfaces import SparseStages
from .lookup_order import LookupOrder

NUM_ASKS = 2
"""Batches of a fit before which ranks ask each other whether tables were written since the last step.

A callback that does so usually does it from the first step on. To ask always would let the ranks wait for each other.
"""


class TableWrites:
    """Leaves early lookups aside, on all ranks alike, where somebody has written what they read.

    `sparse` is None where nothing is looked up early. `ahead` returns the batches that may have been looked up and
    whose step has not begun. `any_rank` asks all ranks whether one of them says so (None on one rank): before the first
    `num_asks` batches, and where `ask` was called.
    """

    def __init__(
        self,
        sparse: SparseStages | None,
        order: LookupOrder,
        updates: DeferredUpdates,
        ahead: Callable[[], list[InFlightBatch]],
        *,
        any_rank: Callable[[bool], bool] | None,
        num_asks: int,
    ) -> None:
        self._sparse, self._order, self._updates, self._ahead = sparse, order, updates, ahead
        self._any_rank, self._num_asks = any_rank, num_asks
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self._asks = False  # in this iteration

    def ask(self) -> None:
        """Ask all ranks before the next batch: an evaluation or a save has been there."""
        self._num_asks = max(self._num_asks, 1)

    def begin_iteration(self) -> None:
        """See what was written since the last step."""
        self._asks = self._num_asks > 0
        self._num_asks = max(0, self._num_asks - 1)
        self.check()

    def check(self) -> None:
        """See whether somebody has written tables after they were looked up for a batch to come."""
        if self._sparse is None:
            return
        written = everyone = self._sparse.is_overwritten(self._ahead())
        if self._any_rank is not None:
            everyone = self._asks and self._any_rank(written)
        if everyone:
            self._num_asks = NUM_ASKS  # who has written tables once does it again
            self.tables_changed()
        elif written:
            raise RuntimeError(
                f"tables on rank {self._order.rank} were written between two steps, after the next batch had been "
                "looked up, and other ranks cannot know. Call trainer.strategy.tables_changed() on all ranks after you "
                "have written them: the next batches are then looked up anew. Or train with pipeline='sparse_dist'. "
                "(A fused learning rate that is set by hand counts as written: combined_optimizer moves it.)"
            )

    def tables_changed(self) -> None:
        """Leave the early lookups of all batches in flight aside; every rank calls this alike."""
        if self._sparse is not None:
            self._updates.refuse_writes()
            self._sparse.leave_overwritten(self._ahead())
            self._order.note_write()
