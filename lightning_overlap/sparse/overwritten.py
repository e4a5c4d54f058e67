"""Early lookups of tables, or at learning rates, that the user's code has written since."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from ..runtime import InFlightBatch
from ..schedules import WeightOwner
from ..tables import has_dense_weights, num_writes, owners_of_parts, rates_of, spec_of
from .pipelined_forward import PipelinedForwards

MAX_OVERWRITTEN = 3
"""After tables were written between two steps so often, all modules are looked up in their own forward from then on."""

_WRITTEN = (
    "tables are written between two steps again and again (or their learning rates are set by hand, which only "
    "combined_optimizer can move while tables are looked up early)"
)


class OverwrittenLookups:
    """Finds early lookups that do not hold any more, and gives up early lookups where that happens again and again.

    Args:
        forwards: The sharded modules with their pipelined forwards.
        holds_rates: Whether a lookup also depends on the learning rates of its kernels (`SparseOptions.holds_rates`).
    """

    def __init__(self, forwards: PipelinedForwards, *, holds_rates: bool) -> None:
        self._forwards, self._holds_rates = forwards, holds_rates
        self._seen: Any = None  # rates and writes at the last search

    @cached_property
    def _has_dense_tables(self) -> bool:
        modules = [pipelined.module for pipelined in self._forwards.values()]
        return any(
            WeightOwner.DENSE_OPTIMIZER in owners_of_parts(module) and has_dense_weights(module)
            for module in modules
            if spec_of(module) is not None
        )

    def found_in(self, batches: Iterable[InFlightBatch]) -> bool:
        """Whether tables of this rank, or their rates, were written after they were looked up for one of these batches.

        All lookups that were handed to threads have to be finished.
        """
        # No write since the last search, which left no overwritten lookup: the usual case.
        modules = [pipelined.module for pipelined in self._forwards.values()]
        rates = [rates_of(module) for module in modules] if self._holds_rates else []
        seen = rates, [num_writes(module, WeightOwner.FUSED_BACKWARD) for module in modules]
        if seen == self._seen and not self._has_dense_tables:
            return False
        self._seen = seen
        return any(
            state.is_overwritten() for inflight in batches for state in inflight.modules.values() if not state.served
        )

    def note_dropped(self) -> None:
        """Note, on all ranks alike, that lookups were dropped for this; the third time is the last one."""
        for pipelined in self._forwards.values():
            pipelined.num_overwritten += 1
            if pipelined.early and pipelined.num_overwritten == MAX_OVERWRITTEN:
                self._forwards.run_unpipelined(pipelined, _WRITTEN)
