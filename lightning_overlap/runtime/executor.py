"""Walk a schedule: run its steps around the trainer's own forward, backward and optimizer step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from ..distributed import Consensus
from ..schedules import TRAINING_STAGES, Schedule, Schedules, Stage, Step, StreamName, WeightOwner
from .batch_queue import BatchQueue, abandon
from .deferred_updates import DeferredUpdates
from .end_of_data import EndOfData
from .interfaces import BatchSource, InFlightBatch, ModulePart, SparseStages, WeightGradients
from .lookup_order import LookupOrder
from .profiler_ranges import InStage, is_profiled
from .run_ahead import RunAhead
from .stage_issue import StageIssuer
from .streams import CudaStreams
from .table_writes import NUM_ASKS, TableWrites


class Executor:
    """Runs the steps of a schedule, all on the calling thread, at the same point on every rank.

    The trainer drives it: `next_batch()` begins an iteration, `forward()` goes around `training_step`, and
    `stage_done(stage)` says that the trainer has done a stage.
    """

    def __init__(
        self,
        schedule: Schedules,
        source: BatchSource,
        sparse: SparseStages,
        order: LookupOrder,
        *,
        consensus: Consensus | None = None,  # None on one rank
        lookup_context: Callable[[], AbstractContextManager[Any]] = nullcontext,  # autocast, as for `training_step`
        num_before: Callable[[], int] = lambda: 0,  # batches trained so far, over all epochs
        any_rank: Callable[[bool], bool] = bool,  # whether any rank passed True: an all-reduce on the host
        hooks_run_after: Callable[[Stage], bool] = lambda stage: False,  # whether hooks of the user run next
        max_queued_steps: int | None = None,  # how many steps the host may queue on the device; None: any number
        weights: WeightGradients | None = None,  # None if the backward computes the weight gradients
    ) -> None:
        self._schedules = schedule
        self._inputs, self._lookups, self._tables = sparse
        self._order, self._streams = order, order.streams
        self._num_before, self._weights = num_before, weights
        self._hooks_run_after = hooks_run_after
        self._first_batch = num_before()  # number of this epoch's batch 0 over all epochs
        self._trainer_stage: ExitStack | None = None  # the trainer's present stage, if it is profiled or timed
        self.end = EndOfData(source, consensus, order.rank, schedule.depth)
        self._run_ahead = RunAhead(order.streams, max_queued_steps)
        self.queue = BatchQueue(source, self.end, order, self._run_ahead)
        self.updates = DeferredUpdates(self._tables, order)
        first = schedule.at(self._first_batch)
        trains = Stage.BACKWARD in first.training_stages
        self.writes = TableWrites(
            self._lookups if first.has_sparse_stages else None,
            order,
            self.updates,
            self.queue,
            any_rank=None if consensus is None else any_rank,
            num_asks=NUM_ASKS if trains else 0,
        )
        # An evaluation keeps the mode that it runs in: no_grad or inference_mode.
        contexts = (torch.enable_grad if trains else nullcontext, lookup_context)
        self._stages = StageIssuer(self._inputs, self._lookups, order, self.updates, self.queue, contexts)
        self._use_schedule(first)
        self._reset()

    def _use_schedule(self, schedule: Schedule) -> None:
        """Take a mode's table from the next iteration on."""
        self.schedule = self._stages.schedule = schedule

    def _reset(self) -> None:
        self._begin_trainer_stage(None)
        self._iteration = -1
        self._cursor = len(self.schedule.steps)  # the step of the schedule that comes next
        self._finished_backward = False  # whether BACKWARD has ended before the trainer reports it
        self._in_forward = False  # of `training_step`, which with manual optimization contains all stages
        self._order.reset()
        self._run_ahead.reset()
        self.queue.reset()
        self._stages.reset()
        self.updates.reset()
        self.writes.reset()

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
        step = self.schedule.steps[self._cursor]
        return f"at {step.stage} of batch {self._iteration + step.offset}"

    @property
    def num_in_flight(self) -> int:
        """Batches fetched whose step is not over, or whose update of the tables is still to come."""
        return len(self.queue.in_flight.keys() | self.updates.to_update)

    @property
    def is_last(self) -> bool:
        """Whether the current batch is known to be the last one, on all ranks."""
        return self.end.is_last(self._iteration, len(self.queue.in_flight) - (self.queue.current is not None))

    def next_batch(self) -> InFlightBatch | None:
        """Begin the next iteration; return its batch, or None if the data of any rank has ended."""
        self._streams.begin_step()
        self._stages.begin_iteration()
        if self._iteration < 0:
            self._begin_epoch()
        else:
            self._end_iteration()
            self.writes.begin_iteration()
        self._iteration += 1
        self._cursor = 0
        self.updates.begin_iteration()
        self._run_steps()
        if self._iteration not in self.queue.in_flight and self._iteration not in self.end.answers:
            self.queue.fetch(self.schedule[Stage.COPY_BATCH_TO_DEVICE], self._iteration)  # asked once, answered once
        current = self.queue.current = self.queue.hear(self._iteration)
        if current is not None:
            self._stages.acquire(current, StreamName.COMPUTE, Stage.COPY_BATCH_TO_DEVICE)
            self._streams.record_stream(current.batch, StreamName.COMPUTE)
        return current

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Go around the `training_step` of the current batch."""
        current = self.queue.current
        assert current is not None, "next_batch() comes first"
        self._order.observe("issue", Stage.DENSE_FORWARD, current.index)
        if current.consumed:
            self.updates.make_all()  # a second forward (LBFGS) sees the update of the first forward's backward
        else:
            self.writes.check()
        if self._weights is not None:  # a second forward of a batch has a backward of its own
            self._weights.begin_step(splits=self.schedule.splits_backward and not current.consumed)
        current.consumed = True
        self._begin_trainer_stage(Stage.DENSE_FORWARD)
        self._in_forward = True
        try:
            with self._lookups.forward(current, self._send_next):
                yield
        finally:
            self._in_forward = False
            if self._weights is not None:
                self._weights.end_forward()
            self._begin_trainer_stage(None)

    def _send_next(self) -> None:
        for step in self.schedule.sends_after_forward:
            self._run(step)

    def stage_done(self, stage: Stage) -> None:
        """Run the steps up to the trainer's next stage; if it has skipped a stage, also the steps above `stage`."""
        current = self.queue.current
        if stage is Stage.BACKWARD and self._finished_backward:
            self._finished_backward = False
            return
        if current is None:
            return
        if stage is Stage.DENSE_FORWARD and self._in_forward:  # a backward within the step (manual optimization)
            self._lookups.end_part(current)
        position = self.schedule.position(stage)
        if self._cursor > position:
            if stage is Stage.BACKWARD and self.schedule.has_sparse_stages:
                self._after_backward(current)
                for inflight in self.queue.ahead():  # a second backward (LBFGS) has written the tables again
                    self._lookups.drop_lookups(inflight)
            return
        self._begin_trainer_stage(None)
        while self._cursor <= position:
            step = self.schedule.steps[self._cursor]
            if step.stage not in TRAINING_STAGES:  # left to a backward that did not wait for other ranks
                self._run(step)
                self._cursor += 1
                continue
            self._after_stage(step.stage, current)
            self._cursor += 1
            self._run_steps()
        if stage is Stage.BACKWARD and self._weights is not None and self.schedule.splits_backward:
            self._weights.finish()
        if stage is not self.schedule.training_stages[-1]:
            self._begin_trainer_stage(TRAINING_STAGES[TRAINING_STAGES.index(stage) + 1])

    def _begin_trainer_stage(self, stage: Stage | None) -> None:
        """Tell profiler and timer that the trainer's present stage has ended and that another begins."""
        if self._trainer_stage is not None:
            self._trainer_stage.close()
            self._trainer_stage = None
        if stage is not None and (is_profiled() or self._order.timer is not None):
            self._trainer_stage = ExitStack()
            self._trainer_stage.enter_context(InStage(stage, self._iteration, self._order.rank))
            self._trainer_stage.enter_context(self._order.timed(stage, self._iteration, StreamName.COMPUTE))

    def wait_for_lookups(self) -> None:
        """Let the compute stream wait for everything on the lookup stream: reads and writes of tables."""
        self._order.compute_waits()

    def drain(self) -> None:
        """Drop the batches that were fetched ahead; complete their collectives, on all ranks alike."""
        self.updates.make_all()
        for answer in self.end.answers.values():
            answer.wait()
        ahead = self.queue.ahead()
        self._reset()
        for inflight in ahead:
            self._inputs.drain(inflight)
            self._lookups.drop_lookups(inflight)
        self._lookups.forget_prefetched()

    @contextmanager
    def without_lookups_ahead(self) -> Iterator[None]:
        """Within this context the kernels do not count lookups of batches whose optimizer step is to come."""
        self._count_lookups_ahead(-1)
        try:
            yield
        finally:
            self._order.lookup_waits()  # for a save, which reads the counts on the compute stream
            self._count_lookups_ahead(1)

    def _count_lookups_ahead(self, times: int) -> None:
        for inflight in self.queue.ahead():
            self._tables.count_lookups(inflight, times)

    def abandon(self) -> None:
        """Drop everything in flight at once, without a collective: another rank may be gone."""
        with suppress(RuntimeError):  # a broken device must not hide what broke it
            self._count_lookups_ahead(-1)
            self._lookups.forget_prefetched()
        # NCCL's collectives hold no memory that Python owns, and a device's memory has to come back at once.
        on_host = not isinstance(self._streams, CudaStreams)
        batches = [*self.queue.in_flight.values(), *self.updates.to_update.values()]
        abandon([*self.end.answers.values(), *(batches if on_host else ())])
        self._reset()

    def _begin_epoch(self) -> None:
        self._first_batch = self._num_before()
        self._use_schedule(self._schedules.at(self._first_batch))
        # Weights may have been loaded or changed on the compute stream since the last run.
        start = self._streams.record(StreamName.COMPUTE)
        for stream in {step.stream for step in self.schedule} | {self._order.lookup}:
            self._streams.wait(stream, start)
        self._fill(0)

    def _end_iteration(self) -> None:
        self.stage_done(self.schedule.training_stages[-1])
        self._run_ahead.end_step()
        self.queue.in_flight.pop(self._iteration, None)
        self.queue.current = None
        schedule = self._schedules.at(self._first_batch + self._iteration + 1)
        if schedule is not self.schedule:
            self.updates.make_all()
            self._use_schedule(schedule)
            self._fill(self._iteration + 1)

    def _fill(self, start: int) -> None:
        """Issue what the table would have issued before iteration `start`, unless the former table has issued it."""
        for iteration in range(start - self.schedule.max_offset, start):
            self._iteration = iteration
            for step in self.schedule.steps:
                if step.stage is Stage.OPTIMIZER_STEP:
                    self._run_deferred_lookup()
                elif step.stage not in TRAINING_STAGES:
                    self._run(step)
        self._iteration = start - 1

    def _run_steps(self) -> None:
        """Run the steps from the cursor to the trainer's next stage, except those left to the backward."""
        steps, left = self.schedule.steps, self.schedule.fills_backward_wait
        while self._cursor < len(steps) and (step := steps[self._cursor]).stage not in TRAINING_STAGES:
            if self._cursor in left and self._leave_to_backward(step.stage):
                return
            self._run(step)
            self._cursor += 1

    def _leave_to_backward(self, stage: Stage) -> bool:
        """Let the current backward run the steps from `stage` on, if the host would wait there for other ranks."""
        current, index = self.queue.current, self._iteration
        # The backward of a module's own forward may write tables before it waits.
        if current is None or current.ran_unpipelined:
            return False

        def run_once_there() -> None:
            if self.queue.current is not None and self._iteration == index:  # some hooks outlive their backward
                with torch.enable_grad():  # a backward turns it off
                    while self._cursor in self.schedule.fills_backward_wait:
                        self._run(self.schedule.steps[self._cursor])
                        self._cursor += 1

        return self._tables.register_backward_hook(current, stage, run_once_there)

    def _look_up_part(self, part: ModulePart) -> None:
        """Look up an updated part of a module for the next batch, while gradients of other parts are under way."""
        lookup = self.schedule[Stage.EMBEDDING_LOOKUP]
        if (inflight := self.queue.hear(self._iteration + lookup.offset)) is not None:
            self._stages.issue(lookup, inflight, frozenset({WeightOwner.FUSED_BACKWARD}), part)

    def _after_stage(self, stage: Stage, current: InFlightBatch) -> None:
        if stage is not Stage.DENSE_FORWARD:
            self._order.observe("issue", stage, self._iteration)
        if not self.schedule.has_sparse_stages:
            return
        if stage is Stage.BACKWARD:
            self._after_backward(current)
            return
        if stage is Stage.OPTIMIZER_STEP:
            self.updates.num_stepped = self._iteration + 1
        if current.consumed and not self._in_forward:
            self._stages.discover(current)
        if stage is Stage.OPTIMIZER_STEP:
            # Code between two steps (a callback's averages, clamps, norms) finds the tables written.
            self._order.compute_waits_for_update()
            self._run_deferred_lookup()

    def _after_backward(self, current: InFlightBatch) -> None:
        current.ran_unpipelined = False
        self.updates.num_updated = self._iteration + 1
        if current.defers_update:
            self.updates.start(current)
            if not self.schedule.defers_update:
                self.updates.make_all()  # looked up under the former table
        self._lookups.forget_received(current)
        self._order.note_update()

    def begin_backward(self, loss: torch.Tensor, *, is_only: bool) -> None:
        """Begin the backward of the current batch's loss; `is_only`: the step's only one (automatic optimization)."""
        if self.queue.current is None:
            return
        if self._hooks_run_after(Stage.DENSE_FORWARD):
            self._order.compute_waits_for_update()  # a deferred one, which overlaps with the backward
        if is_only and self._weights is not None:
            self._weights.begin_backward(loss)
        # The user's on_after_backward comes before the trainer says that the backward is over.
        if is_only and self.schedule.updates_before_step:
            end = self._finish_backward
        elif self._streams.is_async:
            end = self.wait_for_lookups
        else:
            return
        if loss.requires_grad and self._hooks_run_after(Stage.BACKWARD):
            engine = torch.autograd.Variable._execution_engine
            loss.register_hook(lambda _: engine.queue_callback(end))

    def _finish_backward(self) -> None:
        with torch.enable_grad():  # a backward turns it off
            self.stage_done(Stage.BACKWARD)
        self.wait_for_lookups()
        self._finished_backward = True

    def _run_deferred_lookup(self) -> None:
        step = self.schedule.dense_owned_lookup
        if step is not None and (inflight := self.queue.hear(self._iteration + step.offset)) is not None:
            self._stages.issue(step, inflight, frozenset({WeightOwner.DENSE_OPTIMIZER}))

    def _run(self, step: Step) -> None:
        stage, index = step.stage, self._iteration + step.offset
        if index < 0:
            return
        if stage is Stage.COPY_BATCH_TO_DEVICE:
            self.queue.fetch(step, index)
        elif stage is Stage.EMBEDDING_UPDATE:
            overlaps_dense = self.schedule.updates_before_step
            updated = self._look_up_part if overlaps_dense and not self._streams.is_async else None
            self.updates.make_up_to(index, step, overlaps_dense, updated)
        elif stage is Stage.WEIGHT_GRADIENTS:
            if self._weights is not None:
                self._order.observe("issue", stage, index)
                with InStage(stage, index, self._order.rank), self._order.timed(stage, index, step.stream):
                    self._weights.compute()
        elif (inflight := self.queue.hear(index)) is not None:
            self._stages.issue(step, inflight, self.schedule.lookup_owners)
