"""Look up sharded modules' tables early: in parts by their owner, each after its last update."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..runtime import NOTHING, ModulePart
from ..schedules import StreamName, WeightOwner
from ..tables import (
    caching_tbes,
    dense_weights,
    forget_prefetched,
    num_writes,
    owners_of_parts,
    rates_of,
    spec_of,
    tbes,
)
from .answers import Answers
from .flight import SparseFlight
from .inputs import SparseInputs
from .module_context import ModuleContext, Progress, replaced
from .pipelined_forward import WRITTEN, PipelinedForwards
from .update_rates import counting, take_back, updates_at_present_rate

MAX_OVERWRITTEN = 3  # drops after which modules whose tables were written run in their own forward


class SparseLookups:
    """Looks up the tables of all sharded modules of a model early, and serves the embeddings in the step."""

    def __init__(self, forwards: PipelinedForwards, inputs: SparseInputs, answers: Answers) -> None:
        self._forwards, self._inputs, self._answers = forwards, inputs, answers
        self._streams, self._telemetry = forwards.streams, forwards.telemetry
        self._options, self._modules = forwards.options, forwards.modules
        self.keep_ids = False  # whether batches that are looked up from now on keep their ids until their step is over
        self._num_drops = 0  # of lookups whose tables were written afterwards
        self._written: set[str] = set()  # modules whose tables this rank has found written at these drops
        self._seen: Any = None  # rates and writes at the last search

    def prefetch(self, inflight: SparseFlight) -> None:
        """Copy the rows that the lookup will read into the cache. Source: `prefetch_embeddings`, TorchRec 1.8."""
        for state in inflight.modules.values():
            if caching_tbes(state.module):
                stream = self._streams[self._streams.lookup]  # reads and updates the prefetched rows
                state.module.prefetch(state.dist_input, forward_stream=stream, ctx=state.context)

    def forget_prefetched(self) -> None:
        """Drop prefetches without a lookup: FBGEMM matches prefetches to lookups by their order alone."""
        with self._streams.on(StreamName.PREFETCH):
            for module in self._modules:
                forget_prefetched(module)

    def has_lookup(self, inflight: SparseFlight, owners: frozenset[WeightOwner]) -> bool:
        """Whether a batch has tables of these owners that are still to be looked up."""
        return any(
            state.progress <= Progress.RECEIVED and _parts_to_look_up(state, owners)
            for state in inflight.modules.values()
        )

    def embedding_lookup(
        self, inflight: SparseFlight, owners: frozenset[WeightOwner], only: ModulePart | None = None
    ) -> None:
        """Look up the tables of these owners, or of one part alone, and start the all-to-all of their embeddings."""
        for owner in WeightOwner:  # fused tables first: their embeddings travel while data-parallel tables are read
            if owner in owners:
                for name, state in inflight.modules.items():
                    parts = _parts_to_look_up(state, (owner,))
                    if only is not None:
                        parts = [part for part in parts if (name, part) == only]
                    if state.progress is Progress.RECEIVED and parts:
                        self._look_up(state, owner, parts, defers_update=inflight.defers_update)

    def _look_up(self, state: ModuleContext, owner: WeightOwner, parts: list[int], *, defers_update: bool) -> None:
        if self.keep_ids:
            state.ids = state.dist_input
        if self._options.holds_rates and state.rates is None:
            state.rates = rates_of(state.module)
        if (set_rates := self._options.set_rates) is not None:
            set_rates = state.deferred.with_rates(set_rates, tbes(state.module))
        with (
            counting(tbes(state.module), state.num_lookups),
            updates_at_present_rate(state.module, set_rates),
            state.deferring_update() if defers_update else NOTHING,
        ):
            if len(parts) == len(owners_of_parts(state.module)):
                state.embeddings = state.module.compute_and_output_dist(state.context, state.dist_input)
            else:
                _look_up_parts(state, parts)
        if state.embeddings is not None:
            state.dist_input = None
            state.advance(Progress.LOOKED_UP)
        state.note_lookup(owner)
        if not self._options.trains:
            self._take_back(state)

    @contextmanager
    def forward(self, inflight: SparseFlight, send_next: Callable[[], None]) -> Iterator[None]:
        """Serve early embeddings during the step of a batch; `inflight.ran_unpipelined` if a module runs its own."""
        self._inputs.begin_step(inflight)
        self._answers.begin(inflight, send_next)
        try:
            yield
        finally:
            self._answers.end()
        self._forwards.end_calls()
        self._answers.alike.end_part(inflight)
        if self._inputs.ready:
            self._forwards.check_calls(inflight.modules)
        for state in inflight.modules.values():
            if not state.served:
                self._drop(state)

    def end_part(self, inflight: SparseFlight) -> None:
        """End the part of a step before a backward in it; a RuntimeError if ranks call modules differently in it."""
        self._answers.alike.end_part(inflight)

    def forget_received(self, inflight: SparseFlight) -> None:
        """Let go of the embeddings and inputs of a batch whose backward is over."""
        self._answers.forget(inflight)

    def drop_lookups(self, inflight: SparseFlight) -> None:
        """Wait for the early lookups of a batch and drop them: its modules will run in their own forward."""
        for name, state in list(inflight.modules.items()):
            if state.has_lookups:
                if not state.served:
                    self._drop(state)
                del inflight.modules[name]

    def _drop(self, state: ModuleContext) -> None:
        """Wait for a module's collectives under way and drop them; take its lookup back from the kernels' counts."""
        if state.tensors_awaitable is not None:  # ids for a lookup at the module's call, which did not come
            state.tensors_awaitable.wait()
            state.tensors_awaitable = None
        if state.has_lookups:
            with self._streams.on_lookup():  # where the embeddings were allocated
                for awaitable in [*state.output_dist_awaitables.values(), state.embeddings]:
                    if awaitable is not None:
                        awaitable.wait()
            self._take_back(state)
        state.advance(Progress.DROPPED)

    def _take_back(self, state: ModuleContext) -> None:
        take_back(tbes(state.module), state.num_lookups, self._streams)
        state.num_lookups = []

    @cached_property
    def _has_dense_tables(self) -> bool:
        known = [module for module in self._modules if spec_of(module) is not None]
        return any(WeightOwner.DENSE_OPTIMIZER in owners_of_parts(one) and dense_weights(one) for one in known)

    def is_overwritten(self, batches: Iterable[SparseFlight]) -> bool:
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""
        # The usual case: no write since the last search, which left no overwritten lookup.
        rates = [rates_of(module) for module in self._modules] if self._options.holds_rates else []
        seen = rates, [num_writes(module, WeightOwner.FUSED_BACKWARD) for module in self._modules]
        if seen == self._seen and not self._has_dense_tables:
            return False
        self._seen = seen
        return any(_is_overwritten(state) for inflight in batches for state in inflight.modules.values())

    def leave_overwritten(self, batches: Iterable[SparseFlight]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written afterwards."""
        if self._inputs.releases:
            raise RuntimeError(
                "tables were written between two steps, after the next batch had been looked up, and its ids are gone "
                "(release_features=True): it cannot be looked up anew. Train with release_features=False."
            )
        dropped = list(batches)
        states = [item for inflight in dropped for item in inflight.modules.items()]
        self._written |= {name for name, state in states if _is_overwritten(state)}
        self._num_drops += 1
        if self._num_drops == MAX_OVERWRITTEN:
            any_rank = self._options.any_rank
            written = [name for name in self._forwards if any_rank(name in self._written)]  # all ranks ask for each
            for name in written or self._forwards:  # all if no rank knows of a write (`tables_changed` was called)
                if self._forwards[name].early:
                    self._forwards.run_unpipelined(self._forwards[name], WRITTEN)
            self._num_drops, self._written = 0, set()
        for inflight in dropped:
            self.drop_lookups(inflight)


