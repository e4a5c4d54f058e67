"""A batch in flight through the sparse stages of all sharded modules of a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from ..runtime import ModulePart
from ..schedules import Stage, StreamName, WeightOwner
from .backward_fill import BackwardFill
from .discovery import Discovery
from .input_dist import InputExchange
from .module_forwards import ModuleForwards
from .padding import repeat
from .sent_updates import SentUpdates
from .shared import Shared
from .sparse_batch import SparseBatch
from .watchers.last_calls import LastCalls


@dataclass(slots=True, kw_only=True)
class SparseFlight(SparseBatch):
    """A batch in flight; its methods are the stages, in all sharded modules."""

    shared: Shared
    discovery: Discovery
    forwards: ModuleForwards
    exchange: InputExchange | None  # None on one rank
    backward_fill: BackwardFill
    updates: SentUpdates
    last_calls: LastCalls | None  # of an evaluation on several ranks

    @override
    def send_sizes(self) -> None:
        # Source: `_start_data_dist` and `_fuse_input_dist_splits`, TorchRec 1.8.
        for module_flight in self.discovery.inputs_of(self):
            module_flight.describe_input()
            self.modules[module_flight.name] = module_flight
        taking_part = self.discovery.taking_part
        if self.exchange is not None and (taking_part or self.shared.options.trains):
            self.exchange.send_sizes(taking_part, self)

    @override
    def send_ids(self) -> None:
        if self.exchange is None:
            for module_flight in self.modules.values():
                module_flight.expect_own_ids()
        elif self.sizes is not None:
            self.shared.telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, self.index)
            self.exchange.send_ids(self)
        if self.discovery.releases:
            # Modules that run in their own forward will read their ids in the step.
            read_later = self.discovery.inputs_read_in_step(self.batch)
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
        step, watchers = self.shared.step, self.shared.watchers
        self.discovery.begin_step(self)
        self.forwards.begin_step()
        step.begin(self, send_next)
        for watcher in watchers.step_begins:
            watcher.step_begins(step.number, self)
        try:
            yield
        finally:
            step.end()
        for watcher in watchers.step_ends:
            watcher.step_ends(self)
        self.forwards.end_calls()
        for watcher in watchers.phase_ends:
            watcher.phase_ends(self)
        if self.discovery.ready:
            self.forwards.check_calls(self.modules)
        for module_flight in self.modules.values():
            if not module_flight.served:
                module_flight.drop()

    @override
    def take_part(self) -> None:
        assert self.last_calls is not None
        repeat(self.last_calls.calls, self.modules, self.shared.options)

    @override
    def end_phase(self) -> None:
        for watcher in self.shared.watchers.phase_ends:
            watcher.phase_ends(self)

    @override
    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        return self.backward_fill.register(self, stage, call)

    @override
    def end_backward(self) -> None:
        for module_flight in self.modules.values():
            module_flight.end_backward(defers_update=self.defers_update)
        self.shared.step.end_backward(self)

    @override
    def send_gradients(self) -> None:
        streams = self.shared.streams
        self.updates[self.index] = self
        for module_flight in self.modules.values():
            # `DeferredUpdates` has ordered the two streams.
            streams.use_ordered(module_flight.deferred.send(), StreamName.COMPUTE, on=streams.lookup)

    @override
    def gradients_are_there(self) -> bool:
        return all(work.is_completed() for one in self.modules.values() for work in one.deferred.works)

    @override
    def update(self, after_part: Callable[[str, int], None] | None = None) -> None:
        self.updates.pop(self.index, None)
        for name, module_flight in self.modules.items():
            module_flight.update(None if after_part is None else partial(after_part, name))

    @override
    def forget_update(self) -> None:
        self.updates.pop(self.index, None)
        self.count_lookups(-1)

    @override
    def count_lookups(self, times: int) -> None:
        for module_flight in self.modules.values():
            module_flight.count_lookups(times)

    @override
    def abandon(self) -> list[Any]:
        self.backward_fill.forget()
        # Not the flight itself, nor `sizes`, which lead to the model and its trainer.
        exchange = None if self.sizes is None else self.sizes.exchange
        return [self.batch, exchange, *[held for one in self.modules.values() for held in one.abandon()]]

    @override
    def drain(self) -> None:
        if self.sizes is not None or any(one.splits_awaitable is not None for one in self.modules.values()):
            # The sizes were made on the input dist's stream, and the ids are sent from this one.
            self.shared.streams.order(StreamName.DATA_DIST, then=StreamName.COMPUTE)
            self.send_ids()
        self.receive_ids()

    @override
    def drop(self) -> None:
        for name, module_flight in list(self.modules.items()):
            if module_flight.has_early_lookup:
                if not module_flight.served:
                    module_flight.drop()
                del self.modules[name]
