"""Record a fake run: the timeline of its stages, and streams that know what is ordered before what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ..runtime import HostStreams
from ..schedules import EARLY_OWNERS, Schedule, Stage, StreamName, WeightOwner
from .race_detector import Clock, Races

FAKE_MODULES: Mapping[str, frozenset[WeightOwner]] = MappingProxyType(
    {
        "fused": frozenset({WeightOwner.FUSED_BACKWARD}),
        "dense": frozenset({WeightOwner.DENSE_OPTIMIZER}),
        "both": EARLY_OWNERS,
    }
)
"""Modules of a `FakeSparse`: who writes the tables of each."""

TimelineEvent = tuple[str, Stage, int]
"""("issue" | "wait", stage, batch), as an observer gets it."""


class Timeline:
    """Collects what an observer is told, and draws it.

    Pass `timeline.record` as the `observer` of an executor or of the strategy.

    Args:
        schedule: Says which stream each stage is on.
    """

    LETTERS: Mapping[Stage, str] = MappingProxyType(dict(zip(Stage, "CSDPLFBOU", strict=True)))

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events: list[TimelineEvent] = []

    def record(self, kind: str, stage: Stage, batch: int) -> None:
        """Add an event: an `Observer`.

        Args:
            kind: "issue" or "wait".
            stage: The stage that is issued or waited for.
            batch: Number of its batch.
        """
        self.events.append((kind, stage, batch))

    def issued(self) -> list[str]:
        """Return the issues in order, short: `C0` is the copy of batch 0 (see `LETTERS`)."""
        return [f"{self.LETTERS[stage]}{batch}" for kind, stage, batch in self.events if kind == "issue"]

    def draw(self, width: int = 118) -> str:
        """Draw the events from left to right in the order the host made them, one lane per stream.

        Args:
            width: Characters per line; longer runs continue in another block of lanes.
        """
        lanes = [str(name) for name in StreamName if any(step.stream is name for step in self.schedule)]
        lanes += ["host waits"] if any(kind == "wait" for kind, _, _ in self.events) else []
        title = max(map(len, lanes))
        cells = [(self._lane(kind, stage), f"{self.LETTERS[stage]}{batch}") for kind, stage, batch in self.events]
        cell_width = max((len(text) for _, text in cells), default=2) + 1
        per_block = max(1, (width - title - 2) // cell_width)
        blocks = []
        for start in range(0, max(1, len(cells)), per_block):
            block = cells[start : start + per_block]
            for lane in lanes:
                row = "".join((text if where == lane else "").ljust(cell_width) for where, text in block)
                blocks.append(f"{lane:{title}s} |{row}".rstrip())
        return "\n".join(blocks)

    def _lane(self, kind: str, stage: Stage) -> str:
        step = self.schedule.step_of(stage)
        return "host waits" if kind == "wait" else str(StreamName.COMPUTE if step is None else step.stream)


class Mark(NamedTuple):
    """A piece of fake device work: a stage of a batch, the update that a batch makes, or a load of weights (None)."""

    what: Stage | WeightOwner | str | None
    batch: int
    module: str = ""
    nth: int = 0
    """Counts the forwards and backwards of one step; of lookups, 0 is the early one."""

    def __str__(self) -> str:
        if self == LOADED_WEIGHTS:
            return "the load of the weights before the run"
        what = f"the update by {self.what.value}" if isinstance(self.what, WeightOwner) else str(self.what)
        return f"{what} of batch {self.batch}" + (f" ({self.module})" if self.module else "")


LOADED_WEIGHTS = Mark(None, -1)
"""What the compute stream did to the tables before a run: a checkpoint was loaded, weights were initialized."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A stream event, and the work that is over once it is."""

    stream: StreamName
    over: frozenset[Mark]
    clock: Clock
    """What the stream knew of all streams' work."""


class RecordingStreams(HostStreams):
    """Stands in for a device's streams: logs every call, knows what is ordered before what, raises at a race.

    Args:
        lookup: The stream that `StreamName.LOOKUP` stands for, as a stream policy says.
    """

    is_async = True

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self.log: list[tuple[str, StreamName, Any]] = []
        self.before: dict[Mark, frozenset[Mark]] = {}
        self._races = Races()
        self._lookup = lookup
        self._current = StreamName.COMPUTE
        self._known: dict[StreamName, frozenset[Mark]] = dict.fromkeys(StreamName, frozenset())

    def __getitem__(self, name: StreamName) -> StreamName:
        return self._lookup if name is StreamName.LOOKUP else name

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Make a stream current."""
        previous, self._current = self._current, self[name]
        self.log.append(("on", self._current, None))
        try:
            yield
        finally:
            self._current = previous

    def record(self, name: StreamName) -> RecordedEvent:
        """Return an event that knows all work issued on a stream so far."""
        event = RecordedEvent(self[name], self._known[self[name]], self._races.event(self[name]))
        self.log.append(("record", self[name], event))
        return event

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        """Order later work on a stream after an event."""
        if event is not None:
            self.log.append(("wait", self[name], event))
            self._known[self[name]] |= event.over
            self._races.wait(self[name], event.clock)

    def record_stream(self, value: Any, name: StreamName) -> None:
        """Let a stream use the memory of a value that was made on another one."""
        self._races.record_stream(memory_of(value), self[name])
        text = f"batch {value.index}" if isinstance(value, FakeBatch) else "input"  # a log must not keep a batch alive
        self.log.append(("record_stream", self[name], text))

    def hand_to_caller(self, value: Any, event: Any) -> None:
        """Let the compute stream use a value from an event on."""
        self.wait(StreamName.COMPUTE, event)
        self.record_stream(value, StreamName.COMPUTE)

    def begin_step(self) -> None:
        """Log the begin of a step."""
        self.log.append(("begin_step", StreamName.COMPUTE, None))

    def do(
        self, mark: Mark, *, reads: Iterable[str] = (), writes: Iterable[str] = (), makes: Iterable[str] = ()
    ) -> None:
        """Issue a piece of work on the current stream, with all that it uses.

        Args:
            mark: Names the work in errors.
            reads: Resources that it reads.
            writes: Resources that it writes.
            makes: Memory that it allocates and writes; another stream uses it after a `record_stream`.

        Raises:
            RaceError: An earlier piece of work used one of them, and nothing orders this one after it.
        """
        self.log.append(("do", self._current, mark))
        self.before[mark] = self._known[self._current]
        self._known[self._current] |= {mark}
        self._races.do(str(mark), self._current, reads=reads, writes=writes, makes=makes)

    def is_before(self, first: Mark, second: Mark) -> bool:
        """Whether streams and events let `second` start only after `first`."""
        return first in self.before[second]


@dataclass(eq=False)
class FakeBatch:
    """A batch: its number, and the modules that it has input for."""

    index: int
    modules: tuple[str, ...] = tuple(FAKE_MODULES)

    @property
    def memory(self) -> tuple[str, ...]:
        """The resource that it stands for."""
        return (f"batch {self.index}",)


def memory_of(value: Any) -> list[str]:
    """Return the resources of fake values, nested in lists; a value has them as `memory`."""
    if isinstance(value, list):
        return [name for part in value for name in memory_of(part)]
    return list(getattr(value, "memory", ()))
