"""Issue one sparse stage of one batch on its stream, after everything it reads, once module inputs are known."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..schedules import Schedule, Stage, Step, StreamName, WeightOwner
from .batch_queue import BatchQueue
from .deferred_updates import DeferredUpdates
from .interfaces import InFlightBatch, Inputs, Lookups, ModulePart
from .lookup_order import LookupOrder
from .profiler_ranges import InStage


class StageIssuer:
    """Issues the sparse stages of batches; every lookup runs within both `lookup_contexts`: grad mode and autocast."""

    def __init__(
        self,
        inputs: Inputs,
        lookups: Lookups,
        order: LookupOrder,
        updates: DeferredUpdates,
        queue: BatchQueue,
        lookup_contexts: tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]],
    ) -> None:
        self._inputs, self._lookups, self._updates, self._queue = inputs, lookups, updates, queue
        self._order, self._streams = order, order.streams
        self._grad_mode, self._lookup_context = lookup_contexts
        self.schedule: Schedule  # the table that is walked; the executor sets it before anything is issued
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self._waiting: list[tuple[Step, InFlightBatch, frozenset[WeightOwner]]] = []  # for `discover`
        self._began: list[Any] = []  # events after what both streams that use a cache were given before this iteration

    def begin_iteration(self) -> None:
        """Record events after the work of all iterations before, for prefetches."""
        if self.schedule.prefetches:
            self._began = [self._streams.record(name) for name in (StreamName.COMPUTE, self._order.lookup)]

    def issue(
        self, step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner], only: ModulePart | None = None
    ) -> None:
        """Issue a stage of a batch, or postpone it until `discover`; look up tables of `owners`, or a part `only`."""
        stage = step.stage
        if not self._inputs.ready:
            self._waiting.append((step, inflight, owners))
            return
        if stage is Stage.EMBEDDING_LOOKUP:
            if not self._lookups.has_lookup(inflight, owners):
                return
        elif stage in inflight.done:  # issued under the former table
            return
        previous = self.schedule.stage_before(stage)
        if previous not in inflight.done:  # the batch was fetched later than that step was walked
            self.issue(self.schedule[previous], inflight, owners)
        self._order.observe("issue", stage, inflight.index)
        with InStage(stage, inflight.index, self._order.rank):
            if stage not in (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST):
                self.receive_input(step, inflight)
            if stage is Stage.PREFETCH:
                self._order_prefetch(step)
            self.acquire(inflight, step.stream, previous)
            if stage is not Stage.EMBEDDING_LOOKUP and inflight.done[previous][0] is not step.stream:
                self._streams.record_stream(inflight.batch, step.stream)  # the ids are sent from the batch's own memory
            with self._order.on(stage, inflight.index, step.stream):
                if stage is Stage.INPUT_SPLITS_DIST:
                    self._inputs.input_splits_dist(inflight)
                elif stage is Stage.INPUT_DATA_DIST:
                    self._inputs.input_data_dist(inflight)
                elif stage is Stage.PREFETCH:
                    self._lookups.prefetch(inflight)
                else:
                    self._look_up(step, inflight, owners, only)
        inflight.done[stage] = (step.stream, self._streams.record(step.stream))

    def discover(self, current: InFlightBatch) -> None:
        """Learn from the current batch's forward which input feeds which module; issue the postponed stages."""
        if self._inputs.ready:
            return
        self._inputs.discover(current)
        waiting, self._waiting = self._waiting, []
        for step, inflight, owners in waiting:
            if inflight.index > current.index:
                self.issue(step, inflight, owners)

    def receive_input(self, step: Step, inflight: InFlightBatch) -> None:
        """Assemble the received ids on the input dist's stream, for the stream of `step`, which reads them next."""
        stream, _ = inflight.done[Stage.INPUT_DATA_DIST]
        with self._order.on(Stage.INPUT_DATA_DIST, inflight.index, stream):
            received = self._inputs.receive_input(inflight)
        inflight.done[Stage.INPUT_DATA_DIST] = (stream, self._streams.record(stream))
        self._streams.record_stream(received, step.stream)

    def acquire(self, inflight: InFlightBatch, stream: StreamName, stage: Stage) -> None:
        """Let `stream` wait for a stage of a batch that was issued on another stream."""
        producer, event = inflight.done[stage]
        if producer is not stream:
            self._streams.wait(stream, event)

    def _order_prefetch(self, step: Step) -> None:
        """Let a prefetch wait for other work on a cache than early lookups and updates, which FBGEMM itself orders."""
        for event in self._began:
            self._streams.wait(step.stream, event)
        current = self._queue.current
        if current is not None and current.ran_unpipelined:
            self._streams.wait(step.stream, self._streams.record(self._order.lookup))

    def _look_up(
        self, step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner], only: ModulePart | None
    ) -> None:
        # Fused tables: the TBE backward ran on this stream. Tables of the dense optimizer: its step was issued on the
        # compute stream.
        if WeightOwner.DENSE_OPTIMIZER in owners:
            self._streams.wait(step.stream, self._streams.record(StreamName.COMPUTE))
        if WeightOwner.FUSED_BACKWARD in owners:
            self._updates.note_lookup(inflight, defers=self.schedule.defers_update)
        with self._grad_mode(), self._lookup_context():
            self._lookups.embedding_lookup(inflight, owners, only)
