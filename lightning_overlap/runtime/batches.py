"""The batches in flight: fetched ahead of their step, as far as all ranks have data."""

import atexit
import ctypes
import warnings
from collections.abc import Callable, Sequence

from ..distributed import MAX_INTERVAL, POLL_LAST, Consensus, Poll, PollInterval, StepFlags
from ..schedules import Stage, Step, StreamName
from .flight import NO_RATES, FetchedBatch, Flight, Rates
from .interfaces import BatchSource
from .run_ahead import RunAhead
from .streams import Made, Streams
from .telemetry import Telemetry


class Batches:
    """Fetches batches and holds them until their step is over; ends the epoch after the same batch on all ranks.

    A poll is an exchange on the host in which each rank sends whether it has a batch (`Consensus`). Its result is read
    a step later. If the length of every rank's epoch is known, the ranks poll occasional batches (`PollInterval`) and
    each of the last. If not, each rank sends with a poll how many further batches it surely has
    (`BatchSource.num_certain`), and the next poll is about the last batch that all ranks surely have.

    All ranks decide by the same results, at the same row of the schedule. `depth` is the most batches in flight.
    """

    def __init__(
        self,
        source: BatchSource,
        make_flight: Callable[[int, FetchedBatch], Flight],
        consensus: Consensus | None,
        depth: int,
        streams: Streams,
        telemetry: Telemetry,
        run_ahead: RunAhead,
        make_padding: Callable[[int], Flight] | None = None,
    ) -> None:
        self._source, self._make_flight, self._consensus, self._depth = source, make_flight, consensus, depth
        self._streams, self._telemetry, self._run_ahead = streams, telemetry, run_ahead
        # For an evaluation on several ranks: it ends with the longest rank's data, in training with the shortest's.
        self._make_padding = make_padding if consensus is not None else None
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.in_flight: dict[int, Flight] = {}  # by number, from the current one on
        self.current: Flight | None = None  # the batch being trained
        self.num_fetched = 0  # in this epoch
        self.num_batches: int | None = None  # that all ranks have, without None batches; None until it is known
        self.told_to_stop: int | None = None  # a rank that received SIGTERM, once all ranks know of it
        self.save_agreed = False  # whether a rank received a preemption signal
        self.polls: dict[int, Poll] = {}  # whose result is not read yet, by batch number
        self._poll_interval: PollInterval | None = None  # between polls; None if lengths are not known
        self._next_polled = 0  # if lengths are not known: the first batch that needs a poll
        self._poll_all_from: float = 0  # if lengths are known: from this batch on each one needs a poll
        self._polled_occasionally = -1  # the last batch polled before `_poll_all_from`
        self._compare_rates = NO_RATES.compare

    def ahead(self) -> list[Flight]:
        """Return the batches in flight whose forward has not begun."""
        return [flight for flight in self.in_flight.values() if not flight.consumed]

    def is_last(self, index: int) -> bool:
        """Whether a batch is known to be the last one, on all ranks."""
        if self._consensus is not None:
            return self.num_batches == index + 1
        num_ahead = len(self.in_flight) - (self.current is not None)
        return num_ahead == 0 and self._source.exhausted

    @property
    def is_own_last(self) -> bool:
        """Whether the current batch is the last one of this rank, which may go on to take part in lookups of others."""
        ahead = [flight for flight in self.in_flight.values() if flight is not self.current and not flight.is_padding]
        return self._source.exhausted and not ahead

    def fetch(self, row: Step, index: int) -> None:
        """Fetch batch `index`, and earlier batches that the source held back (`max_steps` seemed to exclude them)."""
        while self.num_fetched <= index and (self.num_batches is None or self.num_fetched < self.num_batches):
            self._run_ahead.wait()
            number = self.num_fetched
            telemetry = self._telemetry
            with (
                telemetry.stage(row.stage, number),
                self._streams.on(row.stream),
                telemetry.timed(row.stage, number, row.stream),
            ):
                fetched = self._source.fetch(number, telemetry.timer)
            if fetched is None:
                self._poll(number, lacks=True)
                self.num_fetched += self._make_padding is not None  # the ranks go on with the next one
                return
            self._poll(number, lacks=False, latest_none=fetched.latest_none, rates=fetched.rates)
            telemetry.observe("issue", row.stage, number)
            flight = self.in_flight[number] = self._make_flight(number, fetched)
            # Other streams use it later, and would then wait for more than the copy.
            copies_aside = row.stream is not StreamName.COMPUTE
            made = self._streams.made if copies_aside else Made
            flight.issued[row.stage] = made(flight.batch, row.stream)
            self.num_fetched += 1
            if self._consensus is not None:  # one batch a call: all ranks poll the same batches wherever data ends
                return

    def get(self, index: int) -> Flight | None:
        """Return batch `index` if all ranks have it; call this before the batch's first collective."""
        if index in self.polls:
            self._read_result(index)
        return self.in_flight.get(index)

    def _poll(self, index: int, *, lacks: bool, latest_none: int = -1, rates: Rates = NO_RATES) -> None:
        """Poll the ranks for batch `index`, without None batches, if it needs a poll; does not wait."""
        if self._consensus is None:
            return
        if index == 0:
            self._poll_interval = PollInterval() if self._source.length_known else None
            self._poll_all_from = max(0, self._source.num_batches - POLL_LAST)
        requested_interval = 0
        if self._poll_interval is not None and index < self._poll_all_from:
            if lacks and self._source.exhausted:
                raise RuntimeError(
                    f"rank {self._telemetry.rank} has only {index} batches to train of the "
                    f"{self._source.num_batches:g} in its loader's length: most of the last batches are None. The "
                    "other ranks have more and would wait for it. Drop samples instead of whole batches, or give the "
                    "loader no length."
                )
            if lacks or not self._poll_interval.due(index):
                return  # `max_steps` holds it back, on every rank
            requested_interval = self._poll_interval.note_poll(index)
            self._polled_occasionally = index
        elif self._poll_interval is None:
            if index < self._next_polled:
                return
            requested_interval = MAX_INTERVAL - max(1, min(self._source.num_certain, MAX_INTERVAL))
        stop = self._telemetry.rank + 1 if self._source.stop_requested else 0
        last, save = self._source.exhausted, self._source.save_requested
        flags = StepFlags(not lacks, lacks, last, stop, latest_none, requested_interval, save, rates.digest)
        self._compare_rates = rates.compare
        self.polls.setdefault(index, self._consensus.poll(flags))

    def _read_result(self, index: int) -> None:
        """Read the result of a poll, on all ranks alike; drop batches past the end."""
        result = self.polls.pop(index).wait()
        if result.rates < 0:
            self._compare_rates()
        if result.stop and self.told_to_stop is None:
            self.told_to_stop = result.stop - 1
        self.save_agreed |= result.save
        if self._poll_interval is not None and index == self._polled_occasionally:
            self._poll_interval.note_result(result.requested_interval, self._source.num_batches)
        if self._poll_interval is None:
            # If a rank lacked the batch, `max_steps` may only have held it back: poll it again.
            self._next_polled = index if result.lacks else index + MAX_INTERVAL - result.requested_interval
        if result.latest_none >= 0:  # the epoch is shorter: poll each batch, from the first that no rank has reached
            self._poll_all_from = min(self._poll_all_from, index + self._depth + 1)
        if self._make_padding is not None:
            self._pad(index, result, self._make_padding)
            return
        if not result.has or not (result.lacks or result.last) or self.num_batches is not None:
            return
        self.num_batches = index if result.lacks else index + 1
        dropped = [ahead for ahead in self.in_flight if ahead >= self.num_batches]
        for ahead in dropped:
            del self.in_flight[ahead]
        if dropped or not self._source.exhausted:
            warnings.warn(
                f"The data of another rank ended after {self.num_batches} batches. Rank {self._telemetry.rank} has "
                "more and ends there too: all ranks take the same number of batches.",
                stacklevel=2,
            )

    def _pad(self, index: int, result: StepFlags, make_padding: Callable[[int], Flight]) -> None:
        """Let this rank take part in the lookups of a batch that it lacks and others have; end if no rank has it."""
        if not result.has:
            self.num_batches = index if self.num_batches is None else self.num_batches
        elif result.lacks:
            padding = make_padding(index)  # on all ranks: it may raise an error
            if index not in self.in_flight:
                padding.is_padding = True
                padding.issued[Stage.COPY_BATCH_TO_DEVICE] = Made(None, StreamName.COMPUTE)
                self.in_flight[index] = padding


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


def free_abandoned() -> None:
    """Free what `abandon` holds; to be called when all ranks have left the run that failed."""
    _abandoned.clear()


def _never_free() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))
