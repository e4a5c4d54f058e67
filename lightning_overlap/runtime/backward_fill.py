"""Steps that a backward runs while it waits for other ranks: on a CPU, where the host itself would wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..schedules import Schedule, Stage, Step
from .inflight import InFlightBatch
from .interfaces import SparseStages


class BackwardFill:
    """Leaves what stands right above BACKWARD in a schedule to the backward itself, where that would wait.

    Args:
        sparse: Knows where a backward waits; None: nothing is left to it.
        run: Runs the steps that were left, in the backward of the batch of that number.
        receive: Assembles the ids of the lookup after BACKWARD, in the backward of the batch of that number.
    """

    def __init__(
        self, sparse: SparseStages | None, run: Callable[[int], None], receive: Callable[[Step, int], None]
    ) -> None:
        self._sparse, self._run, self._receive = sparse, run, receive
        self.left = range(0)
        """Indices of the schedule's steps that may be left."""
        self.received: Step | None = None
        """The lookup whose ids may be assembled there."""

    def use(self, schedule: Schedule) -> None:
        """Leave what this schedule lets us."""
        self.left, self.received = schedule.fills_backward_wait, schedule.received_in_backward

    def leave(self, stage: Stage, current: InFlightBatch | None) -> bool:
        """Leave the steps from this stage on to the backward of the current batch; False if it would not run them."""
        return self._register(stage, current, self._run)

    def leave_receiving(self, current: InFlightBatch | None) -> None:
        """Let the backward of the current batch assemble the ids of the lookup that comes after it."""
        if self.received is not None:
            self._register(Stage.INPUT_DATA_DIST, current, partial(self._receive, self.received))

    def _register(self, stage: Stage, current: InFlightBatch | None, call: Callable[[int], None]) -> bool:
        # A backward of a module's own forward may write tables before it waits.
        if self._sparse is None or current is None or not self._sparse.ready or current.ran_unpipelined:
            return False
        return self._sparse.register_backward_hook(current, stage, partial(call, current.index))
