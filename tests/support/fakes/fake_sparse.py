"""Sparse stages without TorchRec."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_overlap.runtime import InFlightBatch, Observer
from lightning_overlap.schedules import EARLY_OWNERS, SPARSE_STAGES, Stage, StreamName, WeightOwner

from .recording import Mark, RecordingStreams, memory_of


class InjectedError(RuntimeError):
    """Raised by a fake at the stage and batch that a test chose."""


@dataclass(slots=True)
class FakeModuleInFlight:
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
        self.left_from, self._observe = left_from, observer
        self.fail_at: tuple[Stage, int] | None = None
        self._current: InFlightBatch | None = None
        self._num_runs = 0
        self.clear()

    def clear(self) -> None:
        self._num_runs += 1
        self.loaded = f"the tables as loaded before run {self._num_runs}"  # read by prefetches
        self.updates: dict[WeightOwner, list[int]] = {owner: [] for owner in EARLY_OWNERS}
        self.stages: dict[int, list[Stage]] = {}
        self.served: list[Served] = []
        self.pending: set[tuple[Stage, int, str]] = set()
        self.to_update: dict[int, InFlightBatch] = {}
        self.called_in_backward: dict[int, Callable[[], None]] = {}

    def begin(self, stage: Stage, batch: int) -> None:
        if self.fail_at == (stage, batch):
            raise InjectedError(f"told to fail in {stage} of batch {batch}")
        self.stages.setdefault(batch, []).append(stage)

    can_defer_updates = True

    def discover(self, inflight: InFlightBatch) -> None:
        assert not self.ready, "discovery after it is known which input feeds which module"
        self.ready = True

    @contextmanager
    def forward(self, inflight: InFlightBatch, send_next: Callable[[], None]) -> Iterator[None]:
        assert self._current is None, "a forward inside a forward"
        self._current = inflight
        try:
            yield
        finally:
            self._current = None

    def input_splits_dist(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.INPUT_SPLITS_DIST, inflight.index)
        assert not inflight.modules, f"{Stage.INPUT_SPLITS_DIST} of batch {inflight.index} a second time"
        for name in inflight.batch.modules:
            inflight.modules[name] = FakeModuleInFlight(self.modules[name], name, inflight.index)
            self.pending.add((Stage.INPUT_SPLITS_DIST, inflight.index, name))
        sizes = [_of_batch("sizes", inflight.index)]  # the host reads them, so no memory of a device is handed over
        self._do(Stage.INPUT_SPLITS_DIST, inflight, reads=memory_of(inflight.batch), writes=sizes)

    def input_data_dist(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.INPUT_DATA_DIST, inflight.index)
        if not inflight.modules:
            return
        self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
        for name, state in inflight.modules.items():
            assert state.last is Stage.INPUT_SPLITS_DIST, f"input data dist of batch {inflight.index} a second time"
            state.last = Stage.INPUT_DATA_DIST
            self._complete(Stage.INPUT_SPLITS_DIST, inflight.index, name)
            self.pending.add((Stage.INPUT_DATA_DIST, inflight.index, name))
        reads = [_of_batch("sizes", inflight.index), *memory_of(inflight.batch)]
        self._do(Stage.INPUT_DATA_DIST, inflight, reads=reads, makes=memory_of(list(inflight.modules.values())))

    def receive_input(self, inflight: InFlightBatch) -> Any:
        for name, state in inflight.modules.items():
            if state.received:
                continue
            assert state.last is Stage.INPUT_DATA_DIST, f"batch {inflight.index} has had no input data dist"
            self._observe("wait", Stage.INPUT_DATA_DIST, inflight.index)
            self._complete(Stage.INPUT_DATA_DIST, inflight.index, name)
            self._do(Stage.INPUT_DATA_DIST, inflight, name, writes=state.memory)
            state.received = True
        return list(inflight.modules.values())

    def prefetch(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.PREFETCH, inflight.index)
        for name, state in inflight.modules.items():
            assert state.received, f"the prefetch of batch {inflight.index} comes before its input"
            assert not state.seen, f"the prefetch of batch {inflight.index} comes after its lookup"
            state.prefetched = True
            writes = [cache(name), _of_batch("cached rows", inflight.index, name)]
            self._do(Stage.PREFETCH, inflight, name, reads=[self.loaded, *state.memory], writes=writes)

    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool:
        return any(state.owners & owners - state.seen.keys() for state in inflight.modules.values())

    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner], only: Any = None) -> None:
        self.begin(Stage.EMBEDDING_LOOKUP, inflight.index)
        for name, state in inflight.modules.items():
            assert state.received, f"the lookup of batch {inflight.index} comes before its input"
            for owner in sorted(state.owners & owners, key=str):
                assert owner not in state.seen, f"tables of {owner} looked up twice for batch {inflight.index}"
                cached = [_of_batch("cached rows", inflight.index, name)] if state.prefetched else []
                state.seen[owner] = self._read(inflight, name, owner, [*state.memory, *cached])
            if state.seen.keys() == state.owners:
                self.pending.add((Stage.EMBEDDING_LOOKUP, inflight.index, name))

    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool:
        """Let `call`, which issues a stage of `left_from`, run in the backward; else the caller issues it now."""
        fused = any(WeightOwner.FUSED_BACKWARD in state.owners for state in inflight.modules.values())
        is_left = fused and stage in self.left_from
        if is_left:
            self.called_in_backward[inflight.index] = call
        return is_left

    def drop_lookups(self, inflight: InFlightBatch) -> None:
        self.drain(inflight)
        inflight.modules.clear()

    def drain(self, inflight: InFlightBatch) -> None:
        self.pending -= {(stage, inflight.index, name) for name in inflight.modules for stage in SPARSE_STAGES}

    def start_update(self, inflight: InFlightBatch) -> None:
        gradients, sent = (_of_batch(what, inflight.index) for what in ("gradients", "sent gradients"))
        self._do("sent gradients", inflight, reads=[gradients], writes=[sent])

    def embedding_update(self, inflight: InFlightBatch, updated: Any = None) -> None:
        if inflight.index in self.to_update:  # it had a backward, and one that did not go all the way
            self._update(inflight.index)

    def drop_update(self, inflight: InFlightBatch) -> None:
        self.to_update.pop(inflight.index, None)
        self.pending -= {(Stage.BACKWARD, inflight.index, name) for name in self.modules}

    def _nothing(self, *args: Any) -> None:
        """No cache, no replicas and no counts; lookups are over at once, and nothing is held."""

    forget_prefetched = count_lookups = _nothing
    update_replicas = hold_replicas = forget_received = end_part = _nothing

    def _update(self, index: int) -> None:
        self.begin(Stage.EMBEDDING_UPDATE, index)
        inflight = self.to_update.pop(index)
        owner = WeightOwner.FUSED_BACKWARD
        self.updates[owner].append(index)
        for name, owners in self.modules.items():
            if owner in owners:
                self._observe("wait", Stage.EMBEDDING_UPDATE, index)
                self._complete(Stage.BACKWARD, index, name)
                reads = [_of_batch("sent gradients", index), *memory_of(inflight.modules[name])]
                self._do(owner, inflight, name, reads=reads, writes=[table(name, owner)])

    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool:
        return False

    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None:
        for inflight in batches:
            self.drop_lookups(inflight)

    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool:
        return True

    def call_modules(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.DENSE_FORWARD, inflight.index)
        self._do(Stage.DENSE_FORWARD, inflight, reads=memory_of(inflight.batch))
        for name in self.modules:
            state = inflight.modules.get(name)
            looked_up = state is not None and state.seen.keys() == state.owners and not state.served
            if early := self._current is not None and looked_up:
                state.served = True
                self._receive_embeddings(inflight.index, name)
                self._do(Stage.DENSE_FORWARD, inflight, name, reads=self._embeddings(inflight.index, name))
            else:
                if self._current is not None:
                    self._current.ran_unpipelined = True
                self.streams.take_from_caller(inflight.batch, self.lookup_stream)
                state = FakeModuleInFlight(self.modules[name], name, inflight.index)
                with self.streams.on(self.lookup_stream):
                    for index in sorted(self.to_update):
                        self._update(index)
                    for owner in self.modules[name]:
                        state.seen[owner] = self._read(inflight, name, owner, memory_of(inflight.batch), early=False)
                self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))
            for owner, saw in state.seen.items():
                self.served.append(Served(inflight.index, name, owner, early, saw))

    def _embeddings(self, index: int, name: str) -> list[str]:
        return [_of_batch("embeddings", index, name, owner.value) for owner in self.modules[name]]

    def _do(self, what: Stage | WeightOwner | str, inflight: InFlightBatch, name: str = "", **memory: Any) -> None:
        self.streams.do(Mark(what, inflight.index, name), **memory)

    def _read(
        self, inflight: InFlightBatch, name: str, owner: WeightOwner, uses: Iterable[str], *, early: bool = True
    ) -> tuple[int, ...]:
        made = _of_batch("embeddings", inflight.index, name, owner.value, *(() if early else ("own forward",)))
        reads, writes = [*uses, table(name, owner)], [] if early else [cache(name)]
        self._do(Stage.EMBEDDING_LOOKUP, inflight, f"{name}/{owner.value}", reads=reads, writes=writes, makes=[made])
        return tuple(self.updates[owner])

    def _receive_embeddings(self, index: int, name: str) -> None:
        self._observe("wait", Stage.EMBEDDING_LOOKUP, index)
        self._complete(Stage.EMBEDDING_LOOKUP, index, name)
        self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))
        self.streams.record_stream(self._embeddings(index, name), StreamName.COMPUTE)

    def backward(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.BACKWARD, inflight.index)
        gradients = _of_batch("gradients", inflight.index)
        self._do(Stage.BACKWARD, inflight, writes=[gradients])
        if (call := self.called_in_backward.get(inflight.index)) is not None:
            call()
        calls = self.served[-sum(map(len, self.modules.values())) :]
        fused = [served for served in calls if served.owner is WeightOwner.FUSED_BACKWARD]
        if inflight.defers_update and all(served.early for served in fused):
            self.to_update[inflight.index] = inflight
            self.pending |= {(Stage.BACKWARD, inflight.index, served.module) for served in fused}
            return
        self.updates[WeightOwner.FUSED_BACKWARD].append(inflight.index)
        self.streams.wait(self.lookup_stream, self.streams.record(StreamName.COMPUTE))  # autograd does, and hands over
        for served in fused:
            with self.streams.on(self.lookup_stream):
                ids = memory_of(inflight.modules[served.module]) if served.early else []
                writes = [table(served.module, served.owner)]
                self._do(served.owner, inflight, served.module, reads=[gradients, *ids], writes=writes)

    def step(self, inflight: InFlightBatch) -> None:
        self.begin(Stage.OPTIMIZER_STEP, inflight.index)
        self.updates[WeightOwner.DENSE_OPTIMIZER].append(inflight.index)
        owner = WeightOwner.DENSE_OPTIMIZER
        tables = [table(name, owner) for name, owners in self.modules.items() if owner in owners]
        self._do(owner, inflight, writes=tables)

    def _complete(self, stage: Stage, index: int, name: str) -> None:
        assert (stage, index, name) in self.pending, f"waited for {stage} of batch {index}, which is not in flight"
        self.pending.remove((stage, index, name))
