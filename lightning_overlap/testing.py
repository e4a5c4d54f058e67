"""Fakes and law checkers: try a schedule without tables, TorchRec, Lightning or a GPU.

`check_laws(my_schedule)` runs it over fake batches and raises with a drawing where it breaks a law.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

from .executor import Executor, Observer
from .inflight import InFlightBatch
from .schedule import Schedule, Step
from .stages import EARLY_OWNERS, SPARSE_STAGES, STAGE_ORDER, TRAINING_STAGES, Stage, StreamName, WeightOwner
from .streams import Streams

FAKE_MODULES: Mapping[str, frozenset[WeightOwner]] = MappingProxyType(
    {
        "fused": frozenset({WeightOwner.FUSED_BACKWARD}),
        "dense": frozenset({WeightOwner.DENSE_OPTIMIZER}),
        "both": EARLY_OWNERS,
    }
)
"""Modules of a `FakeSparse`: who writes the tables of each."""

TimelineEvent = tuple[str, Stage, int]
"""("issue" | "wait", stage, batch), as an observer gets it."""


class InjectedError(RuntimeError):
    """Raised by a fake at the stage and batch that a test chose."""


# -- what happened, and how to draw it --------------------------------------------------------------------------


class Timeline:
    """Collects what an observer is told, and draws it.

    Pass `timeline.record` as the `observer` of an executor or of the strategy.

    Args:
        schedule: Says which stream each stage is on.
    """

    LETTERS: Mapping[Stage, str] = MappingProxyType(dict(zip(Stage, "CSDPLFBO", strict=True)))

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events: list[TimelineEvent] = []

    def record(self, kind: str, stage: Stage, batch: int) -> None:
        """Take one event: this is an `Observer`."""
        self.events.append((kind, stage, batch))

    def issued(self) -> list[str]:
        """Return the issues in order, short: `C0` is the copy of batch 0 (see `LETTERS`)."""
        return [f"{self.LETTERS[stage]}{batch}" for kind, stage, batch in self.events if kind == "issue"]

    def draw(self, width: int = 118) -> str:
        """Draw the events from left to right in the order the host made them, one lane per stream.

        Args:
            width: Characters per line; longer runs continue in another block of lanes.
        """
        lanes = [str(name) for name in StreamName if any(step.stream is name for step in self.schedule)]
        lanes += ["host waits"] if any(kind == "wait" for kind, _, _ in self.events) else []
        title = max(map(len, lanes))
        cells = [(self._lane(kind, stage), f"{self.LETTERS[stage]}{batch}") for kind, stage, batch in self.events]
        cell_width = max((len(text) for _, text in cells), default=2) + 1
        per_block = max(1, (width - title - 2) // cell_width)
        blocks = []
        for start in range(0, max(1, len(cells)), per_block):
            block = cells[start : start + per_block]
            for lane in lanes:
                row = "".join((text if where == lane else "").ljust(cell_width) for where, text in block)
                blocks.append(f"{lane:{title}s} |{row}".rstrip())
        return "\n".join(blocks)

    def _lane(self, kind: str, stage: Stage) -> str:
        step = self.schedule.row(stage)
        return "host waits" if kind == "wait" else str(StreamName.COMPUTE if step is None else step.stream)


class Mark(NamedTuple):
    """A piece of fake device work: a stage of a batch, the update that a batch makes, or a load of weights (None)."""

    what: Stage | WeightOwner | None
    batch: int
    module: str = ""
    nth: int = 0
    """Counts the forwards and backwards of one step; of lookups, 0 is the early one."""


LOADED_WEIGHTS = Mark(None, -1)
"""What the compute stream did to the tables before a run: a checkpoint was loaded, weights were initialized."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A stream event, and the work that is over once it is."""

    stream: StreamName
    over: frozenset[Mark]


