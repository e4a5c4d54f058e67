"""Find early lookups whose tables were written afterwards, and drop them."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from ..schedules import WeightOwner
from ..tables import dense_weights, num_writes, owners_of_parts, rates_of, spec_of
from .discovery import Discovery
from .module_flight import ModuleFlight
from .module_forwards import ModuleForwards
from .options import SparseOptions
from .reasons import WRITTEN
from .sparse_batch import SparseBatch

MAX_DROPS = 3  # drops after which modules whose tables were written run in their own forward


class OverwrittenLookups:
    """Searches the early lookups of a model, and counts how often they were dropped."""

    def __init__(self, forwards: ModuleForwards, discovery: Discovery, options: SparseOptions) -> None:
        self._forwards, self._discovery, self._options = forwards, discovery, options
        self._modules = list(forwards.modules.values())
        self._num_drops = 0  # of lookups whose tables were written afterwards
        self._written: set[str] = set()  # modules whose tables this rank has found written at these drops
        self._seen: Any = None  # rates and writes at the last search

    @cached_property
    def _has_dense_tables(self) -> bool:
        known = [module for module in self._modules if spec_of(module) is not None]
        return any(WeightOwner.DENSE_OPTIMIZER in owners_of_parts(one) and dense_weights(one) for one in known)

    def are_there(self, flights: Iterable[SparseBatch]) -> bool:
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""
        # The usual case: no write since the last search, which left no overwritten lookup.
        holds_rates = self._options.holds_rates
        rates = [rates_of(module) for module in self._modules] if holds_rates else []
        seen = rates, [num_writes(module, WeightOwner.FUSED_BACKWARD) for module in self._modules]
        if seen == self._seen and not self._has_dense_tables:
            return False
        self._seen = seen
        return any(_is_overwritten(one) for flight in flights for one in flight.modules.values())

    def drop(self, flights: Iterable[SparseBatch]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written afterwards."""
        if self._discovery.releases:
            raise RuntimeError(
                "tables were written between two steps, after the next batch had been looked up, and its ids are gone "
                "(release_features=True): it cannot be looked up anew. Train with release_features=False."
            )
        dropped = list(flights)
        lookups = [item for flight in dropped for item in flight.modules.items()]
        self._written |= {name for name, one in lookups if _is_overwritten(one)}
        self._num_drops += 1
        if self._num_drops == MAX_DROPS:
            any_rank = self._options.any_rank
            written = [name for name in self._forwards if any_rank(name in self._written)]  # all ranks poll for each
            for name in written or self._forwards:  # all if no rank knows of a write (`tables_changed` was called)
                if self._forwards[name].early:
                    self._forwards[name].run_unpipelined(WRITTEN)
            self._num_drops, self._written = 0, set()
        for flight in dropped:
            flight.drop()


def _is_overwritten(lookup: ModuleFlight) -> bool:
    return not lookup.served and lookup.is_overwritten()
