"""The batches in flight: fetched ahead of their step, as far as all ranks have data."""

from __future__ import annotations

from ..schedules import Step
from .end_of_data import EndOfData
from .inflight import InFlightBatch
from .interfaces import BatchSource
from .lookup_order import LookupOrder
from .profiler_ranges import InStage


class BatchQueue:
    """Fetches batches and holds them until their step is over; `end` determines the last one on all ranks."""

    def __init__(self, source: BatchSource, end: EndOfData, order: LookupOrder) -> None:
        self._source, self._end, self._order = source, end, order
        self.in_flight: dict[int, InFlightBatch] = {}
        """The batches in flight by number."""
        self.num_fetched = 0
        """Number of batches fetched in this epoch."""

    def reset(self) -> None:
        """Begin an epoch."""
        self.in_flight.clear()
        self.num_fetched = 0
        self._end.reset()

    def fetch(self, step: Step, index: int) -> None:
        """Fetch batch `index`, and earlier batches that were held back, on the stream of a COPY_BATCH_TO_DEVICE step.

        A source holds back batches that `max_steps` seems to exclude. On several ranks this fetches one batch a call,
        so that all ranks ask the same questions though the data of one rank may end here.
        """
        end, order = self._end, self._order
        while self.num_fetched <= index and (end.num_batches is None or self.num_fetched < end.num_batches):
            with (
                InStage(step.stage, self.num_fetched, order.rank),
                order.on(step.stage, self.num_fetched, step.stream),
            ):
                fetched = self._source.fetch(self.num_fetched, order.timer)
            latest_none = -1 if fetched is None else fetched.latest_none
            end.ask(self.num_fetched, lacks=fetched is None, latest_none=latest_none)
            if fetched is None:
                return
            order.observe("issue", step.stage, self.num_fetched)
            inflight = InFlightBatch(self.num_fetched, *fetched)
            inflight.done[step.stage] = (step.stream, order.streams.record(step.stream))
            self.in_flight[inflight.index] = inflight
            self.num_fetched += 1
            if end.asks:
                return

    def hear(self, index: int) -> InFlightBatch | None:
        """Return batch `index` if all ranks have it; call this before the batch's first collective."""
        self._end.hear(index, self.in_flight)
        return self.in_flight.get(index)
