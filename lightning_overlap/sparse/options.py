"""What a `SparsePipeline` is told of the run that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..distributed import Store
from ..runtime import Observer, observe_nothing
from ..tables import SetRates


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptions:
    """Options of the sparse stages; the defaults are those of a training on one rank.

    Args:
        step: The module's method whose calls are served.
        trains: Whether a backward follows; lookups without one must not count for the fused optimizers.
        observer: Told of every wait.
        rank: Warns if 0.
        store: Where ranks leave word for each other; needed with a group.
        set_rates: Gives the kernels the learning rates that a schedule has now; None where nothing moves them.
        any_rank: Asks all ranks whether one of them says so, on the host; all of them wait for the answer.
        warned: Warnings given so far, shared by the pipelines of a run.
        num_threads: Threads that run the kernels of early lookups on a CPU; 0: the calling thread does.
        releases: Whether a batch lets go of ids that have been sent.
        multi_node: Whether there is a link between ranks, where bytes and ranks that are late cost most: ids then
            travel in 32 bits where all that stand for a row fit, and deferred updates wait for the backward's end.
        fills_waits: Whether steps of the schedule may be left until a backward waits for other ranks.
        prefetches: Whether the schedule has a step for it, so that tables in a UVM cache can be looked up early.
        timeout_s: How long a rank waits for one that is late.

    Raises:
        ValueError: A negative number of threads, no time, no step, or an option of training where nothing trains.
    """

    step: str = "training_step"
    trains: bool = True
    observer: Observer = observe_nothing
    rank: int = 0
    store: Store | None = None
    set_rates: SetRates | None = None
    any_rank: Callable[[bool], bool] = bool
    warned: set[tuple[str, str | None]] = field(default_factory=set)
    num_threads: int = 0
    releases: bool = False
    multi_node: bool = False
    fills_waits: bool = True
    prefetches: bool = False
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if not self.step:
            raise ValueError("step is the name of the module's method whose calls are served, got ''.")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is a number of threads, got {self.num_threads}.")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s is a time to wait for other ranks, got {self.timeout_s}.")
        if not self.trains and (self.num_threads or self.releases or self.set_rates is not None):
            raise ValueError(f"num_threads, releases and set_rates are for training, and {self.step} does not train.")

    @property
    def looks_up_cached(self) -> bool:
        """Whether tables in a UVM cache can be looked up early.

        A rate that moves repeats a lookup in its backward, when the next batch's prefetch is in its place.
        """
        return self.prefetches and self.set_rates is None
