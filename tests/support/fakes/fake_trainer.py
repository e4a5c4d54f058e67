"""A trainer that drives an walker over fake batches."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from weakref import WeakSet

from lightning_overlap.runtime import FetchedBatch, Observer, StageTimer, Telemetry, Walker
from lightning_overlap.schedules import Schedule, Stage, StreamName, WeightOwner

from .fake_sparse import FakeSparse, Served, cache, table
from .recording import FAKE_MODULES, FakeBatch, Mark, RecordingStreams, Timeline


@dataclass(slots=True)
class Run:
    schedule: Schedule
    timeline: Timeline
    stages: dict[int, list[Stage]]
    served: list[Served]
    updates: dict[WeightOwner, list[int]]  # batches whose update the tables have, oldest first
    streams: RecordingStreams
    trained: list[int] = field(default_factory=list)
    max_in_flight: int = 0  # batches alive at once, the trained one included

    def saw(self, batch: int, owner: WeightOwner) -> set[tuple[int, ...]]:
        return {served.saw for served in self.served if (served.batch, served.owner) == (batch, owner)}

    def served_early(self, batch: int) -> set[bool]:
        return {served.early for served in self.served if served.batch == batch}

    def __str__(self) -> str:
        letters = ", ".join(f"{letter} {stage}" for stage, letter in Timeline.LETTERS.items())
        return f"{self.schedule}\n{self.timeline.draw()}\n({letters})"


class FakeTrainer:
    """Drives an walker as the strategy does, over fake batches and a `FakeSparse`.

    With `automatic` it reports each stage; with manual optimization it only knows when all are over.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        modules: Mapping[str, frozenset[WeightOwner]] = FAKE_MODULES,
        ready: bool = True,
        streams: RecordingStreams | None = None,
        walker_type: type[Walker] = Walker,
        sparse_type: type[FakeSparse] = FakeSparse,
        rank: int = 0,
        automatic: bool = True,
        left_from: Collection[Stage] = (),
        max_queued_steps: int | None = None,
    ) -> None:
        self.schedule = schedule
        self.automatic = automatic
        self.streams = streams or RecordingStreams()
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        stream = StreamName.COMPUTE if lookup is None else lookup.stream
        observe: Observer = lambda *event: self.timeline.record(*event)  # noqa: E731
        self.sparse = sparse_type(modules, ready, self.streams, stream, observe, left_from)
        self.streams.lookup = stream
        telemetry = Telemetry(observe, rank)
        self.walker = walker_type(
            schedule,
            self,
            self.sparse,
            self.streams,
            telemetry,
            weight_gradients=self,
            max_queued_steps=max_queued_steps,
        )
        self.timeline = Timeline(schedule)
        self._num_batches = self._num_fetched = self._num_begun = self._max_in_flight = 0
        self._alive: WeakSet[FakeBatch] = WeakSet()
        self._hold: Mapping[int, int] = {}

    @property
    def exhausted(self) -> bool:
        return self._num_fetched >= self._num_batches

    num_batches, num_certain = float("inf"), 0
    length_known = False  # where the data ends is a matter of each run
    stop_requested = save_requested = False  # nobody sends it a signal

    def fetch(self, index: int, timer: StageTimer | None) -> FetchedBatch | None:
        if index >= self._num_batches or self._hold.get(index, 0) >= self._num_begun:
            return None
        self.sparse.begin(Stage.COPY_BATCH_TO_DEVICE, index)
        self._num_fetched += 1
        batch = FakeBatch(index, tuple(self.sparse.modules))
        self.streams.do(Mark(Stage.COPY_BATCH_TO_DEVICE, index), makes=batch.memory)
        self._alive.add(batch)
        self._max_in_flight = max(self._max_in_flight, len(self._alive))
        return FetchedBatch(batch, index, 0)

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """The trainer is the walker's `WeightGradients` too, whose other methods have nothing to do."""

    begin_step = end_forward = begin_backward = finish = _nothing

    def compute(self) -> None:
        assert self.walker.batches.current is not None
        batch = self.walker.batches.current.index
        if Stage.BACKWARD in self.sparse.stages[batch]:
            self.sparse.begin(Stage.WEIGHT_GRADIENTS, batch)
        self.streams.do(Mark(Stage.WEIGHT_GRADIENTS, batch))

    def run(
        self,
        num_batches: int,
        *,
        skip: Collection[int] = (),  # their `training_step` returns None
        repeat: Collection[int] = (),  # their optimizer runs its closure twice, as LBFGS does
        hold: Mapping[int, int] = MappingProxyType({}),  # the source has each only once this iteration has begun
        stop_after: int | None = None,
        fail_at: tuple[Stage, int] | None = None,  # raises an InjectedError
    ) -> Run:
        """Train fake batches, then drain; raise an AssertionError if a collective is still in flight after it."""
        self.sparse.clear()
        self.sparse.fail_at = fail_at
        self.timeline = Timeline(self.schedule)
        self._num_batches, self._hold = num_batches, hold
        self._num_fetched = self._num_begun = self._max_in_flight = 0
        self.walker.wait_for_lookups()  # as the strategy does at the end of a run
        sparse = self.sparse
        self.streams.do(Mark("the load of the weights", -1), writes=[*self.tables, sparse.loaded])
        run = Run(self.schedule, self.timeline, sparse.stages, sparse.served, sparse.updates, self.streams)
        try:
            while stop_after is None or len(run.trained) < stop_after:
                self._num_begun += 1
                if not self._train_next(run.trained, skip, repeat):
                    break
            self.walker.drain()
        except Exception as err:
            err.add_note(str(run))
            raise
        run.max_in_flight = self._max_in_flight
        left = sorted(f"{stage} of batch {batch} ({module})" for stage, batch, module in sparse.pending)
        assert not left, f"still in flight after the drain: {', '.join(left)}\n{run}"
        return run

    def _train_next(self, trained: list[int], skip: Collection[int], repeat: Collection[int]) -> bool:
        flight = self.walker.next_batch()
        if flight is None:
            return False
        trained.append(flight.index)
        for _ in range(2 if flight.index in repeat else 1):
            with self.walker.forward():
                self.sparse.call_modules(flight)
            if flight.index in skip:
                return True
            if self.automatic:
                self.walker.after(Stage.DENSE_FORWARD)
            self.sparse.backward(flight)
            if self.automatic:
                self.walker.after(Stage.BACKWARD)
        self.sparse.step(flight)
        self.walker.after(Stage.OPTIMIZER_STEP)
        self.streams.do(Mark("a callback after the step", flight.index), reads=self.tables)
        if flight.index == self._num_batches // 2:
            self.walker.updates.make_all()  # as the strategy does
            self.streams.do(Mark("a reader of updated tables", flight.index), reads=self.tables)
            self.walker.wait_for_lookups()  # as a module's own forward does
            caches = [cache(name) for name in self.sparse.modules]
            self.streams.do(Mark("an evaluation after the step", flight.index), reads=self.tables, writes=caches)
        return True

    @property
    def tables(self) -> list[str]:
        return [table(name, owner) for name, owners in self.sparse.modules.items() for owner in owners]
