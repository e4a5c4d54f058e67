"""Bound how far the host runs ahead of the device."""

from collections import deque
from typing import Any

from ..schedules import StreamName
from .streams import Streams


class RunAhead:
    """Lets the host queue at most `max_steps` steps that the device has not ended; None: any number.

    Memory that two streams have used is free only once both are past it. A host that runs far ahead allocates for steps
    that are long freed on the host and not yet run on the device, so reserved memory grows. Source: the limit of two
    all-gathers in FullyShardedDataParallel (`limit_all_gathers`).
    """

    def __init__(self, streams: Streams, max_steps: int | None) -> None:
        self._streams, self._max_steps = streams, max_steps if streams.is_async else None
        self.reset()

    def reset(self) -> None:
        """Begin a run: no step is queued."""
        self._ends: deque[Any] = deque()  # events after the steps that the host has not waited for, the oldest first
        self._waited: list[Any] = []  # events that it has waited for, to record again

    def end_step(self) -> None:
        """Note that everything of a step is queued on the compute stream, or before an event that it waits for."""
        if self._max_steps is not None:
            again = self._waited.pop() if self._waited else None
            self._ends.append(self._streams.record_for_host(StreamName.COMPUTE, again=again))

    def wait(self) -> None:
        """Before a batch is copied, block the host until the step that it queues now is one of `max_steps`."""
        while self._max_steps is not None and len(self._ends) >= self._max_steps:
            self._streams.let_host_wait(end := self._ends.popleft())
            self._waited.append(end)
