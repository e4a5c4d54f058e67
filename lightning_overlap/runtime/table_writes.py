"""Find tables that user code wrote between two steps, after early lookups for later batches."""

from collections.abc import Callable

from ..schedules import StreamName
from .batches import Batches
from .deferred_updates import DeferredUpdates
from .interfaces import SparseStages
from .streams import Streams

NUM_POLLS = 2  # batches at the start of a fit, when callbacks begin to write tables, before which ranks are polled


class TableWrites:
    """Drops early lookups, on all ranks alike, if their tables are written afterwards."""

    def __init__(
        self,
        sparse: SparseStages | None,
        updates: DeferredUpdates,
        batches: Batches,
        streams: Streams,
        *,
        any_rank: Callable[[bool], bool] | None,  # None on one rank
        num_polls: int,  # `any_rank` is called before this many batches, and after `poll_next`
        rank: int,
    ) -> None:
        self._sparse, self._updates, self._batches, self._streams = sparse, updates, batches, streams
        self._any_rank, self._num_polls, self._rank = any_rank, num_polls, rank
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self._polls = False  # whether `any_rank` is called in this iteration

    def poll_next(self) -> None:
        """Poll all ranks before the next batch, after an evaluation or a save: their hooks may write tables."""
        self._num_polls = max(self._num_polls, 1)

    def begin_iteration(self) -> None:
        """Check for writes since the last step."""
        self._polls = self._num_polls > 0
        self._num_polls = max(0, self._num_polls - 1)
        self.check()

    def check(self) -> None:
        """Drop early lookups if user code has written tables since; raise an error if other ranks were not polled."""
        if self._sparse is None:
            return
        written = everyone = self._sparse.are_overwritten(self._batches.ahead())  # on one rank it decides for everyone
        if self._any_rank is not None:
            everyone = self._polls and self._any_rank(written)
        if everyone:
            self._num_polls = NUM_POLLS  # code that has written tables once will write them again
            self._drop_lookups(self._sparse)
        elif written:
            raise RuntimeError(
                f"tables on rank {self._rank} were written between two steps, after the next batch had been "
                "looked up, and other ranks cannot know. Call trainer.strategy.tables_changed() on all ranks after "
                "each write, which repeats the lookups of the next batches, or train with pipeline='sparse_dist'. "
                "(A fused learning rate that is set by hand counts as written: combined_optimizer moves it.)"
            )

    def tables_changed(self) -> None:
        """Drop all early lookups, on all ranks alike; if a deferred update is still to come, raise an error."""
        if self._sparse is not None:
            self._drop_lookups(self._sparse)

    def _drop_lookups(self, sparse: SparseStages) -> None:
        self._updates.refuse_writes()
        sparse.drop_overwritten(self._batches.ahead())
        self._streams.order(StreamName.COMPUTE, then=self._streams.lookup)  # the user has written on the compute stream