class RecordingStreams:
    """Stands in for a device's streams: logs every call, and knows which work is ordered before which.

    Args:
        lookup: The stream that `StreamName.LOOKUP` stands for, as a stream policy says.
    """

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self.log: list[tuple[str, StreamName, Any]] = []
        self.before: dict[Mark, frozenset[Mark]] = {}
        self._lookup = lookup
        self._current = StreamName.COMPUTE
        self._known: dict[StreamName, frozenset[Mark]] = dict.fromkeys(StreamName, frozenset())

    def __getitem__(self, name: StreamName) -> StreamName:
        return self._lookup if name is StreamName.LOOKUP else name

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Make a stream current."""
        previous, self._current = self._current, self[name]
        self.log.append(("on", self._current, None))
        try:
            yield
        finally:
            self._current = previous

    def record(self, name: StreamName) -> RecordedEvent:
        """Return an event that knows all work issued on a stream so far."""
        event = RecordedEvent(self[name], self._known[self[name]])
        self.log.append(("record", self[name], event))
        return event

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        """Order later work on a stream behind an event."""
        if event is not None:
            self.log.append(("wait", self[name], event))
            self._known[self[name]] |= event.over

    def native(self, name: StreamName) -> StreamName:
        """Return the stream's name."""
        return self[name]

    def hand_over(self, value: Any, name: StreamName) -> None:
        """Log that a stream is going to read a value."""
        text = f"batch {value.index}" if isinstance(value, FakeBatch) else "input"  # a log must not keep a batch alive
        self.log.append(("hand_over", self[name], text))

    def begin_step(self) -> None:
        """Log the begin of a step."""
        self.log.append(("begin_step", StreamName.COMPUTE, None))

    def do(self, mark: Mark) -> None:
        """Issue a piece of work on the current stream."""
        self.log.append(("do", self._current, mark))
        self.before[mark] = self._known[self._current]
        self._known[self._current] |= {mark}

    def is_before(self, first: Mark, second: Mark) -> bool:
        """Whether streams and events let `second` start only after `first`."""
        return first in self.before[second]


# -- the fakes --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeBatch:
    """A batch: its number, and the modules that it has input for."""

    index: int
    modules: tuple[str, ...] = tuple(FAKE_MODULES)


@dataclass(slots=True)
class FakeModuleInFlight:
    """One batch on its way through one fake module."""

    owners: frozenset[WeightOwner]
    last: Stage = Stage.INPUT_SPLITS_DIST
    received: bool = False
    served: bool = False
    seen: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)

    @property
    def looked_up(self) -> bool:
        """Whether the lookup of all its tables was issued."""
        return self.seen.keys() == self.owners


class Served(NamedTuple):
    """One answer of a fake module to `training_step`."""

    batch: int
    module: str
    owner: WeightOwner
    early: bool
    """From an early lookup, not from the module's own forward."""
    saw: tuple[int, ...]
    """The batches whose updates the lookup saw, oldest first."""


