"""Walk a schedule: the one place that decides when a stage is issued and what its stream waits for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from ..distributed import ASK_FOR_LAST, Answer, Consensus, PollInterval, StepFlags
from ..schedules import (
    BEFORE,
    BEFORE_WITH_PREFETCH,
    EARLY_OWNERS,
    TRAINING_STAGES,
    Schedule,
    SequentialSchedule,
    Stage,
    Step,
    StreamName,
    WeightOwner,
)
from .inflight import InFlightBatch, abandon
from .interfaces import BatchSource, Observer, SparseStages, StageTimer, timed
from .profiler_ranges import InStage, TrainerStage
from .streams import HostStreams, Streams


class Executor:
    """Runs the rows of a schedule around the trainer's own forward, backward and step.

    The trainer drives it: `next_batch()` begins an iteration and returns the batch to train; `forward()` goes
    around `training_step`; `reach(stage)` says that the trainer has done a stage. All rows run on the calling
    thread, at the same point of the step on every rank.

    Args:
        schedule: The table to walk, or several that follow one another.
        source: Gives the batches.
        sparse: Does the sparse stages, where the schedule has them; None: its sparse rows are skipped.
        streams: The device's streams.
        consensus: Asks all ranks whether they have the next batch too; None on one rank.
        lookup_context: Entered around every early lookup (autocast, as around `training_step`).
        observer: Told of every issue and wait.
        rank: Named in errors.
        num_before: Tells how many batches the training has had before the one that comes next.
        any_rank: Asks all ranks whether one of them says so, on the host; all of them wait for the answer.
        hooks_read_tables: Whether something of the user's runs between the backward and the end of the step.
    """

    def __init__(
        self,
        schedule: Schedule | SequentialSchedule,
        source: BatchSource,
        sparse: SparseStages | None,
        streams: Streams,
        *,
        consensus: Consensus | None = None,
        lookup_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        observer: Observer | None = None,
        rank: int = 0,
        num_before: Callable[[], int] = lambda: 0,
        any_rank: Callable[[bool], bool] = bool,
        hooks_read_tables: bool = False,
    ) -> None:
        self._schedules = schedule
        self._num_before = num_before
        self._first_batch = num_before()  # of this epoch, among all batches of the training
        self._source = source
        self._serving = sparse
        self._sparse = sparse if schedule.at(self._first_batch).has_sparse_stages else None
        self._streams = streams
        self._consensus = consensus
        self._any_rank = any_rank
        self.hooks_read_tables = hooks_read_tables
        self._lookup_context = lookup_context
        self._observe = observer or _ignore
        self._rank = rank
        self.timer: StageTimer | None = None
        self._trainer_stage = TrainerStage()
        self._run_stage: dict[Stage, Callable[[InFlightBatch], None]] = {}
        if self._sparse is not None:
            self._run_stage = {
                Stage.INPUT_SPLITS_DIST: self._sparse.input_splits_dist,
                Stage.INPUT_DATA_DIST: self._sparse.input_data_dist,
                Stage.PREFETCH: self._sparse.prefetch,
            }
        self._use_schedule(schedule.at(self._first_batch))
        # An evaluation keeps the mode that it runs in: no_grad or inference_mode.
        trains = Stage.BACKWARD in self.schedule.training_stages
        self._num_asks_for_writes = NUM_ASKS_FOR_WRITES if trains else 0
        self._grad_mode: Callable[[], AbstractContextManager[Any]] = torch.enable_grad if trains else nullcontext
        self._reset()

    def _use_schedule(self, schedule: Schedule) -> None:
        """Walk this table from the next iteration on."""
        self.schedule = schedule
        self._copy = next(step for step in schedule if step.stage is Stage.COPY_BATCH_TO_DEVICE)
        self._positions = {stage: schedule.position(stage) for stage in schedule.training_stages}
        self._before = BEFORE if schedule.step_of(Stage.PREFETCH) is None else BEFORE_WITH_PREFETCH
        self._deferred = schedule.dense_owned_lookup
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        self._lookup_stream = StreamName.COMPUTE if lookup is None else lookup.stream
        self._update = schedule.step_of(Stage.EMBEDDING_UPDATE)
        self._left = schedule.fills_backward_wait
        self._received_in_backward = schedule.received_in_backward
        self._first_owners = EARLY_OWNERS if self._deferred is None else frozenset({WeightOwner.FUSED_BACKWARD})

    def _reset(self) -> None:
        self._trainer_stage.end()
        self._iteration = -1
        self._row = len(self.schedule.steps)
        self._in_flight: dict[int, InFlightBatch] = {}
        self._to_update: dict[int, InFlightBatch] = {}
        self._between_steps: Any = None  # event behind what came between the last two steps, where updates wait
        self.num_fetched = 0
        self._answers: dict[int, Answer] = {}
        self._poll_interval: PollInterval | None = None  # of asking now and then; None: for every batch
        self._ask_all_from: float = 0  # on, the ranks ask each other for every batch
        self._asked_now_and_then = -1  # the last batch asked for before
        self._end: int | None = None  # batches that all ranks have, once that is known
        self.stop_agreed = False
        self._waiting_for_discovery: list[tuple[Step, int, frozenset[WeightOwner]]] = []
        self._ran_unpipelined = False  # a module of the current batch ran its own forward, on the compute stream
        self._asks_for_writes = False  # in this iteration
        self._in_forward = False  # of the user's step, which with manual optimization is all of it
        self._num_stepped = 0  # batches whose step is over
        self._num_updated = 0  # batches whose update has been issued, or is in `_to_update`
        self._updated: Any = None  # event behind the last fused backward on the lookup stream
        self._began: Any = None  # event behind all that was issued on the compute stream before this iteration
        self._written: Any = None  # event behind the last write of a table on the compute stream

    @property
    def current(self) -> InFlightBatch | None:
        """The batch being trained."""
        return self._in_flight.get(self._iteration)

    @property
    def num_trained(self) -> int:
        """Batches handed to the trainer so far."""
        return self._iteration + 1

    @property
    def place(self) -> str:
        """Where in the schedule the trainer is, in words."""
        if self._iteration < 0:
            return "before the first batch"
        if self._row == len(self.schedule.steps):
            return f"after batch {self._iteration}"
        step = self.schedule.steps[self._row]
        return f"at {step.stage} of batch {self._iteration + step.offset}"

    @property
    def depth(self) -> int:
        """Batches in flight at once, at most, whatever table is walked."""
        return self._schedules.depth

    @property
    def lasting_staleness(self) -> int:
        """Updates that the lookups of the current batch's table do not see, and the next one's do not either."""
        batch = self._first_batch + self._iteration
        return min(self._schedules.at(batch).staleness, self._schedules.at(batch + 1).staleness)

    @property
    def num_ahead(self) -> int:
        """Batches fetched but not yet handed to the trainer."""
        return sum(index > self._iteration for index in self._in_flight)

    @property
    def latest_lookup(self) -> tuple[InFlightBatch, list[InFlightBatch]] | None:
        """The batch that was looked up last, with those whose updates it did not see.

        None where it saw all of them, or where one of these batches is over. The same on all ranks.
        """
        done = [batch for batch in self._in_flight.values() if Stage.EMBEDDING_LOOKUP in batch.done]
        if not done:
            return None
        latest = max(done, key=lambda batch: batch.index)
        unseen = [self._in_flight.get(index) for index in range(latest.index - latest.num_unseen, latest.index)]
        known = [batch for batch in unseen if batch is not None]
        return (latest, known) if known and len(known) == len(unseen) else None

    @property
    def num_to_update(self) -> int:
        """Batches before the current one whose update is still to come."""
        return sum(index < self._iteration for index in self._to_update)

    @property
    def is_last(self) -> bool:
        """Whether the current batch is known to be the last one, on all ranks."""
        if self._consensus is None:
            return self.num_ahead == 0 and self._source.exhausted
        return self._end == self._iteration + 1

    def next_batch(self) -> InFlightBatch | None:
        """Begin the next iteration; return its batch, or None when the data has ended on any rank."""
        self._streams.begin_step()
        if self._before is BEFORE_WITH_PREFETCH:
            self._began = self._streams.record(StreamName.COMPUTE)
        if self._iteration < 0:
            self._begin_epoch()
        else:
            self.stage_done(self.schedule.training_stages[-1])
            self._in_flight.pop(self._iteration, None)
            schedule = self._schedules.at(self._first_batch + self._iteration + 1)
            if schedule is not self.schedule:
                self.update_tables()
                self._use_schedule(schedule)
                self._fill(self._iteration + 1)
        if self._iteration >= 0:
            self._asks_for_writes = self._num_asks_for_writes > 0
            self._num_asks_for_writes = max(0, self._num_asks_for_writes - 1)
            self._leave_overwritten(asks=self._asks_for_writes)
        self._iteration += 1
        self._row = 0
        self._between_steps = self._streams.record(StreamName.COMPUTE) if self._to_update else None
        self._run_rows()
        if self.current is None and self._iteration not in self._answers:  # asked once, answered once
            self._fetch(self._copy, self._iteration)
        self._resolve(self._iteration)
        current = self.current
        if current is not None:
            self._acquire(current, StreamName.COMPUTE, Stage.COPY_BATCH_TO_DEVICE)
            self._streams.record_stream(current.batch, StreamName.COMPUTE)
        return current

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Go around the `training_step` of the current batch."""
        current = self.current
        assert current is not None, "next_batch() comes first"
        self._observe("issue", Stage.DENSE_FORWARD, current.index)
        if not current.consumed:
            self._leave_overwritten(asks=self._asks_for_writes)
        if current.consumed:
            self.update_tables()  # a second forward in one iteration sees what the first one's backward did
        current.consumed = True
        self._trainer_stage.begin(Stage.DENSE_FORWARD, self._iteration, self.timer)
        self._in_forward = True
        try:
            with nullcontext() if self._serving is None else self._serving.forward(current):
                yield
        finally:
            self._in_forward = False
            self._trainer_stage.end()

    def stage_done(self, stage: Stage) -> None:
        """Say that the trainer has done a stage of the current batch; run the rows up to the next such stage.

        Rows before `stage` that have not run yet (the trainer skipped a stage) run too. A second backward in one
        iteration, as LBFGS makes, writes the tables again: early lookups made in between are dropped.
        """
        if self.current is None:
            return
        position = self._positions[stage]
        if self._row > position:
            if stage is Stage.BACKWARD:
                self._after_backward()
                self._drop_lookups_ahead()
            return
        self._trainer_stage.end()
        while self._row <= position:
            passed = self.schedule.steps[self._row].stage
            if passed not in TRAINING_STAGES:  # left for a backward that has not waited
                self._run(self.schedule.steps[self._row], self._first_owners)
                self._row += 1
                continue
            self._after_stage(passed)
            self._row += 1
            self._run_rows()
            if passed is Stage.DENSE_FORWARD and self._ran_unpipelined:
                # The backward to come writes tables on the compute stream: not before early lookups have read them.
                self.wait_for_lookups()
        if stage is not self.schedule.training_stages[-1]:
            following = TRAINING_STAGES[TRAINING_STAGES.index(stage) + 1]
            self._trainer_stage.begin(following, self._iteration, self.timer)

    def ask_for_writes(self) -> None:
        """Ask all ranks before the next batch whether tables were written: an evaluation or a save has been there."""
        self._num_asks_for_writes = max(self._num_asks_for_writes, 1)

    def tables_changed(self) -> None:
        """Leave the early rows of all batches in flight aside; every rank calls this alike."""
        if self._sparse is not None:
            self._refuse_deferred_writes()
            self._sparse.leave_overwritten(self._ahead())
            self._written = self._streams.record(StreamName.COMPUTE)

    def _refuse_deferred_writes(self) -> None:
        if self._to_update:
            raise RuntimeError(
                "tables were written between two steps, while an update of theirs is still to come "
                "(defer_update): it would be applied on top. Call trainer.strategy.update_tables() on all ranks "
                "before you write, or train without defer_update."
            )

    def _ahead(self) -> list[InFlightBatch]:
        return [batch for batch in self._in_flight.values() if batch.index > self._iteration or not batch.consumed]

    def _leave_overwritten(self, *, asks: bool) -> None:
        """See whether somebody has written tables after they were looked up for a batch to come.

        Args:
            asks: Whether all ranks ask each other.

        Raises:
            RuntimeError: Some are, but only this rank knows, or an update of theirs is still to come.
        """
        if self._sparse is None:
            return
        written = everyone = self._sparse.is_overwritten(self._ahead())
        if self._consensus is not None:
            everyone = asks and self._any_rank(written)
        if everyone:
            self._num_asks_for_writes = NUM_ASKS_FOR_WRITES  # who has written tables once does it again
            self._refuse_deferred_writes()
            self._sparse.leave_overwritten(self._ahead())
            self._written = self._streams.record(StreamName.COMPUTE)
        elif written:
            raise RuntimeError(
                f"tables on rank {self._rank} were written between two steps, after the next batch had been looked "
                "up, and other ranks cannot know. Call trainer.strategy.tables_changed() on all ranks after you have "
                "written them: the next batches are then looked up anew. Or train with pipeline='sparse_dist'."
            )

    def update_tables(self) -> None:
        """Make the updates that are still to come, on all ranks alike: what follows a step finds the tables written."""
        if self._to_update:
            step = Step(Stage.EMBEDDING_UPDATE, 0, self._lookup_stream)
            for index in sorted(self._to_update):
                self._update_tables(step, index)

    def _update_tables(self, step: Step, index: int) -> None:
        inflight = self._to_update.pop(index, None)
        if inflight is None:
            return  # made already
        assert self._sparse is not None
        self._observe("issue", step.stage, index)
        with InStage(step.stage, index, self._rank):
            # Behind its gradients, and behind what read the tables on the compute stream: between two steps, or in a
            # module's own forward. Not behind any other forward, beside which it is to run.
            beside_forward = step.offset < 0 and not self._ran_unpipelined
            behind = self._between_steps if beside_forward else self._streams.record(StreamName.COMPUTE)
            self._streams.wait(step.stream, behind)
            with self._streams.on(step.stream), timed(self.timer, step.stage, index, step.stream):
                self._sparse.embedding_update(inflight)
        self._updated = self._streams.record(self._lookup_stream)
        if step.offset == 0:
            self._streams.wait(StreamName.COMPUTE, self._updated)  # what comes between two steps finds it made

    def settle_updates(self, timeout_s: float) -> str | None:
        """After an error, complete the deferred updates of batches whose step is over, and drop the others.

        Args:
            timeout_s: How long to wait for gradients that are on their way.

        Returns:
            What is missing in the tables, or None.
        """
        stepped = [index for index in sorted(self._to_update) if index < self._num_stepped]
        for index in list(self._to_update):
            if index not in stepped:
                del self._to_update[index]  # neither the dense step nor the update
        try:
            if self._sparse is not None and self._sparse.gradients_are_there(
                [self._to_update[index] for index in stepped], timeout_s
            ):
                self.update_tables()
        except Exception as err:
            return f"{type(err).__name__}: {err}; the update of batch {stepped[0]} is missing in the tables"
        return f"the update of batch {stepped[0]} is missing in the tables" if self._to_update else None

    def wait_for_lookups(self) -> None:
        """Order the compute stream behind everything on the lookup stream: reads and writes of tables."""
        self._streams.wait(StreamName.COMPUTE, self._streams.record(self._lookup_stream))

    def drain(self) -> None:
        """Drop the batches that were fetched ahead; complete their collectives, on all ranks alike."""
        self.update_tables()
        for answer in self._answers.values():
            answer.wait()
        in_flight, sparse = list(self._in_flight.values()), self._sparse
        current = self._iteration
        self._reset()
        if sparse is not None:
            for inflight in in_flight:
                if inflight.index > current or not inflight.consumed:
                    sparse.drain(inflight)
            sparse.forget_prefetched()

    @contextmanager
    def without_lookups_ahead(self) -> Iterator[None]:
        """Show the kernels' iteration counts without the lookups of batches that are still to be trained."""
        self._count_lookups_ahead(-1)
        try:
            yield
        finally:
            self._count_lookups_ahead(1)

    def _count_lookups_ahead(self, times: int) -> None:
        if self._sparse is not None:
            for inflight in self._in_flight.values():
                if inflight.index > self._iteration or not inflight.consumed:
                    self._sparse.count_lookups(inflight, times)

    def abandon(self) -> None:
        """Drop everything in flight at once, without a collective: another rank may be gone."""
        with suppress(RuntimeError):  # a broken device must not hide what broke it
            self._count_lookups_ahead(-1)
            if self._sparse is not None:
                self._sparse.forget_prefetched()
        # NCCL's collectives hold no memory that Python owns, and a device's memory has to come back at once.
        on_host = isinstance(self._streams, HostStreams)
        batches = [*self._in_flight.values(), *self._to_update.values()]
        abandon([*self._answers.values(), *(batches if on_host else ())])
        self._reset()

    def _begin_epoch(self) -> None:
        self._first_batch = self._num_before()
        self._use_schedule(self._schedules.at(self._first_batch))
        # Weights may have been loaded or changed on the compute stream since the last run.
        start = self._streams.record(StreamName.COMPUTE)
        for stream in {step.stream for step in self.schedule} | {self._lookup_stream}:
            self._streams.wait(stream, start)
        self._fill(0)

    def _fill(self, start: int) -> None:
        """Issue what the table would have issued by the iteration `start`, as far as no table has done so."""
        for iteration in range(start - self.schedule.max_offset, start):
            self._iteration = iteration
            for step in self.schedule.steps:
                if step.stage is Stage.OPTIMIZER_STEP:
                    self._run_deferred_lookup()
                elif step.stage not in TRAINING_STAGES:
                    self._run(step, self._first_owners)
        self._iteration = start - 1

    def _run_rows(self) -> None:
        """Run the rows from the cursor to the next row of the trainer."""
        steps = self.schedule.steps
        while self._row < len(steps) and steps[self._row].stage not in TRAINING_STAGES:
            if self._row in self._left and self._register_backward_hook(steps[self._row].stage, self._run_left):
                return
            self._run(steps[self._row], self._first_owners)
            self._row += 1
        if self._received_in_backward is not None and self._row == self._positions[Stage.BACKWARD]:
            self._register_backward_hook(Stage.INPUT_DATA_DIST, self._receive_ahead)

    def _register_backward_hook(self, stage: Stage, call: Callable[[int], None]) -> bool:
        """Leave a stage, and what follows it, until the backward of this batch waits for other ranks, if it will.

        Not beside a module's own forward, whose backward may write tables before that.
        """
        current = self.current
        if self._sparse is None or current is None or not self._sparse.ready or self._ran_unpipelined:
            return False
        return self._sparse.register_backward_hook(current, stage, partial(call, self._iteration))

    def _run_left(self, iteration: int) -> None:
        if self._iteration == iteration:
            with self._grad_mode():  # a backward has turned it off
                while self._row in self._left:
                    self._run(self.schedule.steps[self._row], self._first_owners)
                    self._row += 1

    def _receive_ahead(self, iteration: int) -> None:
        lookup = self._received_in_backward
        if lookup is None or self._iteration != iteration:
            return
        inflight = self._in_flight.get(iteration + lookup.offset)
        if inflight is not None and Stage.INPUT_DATA_DIST in inflight.done:
            with InStage(Stage.INPUT_DATA_DIST, inflight.index, self._rank):
                self._receive_input(lookup, inflight)

    def _after_stage(self, stage: Stage) -> None:
        """The trainer has done `stage` of the current batch."""
        if stage is not Stage.DENSE_FORWARD:
            self._observe("issue", stage, self._iteration)
        if self._sparse is None:
            return
        if stage is Stage.DENSE_FORWARD:
            self._ran_unpipelined = self._sparse.take_unpipelined_forward()
            self._discover()
        elif stage is Stage.BACKWARD:
            self._after_backward()
        elif stage is Stage.OPTIMIZER_STEP:
            self._num_stepped = self._iteration + 1
            self._discover()
            # What comes between two steps (a callback's averages, clamps, norms) finds the tables written.
            self._streams.wait(StreamName.COMPUTE, self._updated)
            self._run_deferred_lookup()

    def _after_backward(self) -> None:
        if self._sparse is not None:
            self._sparse.finish_lookups()
        if self._sparse is not None and (self._sparse.take_unpipelined_forward() or self._ran_unpipelined):
            # Such a module's TBE backward ran on the compute stream: the next lookup has to wait for it.
            self._written = self._streams.record(StreamName.COMPUTE)
            self._ran_unpipelined = False
        self._num_updated = self._iteration + 1
        current = self.current
        if self._sparse is not None and current is not None and current.defers_update:
            # Behind the all-reduce of dense gradients, which is over by now: the optimizer waits for it, and beside it
            # these would take their share of the link.
            self._streams.wait(self._lookup_stream, self._streams.record(StreamName.COMPUTE))
            with (
                self._streams.on(self._lookup_stream),
                timed(self.timer, Stage.BACKWARD, current.index, self._lookup_stream),
            ):
                self._sparse.start_update(current)
            self._to_update[current.index] = current
            if self._update is None:
                self.update_tables()  # looked up under the table before this one
        if self._sparse is not None and current is not None:
            self._sparse.forget_received(current)
        self._updated = self._streams.record(self._lookup_stream)

    def _discover(self) -> None:
        assert self._sparse is not None
        current = self.current
        if self._sparse.ready or current is None or not current.consumed or self._in_forward:
            return
        if not self._sparse.discover(current):
            return
        waiting, self._waiting_for_discovery = self._waiting_for_discovery, []
        for step, index, owners in waiting:
            if index > self._iteration:
                self._issue(step, self._in_flight[index], owners)

    def _run_deferred_lookup(self) -> None:
        if self._deferred is not None:
            self._run(self._deferred, frozenset({WeightOwner.DENSE_OPTIMIZER}))

    def _run(self, step: Step, owners: frozenset[WeightOwner]) -> None:
        index = self._iteration + step.offset
        if index < 0:
            return
        if step.stage is Stage.EMBEDDING_UPDATE:
            self._update_tables(step, index)
            return
        if step.stage is Stage.COPY_BATCH_TO_DEVICE:
            self._fetch(step, index)
            return
        self._resolve(index)
        if index in self._in_flight and self._sparse is not None:
            if self._sparse.ready:
                self._issue(step, self._in_flight[index], owners)
            else:
                self._waiting_for_discovery.append((step, index, owners))

    def _fetch(self, step: Step, index: int) -> None:
        # A source may hold back a batch that looks like it is not going to be trained: then this catches up.
        while self.num_fetched <= index and (self._end is None or self.num_fetched < self._end):
            with (
                InStage(step.stage, self.num_fetched, self._rank),
                self._streams.on(step.stream),
                timed(self.timer, step.stage, self.num_fetched, step.stream),
            ):
                fetched = self._source.fetch()
            self._ask(fetched is None)
            if fetched is None:
                return
            self._observe("issue", step.stage, self.num_fetched)
            inflight = InFlightBatch(self.num_fetched, *fetched)
            inflight.done[step.stage] = (step.stream, self._streams.record(step.stream))
            self._in_flight[inflight.index] = inflight
            self.num_fetched += 1

    def _ask(self, lacks: bool) -> None:
        """Say whether there is a batch `num_fetched`, and ask for what the others have to say."""
        if self._consensus is None:
            return
        if self.num_fetched == 0:
            self._poll_interval = PollInterval() if self._source.length_known else None
            self._ask_all_from = max(0, self._source.num_batches - ASK_FOR_LAST)
        requested_interval = 0
        if self._poll_interval is not None and self.num_fetched < self._ask_all_from:
            if lacks or not self._poll_interval.due(self.num_fetched):
                return  # a batch that is held back is so on all ranks
            requested_interval = self._poll_interval.ask(self.num_fetched)
            self._asked_now_and_then = self.num_fetched
        skips = self._source.num_skipped > 0
        flags = StepFlags(
            not lacks, lacks, self._source.exhausted, self._source.stop_requested, skips, requested_interval
        )
        self._answers.setdefault(self.num_fetched, self._consensus.ask(flags))

    def _resolve(self, index: int) -> None:
        """Hear whether all ranks have a batch, before the first collective that is made for it.

        All ranks come here at the same row, whether they have the batch or not, and so end after the same one.
        """
        answer = self._answers.pop(index, None)
        if answer is None:
            return
        said = answer.wait()
        self.stop_agreed |= said.stop
        if self._poll_interval is not None and index == self._asked_now_and_then:
            self._poll_interval.hear(said.requested_interval)
        if said.skips:  # from the first batch on that no rank has asked for yet
            self._ask_all_from = min(self._ask_all_from, index + self._schedules.depth + 1)
        if said.has and (said.lacks or said.last) and self._end is None:
            self._end = index if said.lacks else index + 1
            dropped = [ahead for ahead in self._in_flight if ahead >= self._end]
            for ahead in dropped:
                del self._in_flight[ahead]
            if dropped or not self._source.exhausted:
                warnings.warn(
                    f"The data of another rank ended after {self._end} batches. Rank {self._rank} has more and ends "
                    "there too: all ranks take the same number of batches.",
                    UserWarning,
                    stacklevel=2,
                )

    def _issue(self, step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        """Issue one sparse stage of one batch on its stream, behind all that it reads."""
        assert self._sparse is not None
        if step.stage is Stage.EMBEDDING_LOOKUP:
            if not self._sparse.has_lookup(inflight, owners):
                return
        elif step.stage in inflight.done:  # by the table before this one
            return
        previous = self._before[step.stage]
        if previous not in inflight.done:  # the batch came later than its earlier rows
            row = self.schedule.step_of(previous)
            assert row is not None
            self._issue(row, inflight, owners)
        self._observe("issue", step.stage, inflight.index)
        with InStage(step.stage, inflight.index, self._rank):
            if step.stage in (Stage.PREFETCH, Stage.EMBEDDING_LOOKUP):
                self._receive_input(step, inflight)
            if step.stage is Stage.PREFETCH:
                self._order_prefetch(step)
            self._acquire(inflight, step.stream, previous)
            if step.stage is not Stage.EMBEDDING_LOOKUP and inflight.done[previous][0] is not step.stream:
                self._streams.record_stream(inflight.batch, step.stream)  # the ids are sent from the batch's own memory
            with self._streams.on(step.stream), timed(self.timer, step.stage, inflight.index, step.stream):
                if step.stage is Stage.EMBEDDING_LOOKUP:
                    self._look_up(step, inflight, owners)
                else:
                    self._run_stage[step.stage](inflight)
        inflight.done[step.stage] = (step.stream, self._streams.record(step.stream))

    def _receive_input(self, step: Step, inflight: InFlightBatch) -> None:
        """Assemble the received ids on the input dist's stream, and hand them to the lookup's."""
        assert self._sparse is not None
        stream, _ = inflight.done[Stage.INPUT_DATA_DIST]
        with self._streams.on(stream), timed(self.timer, Stage.INPUT_DATA_DIST, inflight.index, stream):
            received = self._sparse.receive_input(inflight)
        inflight.done[Stage.INPUT_DATA_DIST] = (stream, self._streams.record(stream))
        self._streams.record_stream(received, step.stream)

    def _order_prefetch(self, step: Step) -> None:
        """Let a prefetch wait for what else fills a cache. For lookups and updates that it goes beside, FBGEMM does."""
        self._streams.wait(step.stream, self._began)  # an evaluation
        if self._ran_unpipelined:  # the current batch's own
            self._streams.wait(step.stream, self._streams.record(StreamName.COMPUTE))

    def _look_up(self, step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        assert self._sparse is not None
        # Fused tables: the TBE backward ran on this very stream, except after a module's own forward. Tables of
        # the dense optimizer: its step was issued on the compute stream.
        self._streams.wait(step.stream, self._written)
        if WeightOwner.DENSE_OPTIMIZER in owners:
            self._streams.wait(step.stream, self._streams.record(StreamName.COMPUTE))
        if WeightOwner.FUSED_BACKWARD in owners:
            inflight.num_unseen = inflight.index - min(self._to_update, default=self._num_updated)
            inflight.defers_update = self._update is not None and self._sparse.can_defer_updates
        with self._grad_mode(), self._lookup_context():
            self._sparse.embedding_lookup(inflight, owners)

    def _acquire(self, inflight: InFlightBatch, stream: StreamName, stage: Stage) -> None:
        """Let `stream` wait for a stage of a batch, if that ran on another one."""
        producer, event = inflight.done[stage]
        if producer is not stream:
            self._streams.wait(stream, event)

    def _drop_lookups_ahead(self) -> None:
        if self._sparse is not None:
            for inflight in self._in_flight.values():
                if inflight.index > self._iteration:
                    self._sparse.drop_lookups(inflight)


NUM_ASKS_FOR_WRITES = 2
"""Batches of a fit before which ranks ask each other whether tables were written since the last step.

A callback that does so usually does it from the first step on. To ask always would let the ranks wait for each other.
"""


def _ignore(kind: str, stage: Stage, index: int) -> None:
    """The observer of runs that nobody watches."""
