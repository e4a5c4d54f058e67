"""Record a fake run: the timeline of its stages, and streams that are told what each piece of work uses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_overlap.schedules import EARLY_OWNERS, Schedule, Stage, StreamName, WeightOwner
from lightning_overlap.testing import CheckedStreams
from lightning_overlap.testing.race_detector import Races

_FUSED, _DENSE = frozenset({WeightOwner.FUSED_BACKWARD}), frozenset({WeightOwner.DENSE_OPTIMIZER})
FAKE_MODULES: Mapping[str, frozenset[WeightOwner]] = {"fused": _FUSED, "dense": _DENSE, "both": EARLY_OWNERS}
"""Modules of a `FakeSparse`: who writes the tables of each."""


class Timeline:
    LETTERS = dict(zip(Stage, "CSDPLFBWOU", strict=True))  # noqa: RUF012

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events: list[tuple[str, Stage, int]] = []  # ("issue" | "wait", stage, batch), as an observer gets it

    def record(self, kind: str, stage: Stage, batch: int) -> None:
        self.events.append((kind, stage, batch))

    def issued(self) -> list[str]:
        """Return the issues in order, short: `C0` is the copy of batch 0 (see `LETTERS`)."""
        return [f"{self.LETTERS[stage]}{batch}" for kind, stage, batch in self.events if kind == "issue"]

    def draw(self) -> str:
        lanes = [str(name) for name in StreamName if any(step.stream is name for step in self.schedule)]
        lanes += ["host waits"] if any(kind == "wait" for kind, _, _ in self.events) else []
        title = max(map(len, lanes))
        cells = [(self._lane(kind, stage), f"{self.LETTERS[stage]}{batch}") for kind, stage, batch in self.events]
        width = max((len(text) for _, text in cells), default=2) + 1
        rows = {lane: "".join((text if where == lane else "").ljust(width) for where, text in cells) for lane in lanes}
        return "\n".join(f"{lane:{title}s} |{row}".rstrip() for lane, row in rows.items())

    def _lane(self, kind: str, stage: Stage) -> str:
        step = self.schedule.step_of(stage)
        return "host waits" if kind == "wait" else str(StreamName.COMPUTE if step is None else step.stream)


class Mark(NamedTuple):
    """A piece of fake device work: a stage of a batch, the update that a batch makes, or a load of weights."""

    what: Stage | WeightOwner | str
    batch: int
    module: str = ""

    def __str__(self) -> str:
        what = f"the update by {self.what.value}" if isinstance(self.what, WeightOwner) else str(self.what)
        return f"{what} of batch {self.batch}" + (f" ({self.module})" if self.module else "")


class RecordingStreams(CheckedStreams):
    """Stands in for a device's streams where the work is fake: raises at a race."""

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        super().__init__(lookup)
        self._races = Races()  # no fake memory is freed: every use has to be recorded

    def do(
        self, mark: Mark, *, reads: Iterable[str] = (), writes: Iterable[str] = (), makes: Iterable[str] = ()
    ) -> None:
        self._races.do(str(mark), self._current, reads=reads, writes=writes, makes=makes)

    def memory_of(self, value: Any) -> list[str]:
        return memory_of(value)


@dataclass(eq=False)
class FakeBatch:
    index: int
    modules: tuple[str, ...] = tuple(FAKE_MODULES)

    @property
    def memory(self) -> tuple[str, ...]:
        return (f"batch {self.index}",)


def memory_of(value: Any) -> list[str]:
    """Return the resources of fake values, nested in lists: their names, or what has them as `memory`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [name for part in value for name in memory_of(part)]
    return list(getattr(value, "memory", ()))