class FakeSparse:
    """Sparse stages without TorchRec: the tables only count the updates they got, lookups note which they saw.

    Raises AssertionError where the stages of one batch come out of order or twice.

    Args:
        modules: Who writes the tables of each module.
        ready: Whether the inputs of the modules are known from the start, not only after the first forward.
        streams: Recording streams, to note the order of device work too.
        lookup_stream: The stream of early lookups.
        observer: Told of every wait.
    """

    def __init__(
        self,
        modules: Mapping[str, frozenset[WeightOwner]] = FAKE_MODULES,
        *,
        ready: bool = True,
        streams: RecordingStreams | None = None,
        lookup_stream: StreamName = StreamName.LOOKUP,
        observer: Observer | None = None,
    ) -> None:
        self.modules = modules
        self.ready = ready
        self.streams = streams or RecordingStreams()
        self.lookup_stream = lookup_stream
        self.fail_at: tuple[Stage, int] | None = None
        self._observe = observer or (lambda kind, stage, index: None)
        self._plain_forward = False
        self._current: InFlightBatch | None = None
        self.clear()

    def clear(self) -> None:
        """Start over with tables that had no update."""
        self.updates: dict[WeightOwner, list[int]] = {owner: [] for owner in EARLY_OWNERS}
        self.stages: dict[int, list[Stage]] = {}
        self.served: list[Served] = []
        self.reads: dict[Mark, tuple[int, ...]] = {}
        self.pending: set[tuple[Stage, int, str]] = set()
        self.forwarded: set[int] = set()

    def begin(self, stage: Stage, batch: int) -> None:
        """Note a stage of a batch, or fail there if told so."""
        if self.fail_at == (stage, batch):
            raise InjectedError(f"told to fail in {stage} of batch {batch}")
        self.stages.setdefault(batch, []).append(stage)

    # -- SparseStages -------------------------------------------------------------------------------------------

    def discover(self, inflight: InFlightBatch) -> bool:
        """Learn the modules' inputs from a forward that was just run."""
        assert not self.ready, "discovery after it is known which input feeds which module"
        assert inflight.index in self.forwarded, f"discovery from batch {inflight.index}, which had no forward"
        self.ready = True
        return True

    @contextmanager
    def forward(self, inflight: InFlightBatch) -> Iterator[None]:
        """Serve early results while a `training_step` runs."""
        assert self._current is None, "a forward inside a forward"
        self._current = inflight
        try:
            yield
        finally:
            self._current = None

    def input_splits_dist(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of sizes."""
        self.begin(Stage.INPUT_SPLITS_DIST, inflight.index)
        assert not inflight.modules, f"{Stage.INPUT_SPLITS_DIST} of batch {inflight.index} a second time"
        for name in inflight.batch.modules:
            inflight.modules[name] = FakeModuleInFlight(self.modules[name])
            self.pending.add((Stage.INPUT_SPLITS_DIST, inflight.index, name))
        self.streams.do(Mark(Stage.INPUT_SPLITS_DIST, inflight.index))

    def input_data_dist(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of ids."""
        self.begin(Stage.INPUT_DATA_DIST, inflight.index)
        if not inflight.modules:
            return
        self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
        for name, state in inflight.modules.items():
            assert state.last is Stage.INPUT_SPLITS_DIST, f"input data dist of batch {inflight.index} a second time"
            state.last = Stage.INPUT_DATA_DIST
            self._complete(Stage.INPUT_SPLITS_DIST, inflight.index, name)
            self.pending.add((Stage.INPUT_DATA_DIST, inflight.index, name))
        self.streams.do(Mark(Stage.INPUT_DATA_DIST, inflight.index))

    def receive_input(self, inflight: InFlightBatch) -> Any:
        """Wait for the ids; return the batch's states."""
        for name, state in inflight.modules.items():
            if state.received:
                continue
            assert state.last is Stage.INPUT_DATA_DIST, f"batch {inflight.index} has had no input data dist"
            self._observe("wait", Stage.INPUT_DATA_DIST, inflight.index)
            self._complete(Stage.INPUT_DATA_DIST, inflight.index, name)
            self.streams.do(Mark(Stage.INPUT_DATA_DIST, inflight.index, name))
            state.received = True
        return list(inflight.modules.values())

    def prefetch(self, inflight: InFlightBatch) -> None:
        """Check that the ids are there."""
        self.begin(Stage.PREFETCH, inflight.index)
        for name, state in inflight.modules.items():
            assert state.received, f"the prefetch of batch {inflight.index} comes before its input"
            assert not state.seen, f"the prefetch of batch {inflight.index} comes after its lookup"
            self.streams.do(Mark(Stage.PREFETCH, inflight.index, name))

    def forget_prefetched(self) -> None:
        """Do nothing: the fake tables have no cache."""

    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool:
        """Whether a module has tables of these owners still to look up."""
        return any(state.owners & owners - state.seen.keys() for state in inflight.modules.values())

    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        """Note which updates the tables of these owners have."""
        self.begin(Stage.EMBEDDING_LOOKUP, inflight.index)
        for name, state in inflight.modules.items():
            assert state.received, f"the lookup of batch {inflight.index} comes before its input"
            for owner in sorted(state.owners & owners, key=str):
                assert owner not in state.seen, f"tables of {owner} looked up twice for batch {inflight.index}"
                state.seen[owner] = self._read(inflight.index, name, owner, nth=0)
            if state.looked_up:
                self.pending.add((Stage.EMBEDDING_LOOKUP, inflight.index, name))

    def drop_lookups(self, inflight: InFlightBatch) -> None:
        """Forget early results, once their collectives are over."""
        self.drain(inflight)
        inflight.modules.clear()

    def count_lookups(self, inflight: InFlightBatch, times: int) -> None:
        """Do nothing: the fake tables count updates only."""

    def drain(self, inflight: InFlightBatch) -> None:
        """Complete every collective that was started for a batch."""
        self.pending -= {(stage, inflight.index, name) for name in inflight.modules for stage in SPARSE_STAGES}

    def take_plain_forward(self) -> bool:
        """Whether a module ran its own forward since the last call."""
        plain, self._plain_forward = self._plain_forward, False
        return plain

    # -- what the fake trainer does with the modules ------------------------------------------------------------

    def call_modules(self, inflight: InFlightBatch) -> None:
        """Do what `training_step` does: call every module once."""
        self.begin(Stage.DENSE_FORWARD, inflight.index)
        self.forwarded.add(inflight.index)
        nth = self._nth(Stage.DENSE_FORWARD, inflight)
        self.streams.do(Mark(Stage.DENSE_FORWARD, inflight.index, nth=nth))
        for name in self.modules:
            state = inflight.modules.get(name)
            early = self._current is not None and state is not None and state.looked_up and not state.served
            if early:
                assert state is not None
                state.served = True
                self._receive_rows(inflight.index, name)
            else:
                self._plain_forward = self._plain_forward or self._current is not None
                self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))
                state = FakeModuleInFlight(self.modules[name])
                for owner in self.modules[name]:
                    state.seen[owner] = self._read(inflight.index, name, owner, nth=1 + nth)
            for owner, saw in state.seen.items():
                self.served.append(Served(inflight.index, name, owner, early, saw))

    def _read(self, index: int, name: str, owner: WeightOwner, nth: int) -> tuple[int, ...]:
        mark = Mark(Stage.EMBEDDING_LOOKUP, index, f"{name}/{owner.value}", nth)
        self.reads[mark] = tuple(self.updates[owner])
        self.streams.do(mark)
        return self.reads[mark]

    def _receive_rows(self, index: int, name: str) -> None:
        self._observe("wait", Stage.EMBEDDING_LOOKUP, index)
        self._complete(Stage.EMBEDDING_LOOKUP, index, name)
        self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup_stream))

    def backward(self, inflight: InFlightBatch) -> None:
        """Update the fused tables, each on the stream where autograd runs it: that of its lookup."""
        self.begin(Stage.BACKWARD, inflight.index)
        nth = self._nth(Stage.BACKWARD, inflight)
        self.updates[WeightOwner.FUSED_BACKWARD].append(inflight.index)
        self.streams.wait(self.lookup_stream, self.streams.record(StreamName.COMPUTE))
        for served in self.served[-sum(map(len, self.modules.values())) :]:
            if served.owner is WeightOwner.FUSED_BACKWARD:
                with self.streams.on(self.lookup_stream if served.early else StreamName.COMPUTE):
                    self.streams.do(Mark(WeightOwner.FUSED_BACKWARD, inflight.index, served.module, nth))

    def step(self, inflight: InFlightBatch) -> None:
        """Update the tables of the dense optimizer."""
        self.begin(Stage.OPTIMIZER_STEP, inflight.index)
        self.updates[WeightOwner.DENSE_OPTIMIZER].append(inflight.index)
        self.streams.do(Mark(WeightOwner.DENSE_OPTIMIZER, inflight.index))

    def _nth(self, stage: Stage, inflight: InFlightBatch) -> int:
        return self.stages[inflight.index].count(stage) - 1

    def _complete(self, stage: Stage, index: int, name: str) -> None:
        assert (stage, index, name) in self.pending, f"waited for {stage} of batch {index}, which is not in flight"
        self.pending.remove((stage, index, name))


