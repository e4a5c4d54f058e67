"""Sparse stages without TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_overlap.runtime import FetchedBatch, Flight, Observer
from lightning_overlap.schedules import EARLY_OWNERS, Stage, StreamName, WeightOwner

from .recording import Mark, RecordingStreams, memory_of


class InjectedError(RuntimeError):
    """Raised by a fake at the stage and batch that a test chose."""


@dataclass(slots=True)
class FakeModule:
    owners: frozenset[WeightOwner]
    name: str = ""
    batch: int = -1
    last: Stage = Stage.INPUT_SPLITS_DIST
    received: bool = False
    prefetched: bool = False
    served: bool = False
    seen: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)

    @property
    def memory(self) -> tuple[str, ...]:
        return (_of_batch("ids", self.batch, self.name),)


class Served(NamedTuple):
    batch: int
    module: str
    owner: WeightOwner
    early: bool  # from an early lookup, not from the module's own forward
    saw: tuple[int, ...]  # the batches whose updates the lookup saw, oldest first


def table(module: str, owner: WeightOwner) -> str:
    return f"the tables of {module} ({owner.value})"


def cache(module: str) -> str:
    return f"the cache of {module}"


def _of_batch(what: str, index: int, *details: str) -> str:
    return f"{what} of batch {index}" + (f" ({', '.join(details)})" if details else "")


class FakeSparse:
    """Sparse stages whose tables count the updates they got, and whose lookups note which they saw.

    Raises AssertionError where the stages of one batch come out of order or twice. The stages of `left_from` are left,
    with what is below them, until a backward waits for other ranks, as on a CPU.
    """

    def __init__(
        self,
        modules: Mapping[str, frozenset[WeightOwner]],
        ready: bool,  # the inputs of the modules are known from the start
        streams: RecordingStreams,
        lookup_stream: StreamName,
        observer: Observer,
        left_from: Collection[Stage],
    ) -> None:
        self.modules, self.ready, self.streams, self.lookup_stream = modules, ready, streams, lookup_stream
        self.left_from, self.observe = left_from, observer
        self.fail_at: tuple[Stage, int] | None = None
        self.current: FakeFlight | None = None
        self.num_runs = 0
        self.clear()

    def clear(self) -> None:
        self.num_runs += 1
        self.loaded = f"the tables as loaded before run {self.num_runs}"  # read by prefetches
        self.updates: dict[WeightOwner, list[int]] = {owner: [] for owner in EARLY_OWNERS}
        self.stages: dict[int, list[Stage]] = {}
        self.served: list[Served] = []
        self.pending: set[tuple[Stage, int, str]] = set()
        self.to_update: dict[int, FakeFlight] = {}
        self.called_in_backward: dict[int, Callable[[], None]] = {}

    def begin(self, stage: Stage, batch: int) -> None:
        if self.fail_at == (stage, batch):
            raise InjectedError(f"told to fail in {stage} of batch {batch}")
        self.stages.setdefault(batch, []).append(stage)

    can_defer_updates = True

    def make_flight(self, index: int, fetched: FetchedBatch) -> FakeFlight:
        return FakeFlight(index, *fetched, sparse=self)

    def make_padding(self, index: int) -> FakeFlight:
        raise AssertionError(f"one rank has no batches of other ranks to take part in, such as {index}")

    def all_called(self) -> bool:
        return True

    def discover(self, current: Flight) -> None:
        assert not self.ready, "discovery after it is known which input feeds which module"
        self.ready = True

    def forget_prefetched(self) -> None:
        """There is no cache."""

    def are_overwritten(self, flights: Iterable[Flight]) -> bool:
        return False

    def drop_overwritten(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            flight.drop()

    def call_in_backward(self, flight: FakeFlight, stage: Stage, call: Callable[[], None]) -> bool:
        """Let `call`, which issues a stage of `left_from`, run in the backward; else the caller issues it now."""
        fused = any(WeightOwner.FUSED_BACKWARD in state.owners for state in flight.modules.values())
        is_left = fused and stage in self.left_from
        if is_left:
            self.called_in_backward[flight.index] = call
        return is_left

    def update(self, index: int) -> None:
        self.begin(Stage.EMBEDDING_UPDATE, index)
        flight = self.to_update.pop(index)
        owner = WeightOwner.FUSED_BACKWARD
        self.updates[owner].append(index)
        for name, owners in self.modules.items():
            if owner in owners:
                self.observe("wait", Stage.EMBEDDING_UPDATE, index)
                self.complete(Stage.BACKWARD, index, name)
                reads = [_of_batch("sent gradients", index), *memory_of(flight.modules[name])]
                self.do(owner, flight, name, reads=reads, writes=[table(name, owner)])

    def call_modules(self, flight: FakeFlight) -> None:
        self.begin(Stage.DENSE_FORWARD, flight.index)
        self.do(Stage.DENSE_FORWARD, flight, reads=memory_of(flight.batch))
        for name in self.modules:
            state = flight.modules.get(name)
            looked_up = state is not None and state.seen.keys() == state.owners and not state.served
            if early := self.current is not None and looked_up:
                state.served = True
                self._receive_embeddings(flight.index, name)
                self.do(Stage.DENSE_FORWARD, flight, name, reads=self._embeddings(flight.index, name))
            else:
                if self.current is not None:
                    self.current.ran_unpipelined = True
                self.streams.take_from_caller(flight.batch, self.lookup_stream)
                state = FakeModule(self.modules[name], name, flight.index)
                with self.streams.on(self.lookup_stream):
                    for index in sorted(self.to_update):
                        self.update(index)
                    for owner in self.modules[name]:
                        state.seen[owner] = self.read(flight, name, owner, memory_of(flight.batch), early=False)
                self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))
            for owner, saw in state.seen.items():
                self.served.append(Served(flight.index, name, owner, early, saw))

    def _embeddings(self, index: int, name: str) -> list[str]:
        return [_of_batch("embeddings", index, name, owner.value) for owner in self.modules[name]]

    def do(self, what: Stage | WeightOwner | str, flight: FakeFlight, name: str = "", **memory: Any) -> None:
        self.streams.do(Mark(what, flight.index, name), **memory)

    def read(
        self, flight: FakeFlight, name: str, owner: WeightOwner, uses: Iterable[str], *, early: bool = True
    ) -> tuple[int, ...]:
        made = _of_batch("embeddings", flight.index, name, owner.value, *(() if early else ("own forward",)))
        reads, writes = [*uses, table(name, owner)], [] if early else [cache(name)]
        self.do(Stage.EMBEDDING_LOOKUP, flight, f"{name}/{owner.value}", reads=reads, writes=writes, makes=[made])
        return tuple(self.updates[owner])

    def _receive_embeddings(self, index: int, name: str) -> None:
        self.observe("wait", Stage.EMBEDDING_LOOKUP, index)
        self.complete(Stage.EMBEDDING_LOOKUP, index, name)
        self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))
        self.streams.record_stream(self._embeddings(index, name), StreamName.COMPUTE)

    def backward(self, flight: FakeFlight) -> None:
        self.begin(Stage.BACKWARD, flight.index)
        gradients = _of_batch("gradients", flight.index)
        self.do(Stage.BACKWARD, flight, writes=[gradients])
        if (call := self.called_in_backward.get(flight.index)) is not None:
            call()
        calls = self.served[-sum(map(len, self.modules.values())) :]
        fused = [served for served in calls if served.owner is WeightOwner.FUSED_BACKWARD]
        if flight.defers_update and all(served.early for served in fused):
            self.to_update[flight.index] = flight
            self.pending |= {(Stage.BACKWARD, flight.index, served.module) for served in fused}
            return
        self.updates[WeightOwner.FUSED_BACKWARD].append(flight.index)
        self.streams.wait(self.lookup_stream, self.streams.record(StreamName.COMPUTE))  # autograd does, and hands over
        for served in fused:
            with self.streams.on(self.lookup_stream):
                ids = memory_of(flight.modules[served.module]) if served.early else []
                writes = [table(served.module, served.owner)]
                self.do(served.owner, flight, served.module, reads=[gradients, *ids], writes=writes)

    def step(self, flight: FakeFlight) -> None:
        self.begin(Stage.OPTIMIZER_STEP, flight.index)
        self.updates[WeightOwner.DENSE_OPTIMIZER].append(flight.index)
        owner = WeightOwner.DENSE_OPTIMIZER
        tables = [table(name, owner) for name, owners in self.modules.items() if owner in owners]
        self.do(owner, flight, writes=tables)

    def complete(self, stage: Stage, index: int, name: str) -> None:
        assert (stage, index, name) in self.pending, f"waited for {stage} of batch {index}, which is not in flight"
        self.pending.remove((stage, index, name))


@dataclass(slots=True, kw_only=True)
class FakeFlight(Flight):
    """A batch in flight through a `FakeSparse`."""

    sparse: FakeSparse
    modules: dict[str, FakeModule] = field(default_factory=dict)
    sizes: str = ""  # the name of their memory, once they are sent

    def send_sizes(self) -> None:
        sparse = self.sparse
        sparse.begin(Stage.INPUT_SPLITS_DIST, self.index)
        assert not self.modules, f"{Stage.INPUT_SPLITS_DIST} of batch {self.index} a second time"
        for name in self.batch.modules:
            self.modules[name] = FakeModule(sparse.modules[name], name, self.index)
            sparse.pending.add((Stage.INPUT_SPLITS_DIST, self.index, name))
        # The host reads them, so no memory of a device is handed over. A later run has others.
        self.sizes = _of_batch("sizes", self.index, f"run {sparse.num_runs}")
        sparse.do(Stage.INPUT_SPLITS_DIST, self, reads=memory_of(self.batch), writes=[self.sizes])

    def send_ids(self) -> None:
        sparse = self.sparse
        sparse.begin(Stage.INPUT_DATA_DIST, self.index)
        if not self.modules:
            return
        sparse.observe("wait", Stage.INPUT_SPLITS_DIST, self.index)
        for name, state in self.modules.items():
            assert state.last is Stage.INPUT_SPLITS_DIST, f"input data dist of batch {self.index} a second time"
            state.last = Stage.INPUT_DATA_DIST
            sparse.complete(Stage.INPUT_SPLITS_DIST, self.index, name)
            sparse.pending.add((Stage.INPUT_DATA_DIST, self.index, name))
        reads = [self.sizes, *memory_of(self.batch)]
        sparse.do(Stage.INPUT_DATA_DIST, self, reads=reads, makes=memory_of(list(self.modules.values())))

    def receive_ids(self) -> Any:
        sparse = self.sparse
        for name, state in self.modules.items():
            if state.received:
                continue
            assert state.last is Stage.INPUT_DATA_DIST, f"batch {self.index} has had no input data dist"
            sparse.observe("wait", Stage.INPUT_DATA_DIST, self.index)
            sparse.complete(Stage.INPUT_DATA_DIST, self.index, name)
            sparse.do(Stage.INPUT_DATA_DIST, self, name, writes=state.memory)
            state.received = True
        return list(self.modules.values())

    def prefetch(self) -> None:
        sparse = self.sparse
        sparse.begin(Stage.PREFETCH, self.index)
        for name, state in self.modules.items():
            assert state.received, f"the prefetch of batch {self.index} comes before its input"
            assert not state.seen, f"the prefetch of batch {self.index} comes after its lookup"
            state.prefetched = True
            writes = [cache(name), _of_batch("cached rows", self.index, name)]
            sparse.do(Stage.PREFETCH, self, name, reads=[sparse.loaded, *state.memory], writes=writes)

    def needs_lookup(self, owners: frozenset[WeightOwner]) -> bool:
        return any(state.owners & owners - state.seen.keys() for state in self.modules.values())

    def look_up(self, owners: frozenset[WeightOwner], only: Any = None) -> None:
        sparse = self.sparse
        sparse.begin(Stage.EMBEDDING_LOOKUP, self.index)
        for name, state in self.modules.items():
            assert state.received, f"the lookup of batch {self.index} comes before its input"
            for owner in sorted(state.owners & owners, key=str):
                assert owner not in state.seen, f"tables of {owner} looked up twice for batch {self.index}"
                cached = [_of_batch("cached rows", self.index, name)] if state.prefetched else []
                state.seen[owner] = sparse.read(self, name, owner, [*state.memory, *cached])
            if state.seen.keys() == state.owners:
                sparse.pending.add((Stage.EMBEDDING_LOOKUP, self.index, name))

    @contextmanager
    def serve(self, send_next: Callable[[], None]) -> Iterator[None]:
        assert self.sparse.current is None, "a forward inside a forward"
        self.sparse.current = self
        try:
            yield
        finally:
            self.sparse.current = None

    def run_in_backward(self, stage: Stage, call: Callable[[], None]) -> bool:
        return self.sparse.call_in_backward(self, stage, call)

    def send_gradients(self) -> None:
        gradients, sent = (_of_batch(what, self.index) for what in ("gradients", "sent gradients"))
        self.sparse.do("sent gradients", self, reads=[gradients], writes=[sent])

    def gradients_are_there(self) -> bool:
        return True

    def update(self, after_part: Callable[[str, int], None] | None = None) -> None:
        if self.index in self.sparse.to_update:  # it had a backward, and one that did not go all the way
            self.sparse.update(self.index)

    def forget_update(self) -> None:
        self.sparse.to_update.pop(self.index, None)
        self.sparse.pending -= {(Stage.BACKWARD, self.index, name) for name in self.sparse.modules}

    def drain(self) -> None:
        """Complete exchanges alone: lookups are `drop`'s."""
        exchanges = (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST)
        self.sparse.pending -= {(stage, self.index, name) for name in self.modules for stage in exchanges}

    def drop(self) -> None:
        for name in [name for name, state in self.modules.items() if state.seen]:
            self.sparse.pending.discard((Stage.EMBEDDING_LOOKUP, self.index, name))
            del self.modules[name]
