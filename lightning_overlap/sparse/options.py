"""Options of a `SparsePipeline`, checked when they are built."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..distributed import DeadlineStore
from ..tables import OutOfRangeIds, SetRates
from .watchers.loss_guard import LossGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions:
    """Options of the sparse stages, by default for one training rank. A ValueError if `timeout_s` is not positive."""

    method: str = "training_step"  # the LightningModule's method in which sharded modules get early embeddings
    trains: bool = True  # whether a backward follows; other lookups must not count for the fused optimizers
    rank: int = 0  # this process's rank; rank 0 prints warnings
    store: DeadlineStore | None = None  # in which ranks compare their calls; needed with more than one rank
    set_rates: SetRates | None = None  # gives TBE kernels the scheduler's rates; None if no scheduler moves them
    any_rank: Callable[[bool], bool] = bool  # whether any rank passed True: an all-reduce on the host, of all ranks
    warned: set[tuple[str, str | None]] = field(default_factory=set)  # warnings given so far, of all pipelines of a run
    releases: bool = False  # whether the memory of a batch's ids is freed once they have been sent
    multi_node: bool = False  # whether ranks are on several hosts, where traffic and late ranks cost most
    fills_waits: bool = True  # whether steps may run inside a backward, while it waits for other ranks
    prefetches: bool = False  # whether the schedule has a `PREFETCH` step: tables in a UVM cache can be looked up early
    out_of_range_ids: OutOfRangeIds = "error"  # what to do about ids that are no row of their table; on a CPU only
    guard: LossGuard | None = None  # what happens to gradients of a loss that is not finite; None: they train
    timeout_s: float = 1800  # how long a rank waits for a late rank, in seconds

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s is a time to wait for other ranks, got {self.timeout_s}.")

    @property
    def holds_rates(self) -> bool:
        """Whether an update takes the learning rate of its lookup, since no `set_rates` gives it the present rate."""
        return self.trains and self.set_rates is None

    @property
    def looks_up_cached(self) -> bool:
        """Whether tables in a UVM cache can be looked up early."""
        # With `set_rates` a backward may repeat its lookup. By then the cache may hold other rows.
        return self.prefetches and self.set_rates is None
