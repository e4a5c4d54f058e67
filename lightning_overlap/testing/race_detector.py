"""Find races between streams by vector clocks, from what each piece of work says that it reads and writes.

A stream is a thread with a clock. Work on it moves the clock on; an event is a copy of the clock; a wait joins the
copy into the clock of the stream that waits. Two accesses are ordered if the later one's stream knows of the earlier
one. The clocks know of orders only, not of time: what could go wrong on some device is found in every run, without one.

Source: the happens-before order of Lamport (1978) in vector clocks, and the last-access bookkeeping of FastTrack
(Flanagan and Freund, PLDI 2009), without its compressed clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..runtime import Streams
from ..schedules import StreamName

Clock = Mapping[StreamName, int]
"""How far into the work of each stream one stream, or an event, can look back."""


class RaceError(AssertionError):
    """Two streams use the same memory, and nothing orders or announces it; the message says what is missing."""


class Access(NamedTuple):
    """One piece of work that uses a resource."""

    by: str
    writes: bool
    stream: StreamName
    time: int
    """Of the stream's own clock."""

    def __str__(self) -> str:
        return f"{self.by} ({'writes' if self.writes else 'reads'} on {self.stream})"


@dataclass(slots=True)
class _Resource:
    """What is known of one piece of memory."""

    last_write: Access | None = None
    reads: dict[StreamName, Access] = field(default_factory=dict)
    """The last one of each stream since the last write."""
    made: Access | None = None
    """Where it was allocated; None: it is there for as long as the run is."""
    handed_to: set[StreamName] = field(default_factory=set)


class Races:
    """Follows streams, events and accesses; raises at the first access that nothing orders after an earlier one.

    Resources have any name. Those that `make` allocates belong to the stream they were made on, as in PyTorch's
    caching allocator: another stream uses them only after `record_stream`.
    """

    def __init__(self) -> None:
        self._clocks: dict[StreamName, dict[StreamName, int]] = {name: {name: 0} for name in StreamName}
        self._resources: dict[str, _Resource] = {}

    def event(self, stream: StreamName) -> Clock:
        """Return a copy of a stream's clock: the work that it knows to be over."""
        return dict(self._clocks[stream])

    def wait(self, stream: StreamName, event: Clock) -> None:
        """Let a stream wait for an event: it then knows of the work before it."""
        clock = self._clocks[stream]
        for other, time in event.items():
            clock[other] = max(clock.get(other, 0), time)

    def record_stream(self, resources: Iterable[str], stream: StreamName) -> None:
        """Let a stream use memory that was made on another one."""
        for name in resources:
            if name in self._resources:
                self._resources[name].handed_to.add(stream)

    def do(
        self,
        by: str,
        stream: StreamName,
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        makes: Iterable[str] = (),
    ) -> None:
        """Issue a piece of work on a stream.

        Args:
            by: Name of the work, for errors.
            stream: Where it runs.
            reads: Resources that it reads.
            writes: Resources that it writes, read or not.
            makes: Resources that it allocates and writes; of an earlier one of that name nothing is left.

        Raises:
            RaceError: Nothing orders it after an earlier access of the same resource, one of both a write; or the
                memory is another stream's and was not handed over.
        """
        time = self._clocks[stream][stream] = self._clocks[stream][stream] + 1
        read, write = (Access(by, writes, stream, time) for writes in (False, True))
        for name in reads:
            self._use(name, read)
        for name in writes:
            self._use(name, write)
        for name in makes:
            self._resources[name] = _Resource(write, made=write)

    def _use(self, name: str, access: Access) -> None:
        resource = self._resources.setdefault(name, _Resource())
        self._check_owner(name, resource, access)
        if resource.last_write is not None:
            self._check_order(name, resource.last_write, access)
        if not access.writes:
            resource.reads[access.stream] = access
            return
        for read in resource.reads.values():
            self._check_order(name, read, access)
        resource.last_write = access
        resource.reads.clear()

    def _check_owner(self, name: str, resource: _Resource, access: Access) -> None:
        made = resource.made
        if made is None or access.stream is made.stream or access.stream in resource.handed_to:
            return
        raise RaceError(
            f"memory of {name} was made on {made.stream} by {made.by} and not handed to {access.stream}, where it is "
            f"used by {access}: the allocator may give it to other work of {made.stream} meanwhile. Missing: "
            f"streams.record_stream(..., {access.stream})"
        )

    def _check_order(self, name: str, first: Access, second: Access) -> None:
        if self._clocks[second.stream].get(first.stream, 0) >= first.time:
            return
        raise RaceError(
            f"no event orders {second} after {first}: a race for {name}. Missing: streams.wait({second.stream}, "
            f"event) with an event recorded on {first.stream} after {first.by}"
        )


# -- streams --------------------------------------------------------------------------------------------------------


class RecordedEvent(NamedTuple):
    """An event of a stream, and how far that stream could look back."""

    stream: StreamName
    clock: Clock


class RacingStreams(Streams):
    """Streams of a run on a CPU whose waits and hand-overs count for `Races`; subclasses say what work there is.

    All work runs on the calling thread, and counts as work of the stream that would be current on a device.

    Args:
        lookup: The stream that `StreamName.LOOKUP` stands for, as a stream policy says.
    """

    is_async = True  # as on the device that it stands for

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self._lookup = lookup
        self._current = StreamName.COMPUTE
        self._races = Races()

    def __getitem__(self, name: StreamName) -> StreamName:
        return self._lookup if name is StreamName.LOOKUP else name

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Make a stream current."""
        previous = self._current
        self._current = self[name]
        try:
            yield
        finally:
            self._current = previous

    def memory_of(self, value: Any) -> Iterable[str]:
        """Return the resources of a value, nested or not; subclasses say how."""
        raise NotImplementedError

    def record(self, name: StreamName) -> RecordedEvent:
        """Return an event that marks all work issued on a stream so far."""
        return RecordedEvent(self[name], self._races.event(self[name]))

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        """Order later work on a stream after an event."""
        if event is not None:
            self._races.wait(self[name], event.clock)

    def record_stream(self, value: Any, name: StreamName) -> None:
        """Let a stream use the memory of a value that was made on another one."""
        self._races.record_stream(self.memory_of(value), self[name])

    def hand_to_caller(self, value: Any, event: RecordedEvent) -> None:
        """Let the compute stream and the current one use a value from an event on."""
        for name in dict.fromkeys((StreamName.COMPUTE, self._current)):
            self.wait(name, event)
            self.record_stream(value, name)