@dataclass(slots=True)
class Run:
    """What a run of a fake trainer did."""

    schedule: Schedule
    timeline: Timeline
    stages: dict[int, list[Stage]]
    """Stages of each batch in the order they were done."""
    served: list[Served]
    """Every answer of a module to a `training_step`."""
    updates: dict[WeightOwner, list[int]]
    """Batches whose update the tables have, oldest first."""
    reads: dict[Mark, tuple[int, ...]]
    """Every lookup, early or in a module's own forward, with the batches whose update it saw."""
    streams: RecordingStreams
    trained: list[int] = field(default_factory=list)
    """Batches in the order they were trained."""
    max_in_flight: int = 0
    """Batches alive at once, the one being trained included."""

    def saw(self, batch: int, owner: WeightOwner) -> set[tuple[int, ...]]:
        """Return the updates that lookups of a batch saw: one entry where all modules saw the same."""
        return {served.saw for served in self.served if (served.batch, served.owner) == (batch, owner)}

    def served_early(self, batch: int) -> set[bool]:
        """Return whether the modules got the rows of a batch from early lookups."""
        return {served.early for served in self.served if served.batch == batch}

    def __str__(self) -> str:
        letters = ", ".join(f"{letter} {stage}" for stage, letter in Timeline.LETTERS.items())
        return f"{self.schedule}\n{self.timeline.draw()}\n({letters})"


