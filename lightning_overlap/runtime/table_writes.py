"""Find tables that user code wrote between two steps, after early lookups for later batches."""

from collections.abc import Callable

from .batch_queue import BatchQueue
from .deferred_updates import DeferredUpdates
from .interfaces import Lookups
from .lookup_order import LookupOrder

NUM_ASKS = 2  # batches at the start of a fit, when callbacks begin to write tables, before which the ranks are asked


class TableWrites:
    """Drops early lookups, on all ranks alike, if their tables are written afterwards."""

    def __init__(
        self,
        lookups: Lookups | None,
        order: LookupOrder,
        updates: DeferredUpdates,
        queue: BatchQueue,
        *,
        any_rank: Callable[[bool], bool] | None,  # None on one rank
        num_asks: int,  # `any_rank` is asked before this many batches, and after `ask`
    ) -> None:
        self._lookups, self._order, self._updates, self._queue = lookups, order, updates, queue
        self._any_rank, self._num_asks = any_rank, num_asks
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self._asks = False  # whether `any_rank` is asked in this iteration

    def ask(self) -> None:
        """Ask all ranks before the next batch, after an evaluation or a save: their hooks may write tables."""
        self._num_asks = max(self._num_asks, 1)

    def begin_iteration(self) -> None:
        """Check for writes since the last step."""
        self._asks = self._num_asks > 0
        self._num_asks = max(0, self._num_asks - 1)
        self.check()

    def check(self) -> None:
        """Drop early lookups if user code has written tables since; raise an error if other ranks were not asked."""
        if self._lookups is None:
            return
        written = everyone = self._lookups.is_overwritten(self._queue.ahead())  # on one rank it decides for everyone
        if self._any_rank is not None:
            everyone = self._asks and self._any_rank(written)
        if everyone:
            self._num_asks = NUM_ASKS  # code that has written tables once will write them again
            self.tables_changed()
        elif written:
            raise RuntimeError(
                f"tables on rank {self._order.rank} were written between two steps, after the next batch had been "
                "looked up, and other ranks cannot know. Call trainer.strategy.tables_changed() on all ranks after "
                "each write, which repeats the lookups of the next batches, or train with pipeline='sparse_dist'. "
                "(A fused learning rate that is set by hand counts as written: combined_optimizer moves it.)"
            )

    def tables_changed(self) -> None:
        """Drop all early lookups, on all ranks alike; if a deferred update is still to come, raise an error."""
        if self._lookups is not None:
            self._updates.refuse_writes()
            self._lookups.leave_overwritten(self._queue.ahead())
            self._order.lookup_waits()  # the user has written on the compute stream