def _is_overwritten(state: ModuleContext) -> bool:
    return not state.served and state.is_overwritten()


def _look_up_parts(state: ModuleContext, parts: list[int]) -> None:
    """Run the kernels of some parts and start their output dists; after the last part assemble the module's output."""
    module, started = state.module, state.output_dist_awaitables
    lookups = [lookup if part in parts else _NO_LOOKUP for part, lookup in enumerate(module._lookups)]
    with replaced(module, "_lookups", lookups):
        embeddings = module.compute(state.context, state.dist_input)
    for part in parts:
        started[part] = module._output_dists[part](embeddings[part], state.context.sharding_contexts[part])
    if len(started) == len(lookups):
        in_order = [started[part] for part in range(len(lookups))]
        with replaced(module, "_output_dists", [lambda output, context: output] * len(lookups)):
            state.embeddings = module.output_dist(state.context, in_order)
        started.clear()


def _parts_to_look_up(state: ModuleContext, owners: Container[WeightOwner]) -> list[int]:
    of_parts, started = owners_of_parts(state.module), state.output_dist_awaitables
    return [part for part, owner in enumerate(of_parts) if owner in owners and part not in started]


class _NoLookup:
    """Replaces the lookup of a part that is not run now, and its embeddings."""

    def __call__(self, features: KeyedJaggedTensor) -> _NoLookup:
        return self

    def view(self, *shape: int) -> _NoLookup:
        return self


_NO_LOOKUP = _NoLookup()
