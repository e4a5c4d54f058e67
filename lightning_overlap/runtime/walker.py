"""Walk a schedule: run its rows around the trainer's own forward, backward and optimizer step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from ..compat.torch import call_after_backward, is_profiled
from ..distributed import Consensus
from ..schedules import TRAINING_STAGES, Schedules, Stage, Step, StreamName, WeightOwner
from .batches import Batches, abandon
from .deferred_updates import DeferredUpdates
from .flight import Flight, ModulePart
from .interfaces import BatchSource, SparseStages, WeightGradients
from .run_ahead import RunAhead
from .streams import Made, Streams
from .table_writes import NUM_POLLS, TableWrites
from .telemetry import Telemetry


class Walker:
    """Walks a schedule: every row runs on the calling thread, at the same point on every rank.

    The trainer drives it: `next_batch()` begins an iteration, `forward()` goes around `training_step`, and
    `after(stage)` says that the trainer has done a stage. `run_row` is the only function that runs a row, wherever it
    is called from: between two stages of the trainer, inside the forward, or inside the backward.
    """

    def __init__(
        self,
        schedule: Schedules,
        source: BatchSource,
        sparse: SparseStages,
        streams: Streams,
        telemetry: Telemetry,
        *,
        consensus: Consensus | None = None,  # None on one rank
        lookup_context: Callable[[], AbstractContextManager[Any]] = nullcontext,  # autocast, as for `training_step`
        num_before: Callable[[], int] = lambda: 0,  # batches trained so far, over all epochs
        any_rank: Callable[[bool], bool] = bool,  # whether any rank passed True: an all-reduce on the host
        hooks_run_after: Callable[[Stage], bool] = lambda stage: False,  # whether hooks of the user run next
        max_queued_steps: int | None = None,  # how many steps the host may queue on the device; None: any number
        weight_gradients: WeightGradients | None = None,  # None if the backward computes them
    ) -> None:
        self._schedules, self._sparse = schedule, sparse
        self._streams, self._telemetry = streams, telemetry
        self._lookup_context, self._num_before = lookup_context, num_before
        self._hooks_run_after, self._weight_gradients = hooks_run_after, weight_gradients
        self._first_batch = num_before()  # number of this epoch's batch 0 over all epochs
        self._trainer_stage: ExitStack | None = None  # the trainer's present stage, if it is profiled or timed
        self._run_ahead = RunAhead(streams, max_queued_steps)
        first = schedule.at(self._first_batch)
        trains = Stage.BACKWARD in first.training_stages
        self.batches = Batches(
            source,
            sparse.make_flight,
            consensus,
            schedule.depth,
            streams,
            telemetry,
            self._run_ahead,
            make_padding=None if trains else sparse.make_padding,
        )
        self.updates = DeferredUpdates(sparse, streams, telemetry)
        # An evaluation keeps the mode that it runs in: no_grad or inference_mode.
        self._grad_mode: Callable[[], AbstractContextManager[Any]] = torch.enable_grad if trains else nullcontext
        self.writes = TableWrites(
            sparse if first.has_sparse_stages else None,
            self.updates,
            self.batches,
            streams,
            any_rank=None if consensus is None else any_rank,
            num_polls=NUM_POLLS if trains else 0,
            rank=telemetry.rank,
        )
        self.schedule = first  # the table that is walked
        self._reset()

    def _reset(self) -> None:
        self._begin_trainer_stage(None)
        self._iteration = -1
        self._cursor = len(self.schedule.steps)  # the row of the schedule that comes next
        self._finished_backward = False  # whether BACKWARD has ended before the trainer reports it
        self._in_forward = False  # of `training_step`, which with manual optimization contains all stages
        # Rows that wait for `discover`, each with its batch and the owners of the tables.
        self._postponed: list[tuple[Step, Flight, frozenset[WeightOwner]]] = []
        self._began: list[Any] = []  # events after all work of earlier iterations, for prefetches
        self._run_ahead.reset()
        self.batches.reset()
        self.updates.reset()
        self.writes.reset()

    # What a trainer and its strategy read.

    @property
    def num_trained(self) -> int:
        """Batches handed to the trainer so far."""
        return self._iteration + 1

    @property
    def place(self) -> str:
        """The trainer's place in the schedule, in words."""
        if self._iteration < 0:
            return "before the first batch"
        if self._cursor == len(self.schedule.steps):
            return f"after batch {self._iteration}"
        row = self.schedule.steps[self._cursor]
        return f"at {row.stage} of batch {self._iteration + row.offset}"

    @property
    def num_in_flight(self) -> int:
        """Batches fetched whose step is not over, or whose update of the tables is still to come."""
        return len(self.batches.in_flight.keys() | self.updates.to_update)

    @property
    def is_last(self) -> bool:
        """Whether the current batch is known to be the last one, on all ranks."""
        return self.batches.is_last(self._iteration)

    # The trainer's step.

    def next_batch(self) -> Flight | None:
        """Begin the next iteration; return its batch, or None if the data of any rank has ended."""
        self._streams.begin_step()
        if self.schedule.prefetches:
            names, before = (StreamName.COMPUTE, self._streams.lookup), self._began or (None, None)
            self._began = [self._streams.record(name, again=event) for name, event in zip(names, before, strict=True)]
        if self._iteration < 0:
            self._begin_epoch()
        else:
            self._end_iteration()
            self.writes.begin_iteration()
        self._iteration += 1
        self._cursor = 0
        self.updates.begin_iteration()
        self._run_to_next_stage()
        if self._iteration not in self.batches.in_flight and self._iteration not in self.batches.polls:
            # `max_steps` may have held it back until now. What the ranks have polled for is not fetched again.
            self.batches.fetch(self.schedule[Stage.COPY_BATCH_TO_DEVICE], self._iteration)
        current = self.batches.current = self.batches.get(self._iteration)
        if current is not None:
            self._streams.use(current.issued[Stage.COPY_BATCH_TO_DEVICE], on=StreamName.COMPUTE)
        return current

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Go around the `training_step` of the current batch."""
        current = self.batches.current
        assert current is not None, "next_batch() comes first"
        self._telemetry.observe("issue", Stage.DENSE_FORWARD, current.index)
        if current.consumed:
            self.updates.make_all()  # a second forward (LBFGS) sees the update of the first forward's backward
        else:
            self.writes.check()
        if self._weight_gradients is not None:  # a second forward of a batch has a backward of its own
            self._weight_gradients.begin_step(splits=self.schedule.splits_backward and not current.consumed)
        current.consumed = True
        self._begin_trainer_stage(Stage.DENSE_FORWARD)
        self._in_forward = True
        try:
            with current.serve(self._send_next):
                yield
        finally:
            self._in_forward = False
            if self._weight_gradients is not None:
                self._weight_gradients.end_forward()
            self._begin_trainer_stage(None)

    def _send_next(self) -> None:
        """Run the rows right below the forward, which send sizes and ids, inside it."""
        for row in self.schedule.sends_after_forward:
            self.run_row(row)

    def begin_backward(self, loss: torch.Tensor, *, is_only: bool) -> None:
        """Begin the backward of the current batch's loss; `is_only`: the step's only one (automatic optimization)."""
        if self.batches.current is None:
            return
        if self._hooks_run_after(Stage.DENSE_FORWARD):
            self.updates.order_compute()  # after a deferred one, which overlaps with the backward
        if is_only and self._weight_gradients is not None:
            self._weight_gradients.begin_backward(loss)
        # The user's on_after_backward comes before the trainer says that the backward is over.
        if is_only and self.schedule.updates_before_step:
            end = self._finish_backward
        elif self._streams.is_async:
            end = self.wait_for_lookups
        else:
            return
        if loss.requires_grad and self._hooks_run_after(Stage.BACKWARD):
            loss.register_hook(lambda _: call_after_backward(end))

    def _finish_backward(self) -> None:
        with torch.enable_grad():  # a backward turns it off
            self.after(Stage.BACKWARD)
        self.wait_for_lookups()
        self._finished_backward = True

    def after(self, stage: Stage) -> None:
        """Run the rows up to the trainer's next stage; if it has skipped a stage, also the rows above `stage`."""
        current = self.batches.current
        if stage is Stage.BACKWARD and self._finished_backward:
            self._finished_backward = False
            return
        if current is None:
            return
        if stage is Stage.DENSE_FORWARD and self._in_forward:  # a backward within the step (manual optimization)
            current.end_phase()
        position = self.schedule.position(stage)
        if stage is Stage.DENSE_FORWARD and self._in_forward and self._cursor <= position:
            self._discover_in_step(current)
        if self._cursor > position:
            if stage is Stage.BACKWARD and self.schedule.has_sparse_stages:
                self._end_backward(current)
                for flight in self.batches.ahead():  # a second backward (LBFGS) has written the tables again
                    flight.drop()
            return
        self._begin_trainer_stage(None)
        while self._cursor <= position:
            row = self.schedule.steps[self._cursor]
            if row.stage not in TRAINING_STAGES:  # left to a backward that did not wait for other ranks
                self.run_row(row)
                self._cursor += 1
                continue
            self._end_stage(row.stage, current)
            self._cursor += 1
            self._run_to_next_stage()
        if stage is Stage.BACKWARD and self._weight_gradients is not None and self.schedule.splits_backward:
            self._weight_gradients.finish()
        if stage is not self.schedule.training_stages[-1]:
            self._begin_trainer_stage(TRAINING_STAGES[TRAINING_STAGES.index(stage) + 1])

    def _end_stage(self, stage: Stage, current: Flight) -> None:
        """Do what follows a stage of the trainer before the rows below it."""
        if stage is not Stage.DENSE_FORWARD:
            self._telemetry.observe("issue", stage, self._iteration)
        if not self.schedule.has_sparse_stages:
            return
        if stage is Stage.BACKWARD:
            self._end_backward(current)
            return
        if current.consumed and not self._in_forward:
            self._discover(current)
        if stage is Stage.OPTIMIZER_STEP:
            self.updates.num_stepped = self._iteration + 1
            # Code between two steps (a callback's averages, clamps, norms) finds the tables written.
            self.updates.order_compute()
            self._look_up_dense_tables()

    def _end_backward(self, current: Flight) -> None:
        current.ran_unpipelined = False
        self.updates.num_updated = self._iteration + 1
        if current.defers_update:
            self.updates.start(current)
            if not self.schedule.defers_update:
                self.updates.make_all()  # looked up under the former table
        current.end_backward()
        self.updates.note_update()

    def _begin_trainer_stage(self, stage: Stage | None) -> None:
        """Tell profiler and timer that the trainer's present stage has ended and that another begins."""
        if self._trainer_stage is not None:
            self._trainer_stage.close()
            self._trainer_stage = None
        if stage is not None and (is_profiled() or self._telemetry.timer is not None):
            self._trainer_stage = ExitStack()
            self._trainer_stage.enter_context(self._telemetry.stage(stage, self._iteration))
            self._trainer_stage.enter_context(self._telemetry.timed(stage, self._iteration, StreamName.COMPUTE))

    # Epochs and iterations.

    def _begin_epoch(self) -> None:
        self._first_batch = self._num_before()
        self.schedule = self._schedules.at(self._first_batch)
        # Weights may have been loaded or changed on the compute stream since the last run.
        start = self._streams.record(StreamName.COMPUTE)
        for stream in {row.stream for row in self.schedule} | {self._streams.lookup}:
            self._streams.wait(stream, start)
        self._fill(0)

    def _end_iteration(self) -> None:
        self.after(self.schedule.training_stages[-1])
        self._run_ahead.end_step()
        self.batches.in_flight.pop(self._iteration, None)
        self.batches.current = None
        schedule = self._schedules.at(self._first_batch + self._iteration + 1)
        if schedule is not self.schedule:
            self.updates.make_all()
            self.schedule = schedule
            self._fill(self._iteration + 1)

    def _fill(self, start: int) -> None:
        """Run what the table would have run before iteration `start`, unless the former table has run it."""
        for iteration in range(start - self.schedule.max_offset, start):
            self._iteration = iteration
            for row in self.schedule.steps:
                if row.stage is Stage.OPTIMIZER_STEP:
                    self._look_up_dense_tables()
                elif row.stage not in TRAINING_STAGES:
                    self.run_row(row)
        self._iteration = start - 1

    # Rows.

    def _run_to_next_stage(self) -> None:
        """Run the rows from the cursor to the trainer's next stage, except those left to the backward."""
        rows, left = self.schedule.steps, self.schedule.rows_in_backward_wait
        while self._cursor < len(rows) and (row := rows[self._cursor]).stage not in TRAINING_STAGES:
            if self._cursor in left and self._leave_to_backward(row.stage):
                return
            self.run_row(row)
            self._cursor += 1

    def _leave_to_backward(self, stage: Stage) -> bool:
        """Let the current backward run the rows from `stage` on, if the host would wait there for other ranks."""
        current, index = self.batches.current, self._iteration
        # The backward of a module's own forward may write tables before it waits.
        if current is None or current.ran_unpipelined:
            return False

        def run_once_there() -> None:
            if self.batches.current is not None and self._iteration == index:  # some hooks outlive their backward
                with torch.enable_grad():  # a backward turns it off
                    while self._cursor in self.schedule.rows_in_backward_wait:
                        self.run_row(self.schedule.steps[self._cursor])
                        self._cursor += 1

        return current.run_in_backward(stage, run_once_there)

    def run_row(self, row: Step) -> None:
        """Run a row for its batch, unless all ranks lack the batch or it has been run for it."""
        stage, index = row.stage, self._iteration + row.offset
        if index < 0:
            return
        if stage is Stage.COPY_BATCH_TO_DEVICE:
            self.batches.fetch(row, index)
        elif stage is Stage.EMBEDDING_UPDATE:
            overlaps_dense = self.schedule.updates_before_step
            after_part = self._look_up_part if overlaps_dense and not self._streams.is_async else None
            self.updates.make_up_to(index, row, overlaps_dense=overlaps_dense, after_part=after_part)
        elif stage is Stage.WEIGHT_GRADIENTS:
            if self._weight_gradients is not None:
                self._telemetry.observe("issue", stage, index)
                with self._telemetry.stage(stage, index), self._telemetry.timed(stage, index, row.stream):
                    self._weight_gradients.compute()
        elif (flight := self.batches.get(index)) is not None:
            self._run_sparse(row, flight, self.schedule.lookup_owners)

    def _look_up_dense_tables(self) -> None:
        """Look up the tables of the dense optimizer for the next batch, if they need a lookup of their own."""
        row = self.schedule.dense_owned_lookup
        if row is not None and (flight := self.batches.get(self._iteration + row.offset)) is not None:
            self._run_sparse(row, flight, frozenset({WeightOwner.DENSE_OPTIMIZER}))

    def _look_up_part(self, module: str, part: int) -> None:
        """Look up an updated part of a module for the next batch, while gradients of other parts are under way."""
        row = self.schedule[Stage.EMBEDDING_LOOKUP]
        if (flight := self.batches.get(self._iteration + row.offset)) is not None:
            self._run_sparse(row, flight, frozenset({WeightOwner.FUSED_BACKWARD}), (module, part))

    def _run_sparse(
        self, row: Step, flight: Flight, owners: frozenset[WeightOwner], only: ModulePart | None = None
    ) -> None:
        """Run a sparse stage on the stream of its row, after all that it reads; postpone it until `_discover`."""
        stage, streams = row.stage, self._streams
        if not self._sparse.ready:
            self._postponed.append((row, flight, owners))
            return
        if stage is Stage.EMBEDDING_LOOKUP:
            if not flight.needs_lookup(owners):
                return
        elif stage in flight.issued:  # run under the former table, or inside the forward
            return
        previous = self.schedule.stage_before(stage)
        if previous not in flight.issued:  # the batch was fetched later than that row was walked
            self._run_sparse(self.schedule[previous], flight, owners)
        self._telemetry.observe("issue", stage, flight.index)
        with self._telemetry.stage(stage, flight.index):
            sends = stage in (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST)
            if not sends:
                self._receive_ids(flight)
            for needed in {previous} if sends else {Stage.INPUT_DATA_DIST, previous}:
                streams.use(flight.issued[needed], on=row.stream)
            if stage is Stage.PREFETCH:
                self._order_prefetch(row)
            with streams.on(row.stream), self._telemetry.timed(stage, flight.index, row.stream):
                if stage is Stage.INPUT_SPLITS_DIST:
                    flight.send_sizes()
                elif stage is Stage.INPUT_DATA_DIST:
                    flight.send_ids()
                elif stage is Stage.PREFETCH:
                    flight.prefetch()
                else:
                    self._order_lookup(row, flight, owners)
                    with self._grad_mode(), self._lookup_context():
                        flight.look_up(owners, only)
        if not sends:
            # The lookup has the ids that it needs; others are free.
            sent = flight.issued[Stage.INPUT_DATA_DIST]
            flight.issued[Stage.INPUT_DATA_DIST] = replace(sent, value=None, memory=None)
        if stage is Stage.PREFETCH:
            flight.issued[stage] = streams.made(None, row.stream)
        else:
            # Ids are sent from the batch's own memory. The next stage is on the same stream, or uses what it receives.
            flight.issued[stage] = Made(flight.batch if sends else None, row.stream)

    def _receive_ids(self, flight: Flight) -> None:
        """Assemble the received ids on the input dist's stream."""
        stage = Stage.INPUT_DATA_DIST
        sent = flight.issued[stage]
        with self._streams.on(sent.on), self._telemetry.timed(stage, flight.index, sent.on):
            received = flight.receive_ids()
        if flight.ids_received:  # for an earlier row: nothing was assembled now
            flight.issued[stage] = replace(sent, value=received, memory=None)
        else:
            flight.issued[stage] = Made(received, sent.on)  # used at once
            flight.ids_received = True

    def _order_prefetch(self, row: Step) -> None:
        """Let a prefetch wait for other work on a cache than early lookups and updates, which FBGEMM itself orders."""
        for event in self._began:
            self._streams.wait(row.stream, event)
        current = self.batches.current
        if current is not None and current.ran_unpipelined:
            self._streams.order(self._streams.lookup, then=row.stream)

    def _order_lookup(self, row: Step, flight: Flight, owners: frozenset[WeightOwner]) -> None:
        """Let a lookup wait for the last writers of its tables."""
        # Fused tables: the TBE backward ran on this stream. Tables of the dense optimizer: its step was issued on the
        # compute stream.
        if WeightOwner.DENSE_OPTIMIZER in owners:
            self._streams.order(StreamName.COMPUTE, then=row.stream)
        if WeightOwner.FUSED_BACKWARD in owners:
            self.updates.note_lookup(flight, defers=self.schedule.defers_update)

    def _discover_in_step(self, current: Flight) -> None:
        """Do so before the first backward of a manual step, which updates tables, if all modules were called."""
        if self.schedule.has_sparse_stages and not self._sparse.ready and self._sparse.all_called():
            self._discover(current)

    def _discover(self, current: Flight) -> None:
        """Learn from the current batch's forward which input feeds which module; run the postponed rows."""
        if self._sparse.ready:
            return
        self._sparse.discover(current)
        postponed, self._postponed = self._postponed, []
        for row, flight, owners in postponed:
            if flight.index > current.index:
                self._run_sparse(row, flight, owners)

    # Between steps, and at the end.

    def wait_for_lookups(self) -> None:
        """Let the compute stream wait for everything on the lookup stream: reads and writes of tables."""
        self._streams.order(self._streams.lookup, then=StreamName.COMPUTE)

    def drain(self) -> None:
        """Drop the batches that were fetched ahead; complete their collectives, on all ranks alike."""
        self.updates.make_all()
        for poll in self.batches.polls.values():
            poll.wait()
        ahead = self.batches.ahead()
        self._reset()
        for flight in ahead:
            flight.drain()
            flight.drop()
        self._sparse.forget_prefetched()

    @contextmanager
    def without_lookups_ahead(self) -> Iterator[None]:
        """Within this context the kernels do not count lookups of batches whose optimizer step is to come."""
        self._count_lookups_ahead(-1)
        try:
            yield
        finally:
            # For a save, which reads the counts on the compute stream.
            self._streams.order(StreamName.COMPUTE, then=self._streams.lookup)
            self._count_lookups_ahead(1)

    def _count_lookups_ahead(self, times: int) -> None:
        for flight in self.batches.ahead():
            flight.count_lookups(times)

    def abandon(self) -> None:
        """Drop everything in flight at once, without a collective: another rank may be gone."""
        with suppress(RuntimeError):  # a broken device must not hide what broke it
            self._count_lookups_ahead(-1)
            self._sparse.forget_prefetched()
        flights = [*self.batches.in_flight.values(), *self.updates.to_update.values()]
        held = [one for flight in flights for one in flight.abandon()]
        # NCCL's collectives hold no memory that Python owns, and a device's memory has to come back at once.
        abandon([*self.batches.polls.values(), *([] if self._streams.is_async else held)])
        self._reset()