class FakeTrainer:
    """Drives an executor as the strategy does, over fake batches and a `FakeSparse`.

    Args:
        schedule: The table to walk.
        modules: Who writes the tables of each module.
        ready: Whether the sparse stages know the modules' inputs from the start.
        streams: Takes the place of the device's streams.
        executor_type: A subclass to try.
        rank: Named in errors.
        automatic: Whether the trainer reports each stage; with manual optimization it only knows when all are over.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        modules: Mapping[str, frozenset[WeightOwner]] = FAKE_MODULES,
        ready: bool = True,
        streams: RecordingStreams | None = None,
        executor_type: type[Executor] = Executor,
        rank: int = 0,
        automatic: bool = True,
    ) -> None:
        self.schedule = schedule
        self.automatic = automatic
        self.streams = streams or RecordingStreams()
        lookup = schedule.row(Stage.EMBEDDING_LOOKUP)
        self.sparse = FakeSparse(
            modules,
            ready=ready,
            streams=self.streams,
            lookup_stream=StreamName.COMPUTE if lookup is None else lookup.stream,
            observer=self._observe,
        )
        device: Streams = self.streams
        self.executor = executor_type(schedule, self, self.sparse, device, observer=self._observe, rank=rank)
        self.timeline = Timeline(schedule)
        self._num_batches = self._num_fetched = self._num_begun = self._max_in_flight = 0
        self._alive: WeakSet[FakeBatch] = WeakSet()
        self._hold: Mapping[int, int] = {}

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended."""
        return self._num_fetched >= self._num_batches

    @property
    def certain(self) -> bool:
        """Never: where the data ends is a matter of each run."""
        return False

    @property
    def told_to_stop(self) -> bool:
        """Never: nobody sends it a signal."""
        return False

    def fetch(self) -> tuple[FakeBatch, int, int] | None:
        """Give the executor the next batch: the trainer is its `BatchSource`."""
        index = self._num_fetched
        if index >= self._num_batches or self._hold.get(index, 0) >= self._num_begun:
            return None
        self.sparse.begin(Stage.COPY_BATCH_TO_DEVICE, index)
        self.streams.do(Mark(Stage.COPY_BATCH_TO_DEVICE, index))
        self._num_fetched += 1
        batch = FakeBatch(index, tuple(self.sparse.modules))
        self._alive.add(batch)
        self._max_in_flight = max(self._max_in_flight, len(self._alive))
        return batch, index, 0

    def run(
        self,
        num_batches: int,
        *,
        skip: Collection[int] = (),
        repeat: Collection[int] = (),
        hold: Mapping[int, int] | None = None,
        stop_after: int | None = None,
        fail_at: tuple[Stage, int] | None = None,
    ) -> Run:
        """Train fake batches, then drain.

        Args:
            num_batches: How many there are.
            skip: Batches whose `training_step` returns None: no backward and no step.
            repeat: Batches whose optimizer runs its closure twice, as LBFGS does.
            hold: Batches that the source holds back, each until the iteration given has begun.
            stop_after: Stop after that many batches.
            fail_at: Raise InjectedError in this stage of this batch.

        Raises:
            AssertionError: A batch had its stages out of order, or a collective was still in flight after the drain.
        """
        self.sparse.clear()
        self.sparse.fail_at = fail_at
        self.timeline = Timeline(self.schedule)
        self._num_batches, self._hold = num_batches, {} if hold is None else hold
        self._num_fetched = self._num_begun = self._max_in_flight = 0
        self.streams.before.clear()
        self.streams.do(LOADED_WEIGHTS)
        sparse = self.sparse
        run = Run(
            self.schedule, self.timeline, sparse.stages, sparse.served, sparse.updates, sparse.reads, self.streams
        )
        try:
            while stop_after is None or len(run.trained) < stop_after:
                self._num_begun += 1
                if not self._train_next(run.trained, skip, repeat):
                    break
            self.executor.drain()
        except Exception as err:
            err.add_note(str(run))
            raise
        run.max_in_flight = self._max_in_flight
        assert not sparse.pending, f"still in flight after the drain: {_short(sparse.pending)}\n{run}"
        return run

    def _train_next(self, trained: list[int], skip: Collection[int], repeat: Collection[int]) -> bool:
        inflight = self.executor.next_batch()
        if inflight is None:
            return False
        trained.append(inflight.index)
        for _ in range(2 if inflight.index in repeat else 1):
            with self.executor.forward():
                self.sparse.call_modules(inflight)
            if inflight.index in skip:
                return True
            if self.automatic:
                self.executor.reach(Stage.DENSE_FORWARD)
            self.sparse.backward(inflight)
            if self.automatic:
                self.executor.reach(Stage.BACKWARD)
        self.sparse.step(inflight)
        self.executor.reach(Stage.OPTIMIZER_STEP)
        return True

    def _observe(self, kind: str, stage: Stage, batch: int) -> None:
        self.timeline.record(kind, stage, batch)


