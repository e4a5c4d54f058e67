"""What happened in a run, recorded: the timeline of its stages, and streams that know what is ordered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ..schedule import Schedule
from ..stages import Stage, StreamName, WeightOwner

FAKE_MODULES: Mapping[str, frozenset[WeightOwner]] = MappingProxyType(
    {
        "fused": frozenset({WeightOwner.FUSED_BACKWARD}),
        "dense": frozenset({WeightOwner.DENSE_OPTIMIZER}),
        "both": frozenset(WeightOwner),
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

    LETTERS: Mapping[Stage, str] = MappingProxyType(dict(zip(Stage, "CSDLFBO", strict=True)))

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events: list[TimelineEvent] = []

    def record(self, kind: str, stage: Stage, batch: int) -> None:
        """Take one event: this is an `Observer`."""
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
        step = self.schedule.row(stage)
        return "host waits" if kind == "wait" else str(StreamName.COMPUTE if step is None else step.stream)


class Mark(NamedTuple):
    """A piece of fake device work: a stage of a batch, the update that a batch makes, or a load of weights (None)."""

    what: Stage | WeightOwner | None
    batch: int
    module: str = ""
    nth: int = 0
    """Counts the forwards and backwards of one step; of lookups, 0 is the early one."""


LOADED_WEIGHTS = Mark(None, -1)
"""What the compute stream did to the tables before a run: a checkpoint was loaded, weights were initialized."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A stream event, and the work that is over once it is."""

    stream: StreamName
    over: frozenset[Mark]


class RecordingStreams:
    """Stands in for a device's streams: logs every call, and knows which work is ordered before which.

    Args:
        lookup: The stream that `StreamName.LOOKUP` stands for, as a stream policy says.
    """

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        self.log: list[tuple[str, StreamName, Any]] = []
        self.before: dict[Mark, frozenset[Mark]] = {}
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
        event = RecordedEvent(self[name], self._known[self[name]])
        self.log.append(("record", self[name], event))
        return event

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        """Order later work on a stream behind an event."""
        if event is not None:
            self.log.append(("wait", self[name], event))
            self._known[self[name]] |= event.over

    def hand_over(self, value: Any, name: StreamName) -> None:
        """Log that a stream is going to read a value."""
        text = f"batch {value.index}" if isinstance(value, FakeBatch) else "input"  # a log must not keep a batch alive
        self.log.append(("hand_over", self[name], text))

    def begin_step(self) -> None:
        """Log the begin of a step."""
        self.log.append(("begin_step", StreamName.COMPUTE, None))

    def do(self, mark: Mark) -> None:
        """Issue a piece of work on the current stream."""
        self.log.append(("do", self._current, mark))
        self.before[mark] = self._known[self._current]
        self._known[self._current] |= {mark}

    def is_before(self, first: Mark, second: Mark) -> bool:
        """Whether streams and events let `second` start only after `first`."""
        return first in self.before[second]


@dataclass(eq=False)
class FakeBatch:
    """A batch: its number, and the modules that it has input for."""

    index: int
    modules: tuple[str, ...] = tuple(FAKE_MODULES)
