"""The batches in flight: fetched ahead of their step, as far as all ranks have data."""

import atexit
import ctypes
from collections.abc import Sequence

from ..schedules import Step
from .end_of_data import EndOfData
from .interfaces import BatchSource, InFlightBatch
from .lookup_order import LookupOrder
from .profiler_ranges import InStage
from .run_ahead import RunAhead


class BatchQueue:
    """Fetches batches and holds them until their step is over; `end` determines the last one on all ranks."""

    def __init__(self, source: BatchSource, end: EndOfData, order: LookupOrder, run_ahead: RunAhead) -> None:
        self._source, self._end, self._order, self._run_ahead = source, end, order, run_ahead
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.in_flight: dict[int, InFlightBatch] = {}  # by number, from the current one on
        self.current: InFlightBatch | None = None  # the batch being trained
        self.num_fetched = 0  # in this epoch
        self._end.reset()

    def ahead(self) -> list[InFlightBatch]:
        """Return the batches in flight whose forward has not begun."""
        return [inflight for inflight in self.in_flight.values() if not inflight.consumed]

    def fetch(self, step: Step, index: int) -> None:
        """Fetch batch `index`, and earlier batches that the source held back (`max_steps` seemed to exclude them)."""
        end, order = self._end, self._order
        while self.num_fetched <= index and (end.num_batches is None or self.num_fetched < end.num_batches):
            self._run_ahead.wait()
            number = self.num_fetched
            with InStage(step.stage, number, order.rank), order.on(step.stage, number, step.stream):
                fetched = self._source.fetch(number, order.timer)
            if fetched is None:
                end.ask(number, lacks=True)
                return
            end.ask(number, lacks=False, latest_none=fetched.latest_none, rates=fetched.rates)
            order.observe("issue", step.stage, number)
            inflight = self.in_flight[number] = InFlightBatch(number, *fetched)
            inflight.done[step.stage] = (step.stream, order.streams.record(step.stream))
            self.num_fetched += 1
            if end.asks:  # one batch a call: all ranks ask the same questions wherever data ends
                return

    def hear(self, index: int) -> InFlightBatch | None:
        """Return batch `index` if all ranks have it; call this before the batch's first collective."""
        if index in self._end.answers:
            self._end.hear(index, self.in_flight)
        return self.in_flight.get(index)


_abandoned: list[object] = []


def abandon(holders: Sequence[object]) -> None:
    """Release the holders of collectives that other ranks may never join, so that the process can end meanwhile.

    A gloo group's thread frees the tensors of its last collectives, which takes the interpreter's lock. An ending
    interpreter ends that thread, and C++ then aborts the process (SIGABRT). So the last holders are never freed.
    """
    if holders:
        _abandoned[:] = holders
        atexit.unregister(_never_free)
        atexit.register(_never_free)


def _never_free() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))
