"""Steps that a backward runs while it waits for other ranks (CPU only, where the host itself would wait)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..schedules import Stage, Step
from .batch_queue import BatchQueue
from .inflight import InFlightBatch
from .interfaces import Updates
from .profiler_ranges import InStage
from .stage_issue import StageIssuer


class BackwardFill:
    """Lets a backward that would wait run the steps right above BACKWARD in the schedule.

    `current` returns the batch being trained, or None; `run_left` runs the steps that were left to the backward.
    """

    def __init__(
        self,
        updates: Updates,
        stages: StageIssuer,
        queue: BatchQueue,
        rank: int,
        current: Callable[[], InFlightBatch | None],
        run_left: Callable[[], None],
    ) -> None:
        self._updates, self._stages, self._queue, self._rank = updates, stages, queue, rank
        self._current, self._run_left = current, run_left
        self.left = range(0)
        """Indices of the steps that the walked schedule lets a backward run."""

    def leave(self, stage: Stage) -> bool:
        """Leave the steps from this stage on to the current batch's backward; False if it will not run them."""
        return self._register(stage, self._run)

    def leave_receiving(self, lookup: Step) -> None:
        """Let the backward of the current batch assemble the ids of the lookup that comes after it, if it can."""
        self._register(Stage.INPUT_DATA_DIST, partial(self.receive, lookup))

    def _register(self, stage: Stage, call: Callable[[int], None]) -> bool:
        current = self._current()
        # The backward of a module's own forward may write tables before it waits.
        if current is None or current.ran_unpipelined:
            return False
        return self._updates.register_backward_hook(current, stage, partial(call, current.index))

    def _is_current(self, index: int) -> bool:
        current = self._current()
        return current is not None and current.index == index

    def _run(self, index: int) -> None:
        if self._is_current(index):
            with torch.enable_grad():  # a backward turns it off
                self._run_left()

    def receive(self, lookup: Step, index: int) -> None:
        """Assemble the received ids of a lookup, if they were sent and `index` is the batch being trained."""
        inflight = self._queue.in_flight.get(index + lookup.offset)
        if self._is_current(index) and inflight is not None and Stage.INPUT_DATA_DIST in inflight.done:
            with InStage(Stage.INPUT_DATA_DIST, inflight.index, self._rank):
                self._stages.receive_input(lookup, inflight)
