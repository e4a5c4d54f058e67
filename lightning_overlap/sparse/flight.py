"""A batch in flight through the sparse stages of all sharded modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..runtime import Flight, ModulePart
from ..schedules import Stage, StreamName, WeightOwner
from .module_flight import ModuleFlight
from .padding import repeat

if TYPE_CHECKING:
    from .pipeline import SparsePipeline


@dataclass(slots=True, kw_only=True)
class SparseFlight(Flight):
    """A batch in flight; what is under way in each sharded module is a `ModuleFlight`."""

    pipeline: SparsePipeline
    modules: dict[str, ModuleFlight] = field(default_factory=dict)  # by the module's name in the model
    missing: frozenset[str] = frozenset()  # modules whose input only some ranks have; known once sizes are read
    sizes: Any = None  # the exchange of sizes of all modules, while it is under way
    counted: Any = None  # the count of its stale rows (`StaleCounts`), which may be under way

    @override
    def send_sizes(self) -> None:
        # Source: `_start_data_dist` and `_fuse_input_dist_splits`, TorchRec 1.8.
        pipeline = self.pipeline
        for module_flight in pipeline.discovery.inputs_of(self):
            module_flight.describe_input()
            self.modules[module_flight.name] = module_flight
        taking_part = pipeline.discovery.taking_part
        if pipeline.exchange is not None and (taking_part or pipeline.options.trains):
            pipeline.exchange.send_sizes(taking_part, self)

    @override
    def send_ids(self) -> None:
        pipeline = self.pipeline
        if pipeline.exchange is None:
            for module_flight in self.modules.values():
                module_flight.expect_own_ids()
        elif self.sizes is not None:
            pipeline.telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, self.index)
            pipeline.exchange.send_ids(self)
        if pipeline.discovery.releases:
            # Modules that run in their own forward will read their ids in the step.
            read_later = pipeline.discovery.inputs_read_in_step(self.batch)
            for module_flight in self.modules.values():
                if all(module_flight.kjt is not kjt for kjt in read_later):
                    module_flight.release_ids()
            self.issued[Stage.COPY_BATCH_TO_DEVICE].memory = None  # it has the ids too

    @override
    def receive_ids(self) -> list[Any]:
        for module_flight in self.modules.values():
            module_flight.receive_ids()
        return [held for one in self.modules.values() for held in (one.dist_input, one.context)]

    @override
    def prefetch(self) -> None:
        for module_flight in self.modules.values():
            module_flight.prefetch()

    @override
    def needs_lookup(self, owners: frozenset[WeightOwner]) -> bool:
        return any(one.parts_to_look_up(owners) for one in self.modules.values())

    @override
    def look_up(self, owners: frozenset[WeightOwner], only: ModulePart | None = None) -> None:
        for owner in WeightOwner:  # fused tables first: their embeddings travel while data-parallel tables are read
            if owner in owners:
                for name, module_flight in self.modules.items():
                    if only is None:
                        module_flight.look_up(owner, defers_update=self.defers_update)
                    elif name == only[0]:
                        module_flight.look_up(owner, only[1], defers_update=self.defers_update)

    @contextmanager
    @override
    def serve(self, send_next: Callable[[], None]) -> Iterator[None]:
        pipeline = self.pipeline
        pipeline.discovery.begin_step(self)
        pipeline.forwards.begin_step()
        pipeline.step.begin(self, send_next)
        for watcher in pipeline.watchers.step_begins:
            watcher.step_begins(pipeline.step.number, self)
        try:
            yield
        finally:
            pipeline.step.end()
        for watcher in pipeline.watchers.step_ends:
            watcher.step_ends(self)
        pipeline.forwards.end_calls()
        for watcher in pipeline.watchers.phase_ends:
            watcher.phase_ends(self)
        if pipeline.ready:
            pipeline.forwards.check_calls(self.modules)
        for module_flight in self.modules.values():
            if not module_flight.served:
                module_flight.drop()

    @override
    def take_part(self) -> None:
        assert self.pipeline.last_calls is not None
        repeat(self.pipeline.last_calls.calls, self.modules, self.pipeline.options)

    @override
    def end_phase(self) -> None:
        for watcher in self.pipeline.watchers.phase_ends:
            watcher.phase_ends(self)

    @override
    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        return self.pipeline.backward_fill.register(self, stage, call)

    @override
    def end_backward(self) -> None:
        for module_flight in self.modules.values():
            module_flight.end_backward(defers_update=self.defers_update)
        self.pipeline.step.end_backward(self)

    @override
    def send_gradients(self) -> None:
        streams = self.pipeline.streams
        self.pipeline.to_update[self.index] = self
        for module_flight in self.modules.values():
            # `DeferredUpdates` has ordered the two streams.
            streams.use_ordered(module_flight.deferred.send(), StreamName.COMPUTE, on=streams.lookup)

    @override
    def gradients_are_there(self) -> bool:
        return all(work.is_completed() for one in self.modules.values() for work in one.deferred.works)

    @override
    def update(self, after_part: Callable[[str, int], None] | None = None) -> None:
        self.pipeline.to_update.pop(self.index, None)
        for name, module_flight in self.modules.items():
            module_flight.update(None if after_part is None else partial(after_part, name))

    @override
    def forget_update(self) -> None:
        self.pipeline.to_update.pop(self.index, None)
        self.count_lookups(-1)

    @override
    def count_lookups(self, times: int) -> None:
        for module_flight in self.modules.values():
            module_flight.count_lookups(times)

    @override
    def abandon(self) -> list[Any]:
        self.pipeline.backward_fill.forget()
        # Not the flight itself, nor `sizes`, which lead to the model and its trainer.
        exchange = None if self.sizes is None else self.sizes.exchange
        return [self.batch, exchange, *[held for one in self.modules.values() for held in one.abandon()]]

    @override
    def drain(self) -> None:
        if self.sizes is not None or any(one.splits_awaitable is not None for one in self.modules.values()):
            # The sizes were made on the input dist's stream, and the ids are sent from this one.
            self.pipeline.streams.order(StreamName.DATA_DIST, then=StreamName.COMPUTE)
            self.send_ids()
        self.receive_ids()

    @override
    def drop(self) -> None:
        for name, module_flight in list(self.modules.items()):
            if module_flight.has_early_lookup:
                if not module_flight.served:
                    module_flight.drop()
                del self.modules[name]