def run_schedule(schedule: Schedule, num_batches: int, *, ready: bool = True, **options: Any) -> Run:
    """Train fake batches under a schedule; `options` are those of `FakeTrainer.run`."""
    return FakeTrainer(schedule, ready=ready).run(num_batches, **options)


def random_schedule(random: Random, max_offset: int = 3) -> Schedule:
    """Return a schedule that can run: random row order, offsets and streams.

    Args:
        random: Where chance comes from; with Hypothesis, `st.randoms().map(random_schedule)`.
        max_offset: Largest offset of a row.
    """
    stages = [stage for stage in Stage if stage is not Stage.PREFETCH]  # whose row is bound to that of the lookup
    if random.random() < 0.1:
        stages = [stage for stage in stages if stage not in SPARSE_STAGES]
    early = [stage for stage in stages if stage not in TRAINING_STAGES]
    offsets = sorted((random.randint(0, max_offset) for _ in early), reverse=True)
    streams = [random.choice(list(StreamName)) for _ in early]
    rows = [Step(*row) for row in zip(early, offsets, streams, strict=True)]
    rows += [Step(stage, 0, StreamName.COMPUTE) for stage in TRAINING_STAGES]
    # Any order will do in which rows of the same offset follow the life of a batch.
    order: list[Step] = []
    while rows:
        row = random.choice([row for row in rows if next(other for other in rows if other.offset == row.offset) is row])
        rows.remove(row)
        order.append(row)
    return Schedule("random", tuple(order))


# -- the laws ---------------------------------------------------------------------------------------------------


def check_laws(schedule: Schedule, *, executor_type: type[Executor] = Executor) -> None:
    """Check that a schedule does what it says, over 0 to 2 x depth fake batches.

    1. Each stage of each batch runs once, in order.
    2. No more batches are in flight than the schedule's depth.
    3. The lookup of batch N sees the updates of batches 0 to N - 1 - staleness and no others; tables of the dense
       optimizer are always seen fresh.
    4. Streams and events order every lookup against every update of what it reads, and every stage behind the one
       before it, under every stream that the lookup may stand for.

    Args:
        schedule: A schedule of yours.
        executor_type: A subclass of the executor to try.

    Raises:
        AssertionError: A law is broken; the message has the schedule and a drawing of the run.
    """
    for num_batches in range(2 * schedule.depth + 1):
        for ready in (True, False):
            trainer = FakeTrainer(schedule, ready=ready, executor_type=executor_type)
            run = trainer.run(num_batches)
            check_stages(run, num_batches, ready=ready)
            check_in_flight(run)
            check_staleness(run)
    for lookup in (StreamName.COMPUTE, StreamName.DATA_DIST, StreamName.LOOKUP):
        for ready in (True, False):
            trainer = FakeTrainer(schedule, ready=ready, streams=RecordingStreams(lookup), executor_type=executor_type)
            check_stream_order(trainer.run(2 * schedule.depth + 1))


def check_stages(run: Run, num_batches: int, *, ready: bool = True) -> None:
    """Check law 1. Before discovery (`ready=False`) the first batch takes the modules' own forward."""
    assert run.trained == list(range(num_batches)), f"trained {run.trained} of {num_batches} batches\n{run}"
    for batch in range(num_batches):
        all_early = run.schedule.has_sparse_stages and (ready or batch > 0)
        expected = [
            stage
            for stage in sorted((step.stage for step in run.schedule), key=STAGE_ORDER.__getitem__)
            if all_early or stage not in (*SPARSE_STAGES, Stage.PREFETCH)
        ]
        # A batch may be looked up in two parts, by the owners of the tables; FakeSparse checks that they are two.
        done = [stage for stage, previous in _with_previous(run.stages[batch]) if stage is not previous]
        assert done == expected, f"batch {batch} had {_names(done)}, expected {_names(expected)}\n{run}"
        assert run.served_early(batch) == {all_early}, (
            f"batch {batch} {'was not served from early lookups alone' if all_early else 'was served early'}\n{run}"
        )


