"""A batch in flight through the sparse stages of all sharded modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..runtime import Flight, Made, ModulePart
from ..schedules import Stage, StreamName, WeightOwner
from .module_flight import ModuleFlight

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
        for flight in pipeline.discovery.inputs_of(self):
            flight.send_sizes()
            self.modules[flight.name] = flight
        taking_part = pipeline.discovery.taking_part
        if pipeline.exchange is not None and (taking_part or pipeline.options.trains):
            pipeline.exchange.start_sizes(taking_part, self)

    @override
    def send_ids(self) -> None:
        pipeline = self.pipeline
        if pipeline.exchange is None:
            for flight in self.modules.values():
                flight.read_sizes()
        elif self.sizes is not None:
            pipeline.telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, self.index)
            pipeline.exchange.start_data(self)
        if pipeline.discovery.releases:
            # Modules that run in their own forward will read their ids in the step.
            read_later = pipeline.discovery.inputs_read_in_step(self.batch)
            for flight in self.modules.values():
                if all(flight.kjt is not kjt for kjt in read_later):
                    flight.release_ids()

    @override
    def receive_ids(self) -> list[Any]:
        for flight in self.modules.values():
            flight.receive_ids()
        return [held for flight in self.modules.values() for held in (flight.dist_input, flight.context)]

    @override
    def prefetch(self) -> None:
        for flight in self.modules.values():
            flight.prefetch()

    @override
    def has_lookup(self, owners: frozenset[WeightOwner]) -> bool:
        return any(flight.parts_to_look_up(owners) for flight in self.modules.values())

    @override
    def look_up(self, owners: frozenset[WeightOwner], only: ModulePart | None = None) -> None:
        for owner in WeightOwner:  # fused tables first: their embeddings travel while data-parallel tables are read
            if owner in owners:
                for name, flight in self.modules.items():
                    if only is None:
                        flight.look_up(owner, defers_update=self.defers_update)
                    elif name == only[0]:
                        flight.look_up(owner, only[1], defers_update=self.defers_update)

    @contextmanager
    @override
    def serve(self, send_next: Callable[[], None]) -> Iterator[None]:
        pipeline = self.pipeline
        pipeline.discovery.begin_step(self)
        pipeline.forwards.begin_step()
        pipeline.step.begin(self, send_next)
        pipeline.alike.begin_step(pipeline.step.number, self.index)
        try:
            yield
        finally:
            pipeline.step.end()
        pipeline.forwards.end_calls()
        pipeline.alike.end_part(self)
        if pipeline.ready:
            pipeline.forwards.check_calls(self.modules)
        for flight in self.modules.values():
            if not flight.served:
                flight.drop()

    @override
    def end_part(self) -> None:
        # A RuntimeError if ranks call modules differently in it.
        self.pipeline.alike.end_part(self)

    @override
    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        return self.pipeline.backward_fill.register(self, stage, call)

    @override
    def end_backward(self) -> None:
        for flight in self.modules.values():
            flight.end_backward(defers_update=self.defers_update)
        self.pipeline.step.end_backward(self)

    @override
    def send_gradients(self) -> None:
        streams = self.pipeline.streams
        self.pipeline.to_update[self.index] = self
        for flight in self.modules.values():
            # `DeferredUpdates` has ordered the two streams.
            streams.use(Made(flight.deferred.send(), StreamName.COMPUTE, None), on=streams.lookup)

    @override
    def gradients_are_there(self) -> bool:
        return all(work.is_completed() for flight in self.modules.values() for work in flight.deferred.works)

    @override
    def update(self, *, by_part: bool = False) -> Iterator[ModulePart]:
        self.pipeline.to_update.pop(self.index, None)
        for name, flight in self.modules.items():
            for part in flight.update(by_part=by_part):
                yield name, part

    @override
    def forget_update(self) -> None:
        self.pipeline.to_update.pop(self.index, None)
        self.count_lookups(-1)

    @override
    def count_lookups(self, times: int) -> None:
        for flight in self.modules.values():
            flight.count_lookups(times)

    @override
    def under_way(self) -> list[Any]:
        # Not the flight itself, which leads to the model and its trainer.
        return [self.batch, self.sizes, *[held for one in self.modules.values() for held in one.under_way()]]

    @override
    def drain(self) -> None:
        if self.sizes is not None or any(flight.splits_awaitable is not None for flight in self.modules.values()):
            # The sizes were made on the input dist's stream, and the ids are sent from this one.
            self.pipeline.streams.order(StreamName.DATA_DIST, then=StreamName.COMPUTE)
            self.send_ids()
        self.receive_ids()

    @override
    def drop(self) -> None:
        for name, flight in list(self.modules.items()):
            if flight.has_lookups:
                if not flight.served:
                    flight.drop()
                del self.modules[name]
