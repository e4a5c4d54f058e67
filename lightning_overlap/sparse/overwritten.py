"""Early lookups of tables, or at learning rates, that the user's code has written since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from ..runtime import InFlightBatch
from ..schedules import WeightOwner
from ..tables import has_dense_weights, num_writes, owners_of_parts, rates_of, spec_of
from .pipelined_forward import WRITTEN, PipelinedForwards

MAX_OVERWRITTEN = 3
"""The number of drops after which the modules whose tables were written are looked up in their own forward."""


class OverwrittenLookups:
    """Finds early lookups that do not hold any more, and gives up early lookups where that happens again and again.

    Args:
        forwards: The sharded modules with their pipelined forwards.
        holds_rates: Whether a lookup also depends on the learning rates of its kernels (`SparseOptions.holds_rates`).
        any_rank: Returns whether any rank passed True (`SparseOptions.any_rank`).
    """

    def __init__(
        self, forwards: PipelinedForwards, *, holds_rates: bool, any_rank: Callable[[bool], bool] = bool
    ) -> None:
        self._forwards, self._holds_rates, self._any_rank = forwards, holds_rates, any_rank
        self._num_drops = 0
        self._written: set[str] = set()  # modules whose tables this rank has found written at these drops
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
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""
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

    def note_drop(self, batches: Sequence[InFlightBatch]) -> None:
        """Note, on all ranks alike, that the lookups of these batches are going to be dropped.

        At every third drop the modules that were written on any rank run in their own forward from then on; all modules
        do if no rank has found a write (`tables_changed` was called without one).
        """
        self._written |= {
            name
            for inflight in batches
            for name, state in inflight.modules.items()
            if not state.served and state.is_overwritten()
        }
        self._num_drops += 1
        if self._num_drops < MAX_OVERWRITTEN:
            return
        written = [name for name in self._forwards if self._any_rank(name in self._written)]  # all ranks ask for each
        for name in written or self._forwards:
            if self._forwards[name].early:
                self._forwards.run_unpipelined(self._forwards[name], WRITTEN)
        self._num_drops, self._written = 0, set()