def check_in_flight(run: Run) -> None:
    """Check law 2."""
    assert run.max_in_flight <= run.schedule.depth, (
        f"{run.max_in_flight} batches in flight, the depth is {run.schedule.depth}\n{run}"
    )


def check_staleness(run: Run) -> None:
    """Check law 3, for a run in which every batch was looked up early or came before discovery."""
    for served in run.served:
        staleness = run.schedule.staleness if served.owner is WeightOwner.FUSED_BACKWARD else 0
        expected = tuple(batch for batch in run.updates[served.owner] if batch < served.batch - staleness)
        assert served.saw == expected, (
            f"the lookup of batch {served.batch} in tables of {served.owner.value} saw the updates of batches "
            f"{list(served.saw)}, with staleness {staleness} it should see {list(expected)}\n{run}"
        )


def check_stream_order(run: Run) -> None:
    """Check law 4: no stage starts before its input is there, and no table is read while it is written."""
    streams = run.streams
    for mark in streams.before:
        missing = sorted((first for first in _inputs(mark, run) if not streams.is_before(first, mark)), key=str)
        assert not missing, f"no event orders {_text(mark)} behind {', '.join(map(_text, missing))}\n{run}"
    lookups = [mark for mark in streams.before if mark.what is Stage.EMBEDDING_LOOKUP]
    updates = [mark for mark in streams.before if isinstance(mark.what, WeightOwner)]
    for lookup in lookups:
        module, _, owner = lookup.module.partition("/")
        for update in updates:
            if update.what != WeightOwner(owner) or update.module not in ("", module):
                continue
            assert streams.is_before(update, lookup) or streams.is_before(lookup, update), (
                f"no event orders {_text(lookup)} and {_text(update)}: the rows may be read while they are written"
                f"\n{run}"
            )


def _inputs(mark: Mark, run: Run) -> list[Mark]:
    """Return the work that has to be over before a piece of work starts."""
    match mark.what:
        case Stage.INPUT_SPLITS_DIST | Stage.DENSE_FORWARD:
            return [Mark(Stage.COPY_BATCH_TO_DEVICE, mark.batch)]
        case Stage.INPUT_DATA_DIST:
            return [Mark(Stage.INPUT_DATA_DIST if mark.module else Stage.INPUT_SPLITS_DIST, mark.batch)]
        case Stage.PREFETCH:
            return [LOADED_WEIGHTS, Mark(Stage.INPUT_DATA_DIST, mark.batch, mark.module)]
        case Stage.EMBEDDING_LOOKUP:
            module, _, owner = mark.module.partition("/")
            table = module if WeightOwner(owner) is WeightOwner.FUSED_BACKWARD else ""
            saw = run.reads[mark]
            updates = [Mark(WeightOwner(owner), batch, table, saw[:at].count(batch)) for at, batch in enumerate(saw)]
            before = [Stage.INPUT_DATA_DIST, *([] if run.schedule.row(Stage.PREFETCH) is None else [Stage.PREFETCH])]
            own = [] if mark.nth else [Mark(stage, mark.batch, module) for stage in before]
            return [LOADED_WEIGHTS, *updates, *own]
    return []


def _with_previous(stages: Sequence[Stage]) -> list[tuple[Stage, Stage | None]]:
    """Pair each stage with the one before it where that was a part of the same lookup."""
    parts = (None, *stages)
    return [(now, last if last is Stage.EMBEDDING_LOOKUP else None) for last, now in zip(parts, stages, strict=False)]


def _names(stages: Sequence[Stage]) -> str:
    return " ".join(map(str, stages)) or "nothing"


def _text(mark: Mark) -> str:
    if mark == LOADED_WEIGHTS:
        return "the load of the weights before the run"
    what = f"the update by {mark.what.value}" if isinstance(mark.what, WeightOwner) else str(mark.what)
    return f"{what} of batch {mark.batch}" + (f" ({mark.module})" if mark.module else "")


def _short(pending: Collection[tuple[Stage, int, str]]) -> str:
    return ", ".join(sorted(f"{stage} of batch {batch} ({module})" for stage, batch, module in pending))
