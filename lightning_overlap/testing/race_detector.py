"""Find races between streams with vector clocks.

Source: the happens-before order of Lamport (1978) in vector clocks, and the last-access bookkeeping of FastTrack
(Flanagan and Freund, PLDI 2009), without its compressed clocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..schedules import StreamName

Clock = Mapping[StreamName, int]  # stream -> how much of its work a stream or event knows to be over


class RaceError(AssertionError):
    """Two streams use the same memory without an event or `record_stream`; the message names the missing call."""


class Access(NamedTuple):
    """One piece of work that uses a resource."""

    by: str
    writes: bool
    stream: StreamName
    time: int  # on the stream's clock

    def __str__(self) -> str:
        return f"{self.by} ({'writes' if self.writes else 'reads'} on {self.stream})"


@dataclass(slots=True)
class _Resource:
    made: Access | None = None  # the allocation; None if it exists for the whole run
    handed_to: set[StreamName] = field(default_factory=set)
    latest: dict[tuple[StreamName, bool], Access] = field(default_factory=dict)
    """The last write, and the last read of each stream since; by stream and whether it writes."""


class Races:
    """Follows streams, events and accesses. A resource is memory, of the stream that allocates it."""

    def __init__(self, *, frees: bool = False) -> None:
        """`frees`: whether the caller says which memory is freed; only then can the allocator reuse it."""
        self._clocks = {name: dict.fromkeys(StreamName, 0) for name in StreamName}
        self._resources: dict[str, _Resource] = {}
        self._frees = frees
        self.not_recorded: dict[str, RaceError] = {}  # resources used on a stream that they were not recorded on

    def event(self, stream: StreamName) -> Clock:
        """Return a copy of a stream's clock."""
        return dict(self._clocks[stream])

    def wait(self, stream: StreamName, event: Clock) -> None:
        """Let a stream wait for an event; it then knows the work before the event."""
        clock = self._clocks[stream]
        for other, time in event.items():
            clock[other] = max(clock[other], time)

    def record_stream(self, resources: Iterable[str], stream: StreamName) -> None:
        """Let a stream use memory that another stream allocated."""
        for name in resources:
            if name in self._resources:
                self._resources[name].handed_to.add(stream)

    def free(self, resource: str) -> None:
        """Free memory, or raise a RaceError if the allocator may reuse it too early."""
        if resource in self.not_recorded:
            raise self.not_recorded.pop(resource)

    def maker(self, resource: str) -> StreamName | None:
        """Return the stream that has allocated a resource; None if it exists for the whole run."""
        known = self._resources.get(resource)
        return None if known is None or known.made is None else known.made.stream

    def do(
        self,
        by: str,
        stream: StreamName,
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        makes: Iterable[str] = (),
    ) -> None:
        """Issue work named `by`, or raise a RaceError; what it `makes` replaces resources of the same name."""
        self._clocks[stream][stream] += 1
        read, write = (Access(by, is_write, stream, self._clocks[stream][stream]) for is_write in (False, True))
        for name, access in (*((name, read) for name in reads), *((name, write) for name in writes)):
            resource = self._resources.setdefault(name, _Resource())
            made = resource.made
            if made is not None and stream not in (made.stream, *resource.handed_to):
                error = RaceError(
                    f"{access} uses the memory of {name}, which {made.by} allocated on {made.stream}: the allocator "
                    f"may reuse it for other work on {made.stream}. Missing: streams.record_stream(..., {stream})"
                )
                if not self._frees:
                    raise error
                self.not_recorded.setdefault(name, error)
            for first in resource.latest.values():
                if (first.writes or access.writes) and self._clocks[stream][first.stream] < first.time:
                    raise RaceError(
                        f"no event orders {access} after {first}: a race for {name}. Missing: streams.wait({stream},"
                        f" event) with an event recorded on {first.stream} after {first.by}"
                    )
            if access.writes:
                resource.latest.clear()
            resource.latest[stream, access.writes] = access
        for name in makes:
            self._resources[name] = _Resource(write, latest={(stream, True): write})
