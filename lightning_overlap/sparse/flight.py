"""A batch in flight through the sparse stages of all sharded modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..runtime import Flight, ModulePart, OnUpdated
from ..schedules import Stage, WeightOwner

if TYPE_CHECKING:
    from .module_context import ModuleContext
    from .pipeline import SparsePipeline


@dataclass(slots=True, kw_only=True)
class SparseFlight(Flight):
    """A batch in flight through the sparse stages; `modules` has what is under way in each sharded module."""

    pipeline: SparsePipeline
    modules: dict[str, ModuleContext] = field(default_factory=dict)  # by the module's name in the model
    missing: frozenset[str] = frozenset()  # modules whose input only some ranks have; known once sizes are read
    sizes: Any = None  # the exchange of split sizes of all modules, while it is under way
    counted: Any = None  # the count of its stale rows (`StaleCounts`), which may be under way

    @override
    def send_sizes(self) -> None:
        self.pipeline.inputs.input_splits_dist(self)

    @override
    def send_ids(self) -> None:
        self.pipeline.inputs.input_data_dist(self)

    @override
    def receive_ids(self) -> Any:
        return self.pipeline.inputs.receive_input(self)

    @override
    def prefetch(self) -> None:
        self.pipeline.lookups.prefetch(self)

    @override
    def has_lookup(self, owners: frozenset[WeightOwner]) -> bool:
        return self.pipeline.lookups.has_lookup(self, owners)

    @override
    def look_up(self, owners: frozenset[WeightOwner], only: ModulePart | None = None) -> None:
        self.pipeline.lookups.embedding_lookup(self, owners, only)

    @override
    def serve(self, send_next: Callable[[], None]) -> AbstractContextManager[None]:
        return self.pipeline.lookups.forward(self, send_next)

    @override
    def end_part(self) -> None:
        self.pipeline.lookups.end_part(self)

    @override
    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        return self.pipeline.updates.register_backward_hook(self, stage, call)

    @override
    def end_backward(self) -> None:
        self.pipeline.lookups.forget_received(self)

    @override
    def send_gradients(self) -> None:
        self.pipeline.updates.start_update(self)

    @override
    def gradients_are_there(self) -> bool:
        return all(work.is_completed() for state in self.modules.values() for work in state.deferred.works)

    @override
    def update(self, updated: OnUpdated | None = None) -> None:
        self.pipeline.updates.embedding_update(self, updated)

    @override
    def forget_update(self) -> None:
        self.pipeline.updates.forget_update(self)

    @override
    def count_lookups(self, times: int) -> None:
        self.pipeline.updates.count_lookups(self, times)

    @override
    def drain(self) -> None:
        self.pipeline.inputs.drain(self)

    @override
    def drop(self) -> None:
        self.pipeline.lookups.drop_lookups(self)
