"""Order two streams: the lookup stream, which reads and updates tables, and the compute stream."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..schedules import Stage, StreamName
from .interfaces import Observer, StageTimer
from .streams import NOTHING, Streams


class LookupOrder:
    """State that an executor shares with the sparse stages: streams, observer, timer, and the order of the two streams.

    All lookups and updates of tables run on the lookup stream, also those of a module's own forward. Code between two
    steps uses the tables on the compute stream: one stream then waits.
    """

    def __init__(
        self,
        streams: Streams,
        lookup: StreamName = StreamName.COMPUTE,
        observe: Observer | None = None,
        rank: int = 0,
    ) -> None:
        self.streams, self.lookup, self.rank = streams, lookup, rank
        self.observe: Observer = observe or (lambda kind, stage, index: None)
        self.timer: StageTimer | None = None  # told of every stage that either side issues
        self.num_told = 0  # the user's calls of `tables_changed()`
        # Waits of those that read tables beside the steps (copies of rows): called before tables are written in place.
        self.readers: list[Callable[[], None]] = []
        self._updated: Any = None  # event after the last update of a table on the lookup stream

    def reset(self) -> None:
        """Begin a run: no table has been updated."""
        self._updated = None

    def on(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[Any]:
        """Make a stream current for a stage of a batch, and time the stage."""
        on = self.streams.on(stream)
        return on if self.timer is None else _both(on, self.timer.during(stage, batch, stream))

    def timed(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[Any]:
        """Time a stage of a batch on a stream."""
        return NOTHING if self.timer is None else self.timer.during(stage, batch, stream)

    def on_lookup(self) -> AbstractContextManager[Any]:
        """Make the lookup stream current."""
        return self.streams.on(self.lookup)

    def compute_waits(self) -> None:
        """Let the compute stream wait for all work issued on the lookup stream: reads and writes of tables."""
        self.streams.wait(StreamName.COMPUTE, self.streams.record(self.lookup))

    def lookup_waits(self) -> None:
        """Let the lookup stream wait for all work issued on the compute stream."""
        self.streams.wait(self.lookup, self.streams.record(StreamName.COMPUTE))

    def note_update(self) -> None:
        """Note that tables were updated on the lookup stream."""
        self._updated = self.streams.record(self.lookup)

    def compute_waits_for_update(self) -> None:
        """Let the compute stream wait for the last update of a table, but not for later lookups."""
        self.streams.wait(StreamName.COMPUTE, self._updated)

    def take_to_lookup(self, value: Any, stream: StreamName) -> None:
        """Let the lookup stream use a value computed by the work issued on `stream` so far."""
        self.streams.wait(self.lookup, self.streams.record(stream))
        self.streams.record_stream(value, self.lookup)

    def hand_to_lookup(self, value: Any) -> None:
        """Let the lookup stream use a value allocated on another stream; does not order the two streams."""
        self.streams.record_stream(value, self.lookup)

    def hand_to_caller(self, value: Any, event: Any, batch: int | None) -> None:
        """Let the compute and the current stream use embeddings after an event; the timer records it for `batch`."""
        with self.timer.merge(batch) if batch is not None and self.timer is not None else NOTHING:
            self.streams.hand_to_caller(value, event)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
