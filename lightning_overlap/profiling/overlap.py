"""Compute how much of the communication, lookups and copies in a window of a timeline was hidden."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, Self

from ..schedules import Schedule, Stage
from .spans import (
    HOST_LANE,
    LOG,
    Category,
    Interval,
    Span,
    covered,
    exclusive_in,
    intersection,
    is_for_embeddings,
    length,
    subtract,
)

COVERED_BY: Mapping[Category, frozenset[Category]] = MappingProxyType(
    {
        Category.COMMUNICATION: frozenset({Category.DENSE, Category.LOOKUP}),
        Category.LOOKUP: frozenset({Category.DENSE}),
        Category.COPY: frozenset({Category.DENSE, Category.LOOKUP}),
    }
)
"""What hides a kind: time of these on other lanes. Nothing hides dense work: the rest overlaps with it."""


class _Sums:
    """Numbers that are added and divided field by field."""

    __slots__: tuple[str, ...] = ()

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __truediv__(self, num: int) -> Self:
        return type(self)(*(getattr(self, name) / num for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class BusyTime(_Sums):
    """Milliseconds of one stage or kind.

    Args:
        busy_ms: How long it was under way.
        hidden_ms: How much of that the mode has overlapped with other work.
        elsewhere_ms: How much more went on beside other work, but not by the mode's doing: by autograd's order, say.
    """

    busy_ms: float = 0.0
    hidden_ms: float = 0.0
    elsewhere_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        """The busy time during which nothing ran that could hide it."""
        return self.busy_ms - self.hidden_ms - self.elsewhere_ms

    @property
    def hidden_fraction(self) -> float:
        """Share of the busy time that was hidden; 1 where there was none."""
        return self.hidden_ms / self.busy_ms if self.busy_ms else 1.0


@dataclass(frozen=True, slots=True)
class Traffic(_Sums):
    """Bytes that a rank sends to others."""

    sent: float = 0.0
    saved: float = 0.0
    """Those that it would have sent besides, in full precision."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a window went, per step.

    Args:
        step_ms: The window's length.
        categories: Busy and hidden time by category; `Category.HOST` is all the time that the host did not
            wait.
        stages: The same by stage.
        merge_wait_ms: How long the dense forward waited for embeddings.
        blocked_ms: How long the host waited for other ranks or the device, in all.
        traffic: What this rank sent to others, by the stage that issued it, where it was counted.
        loop_ms: How long the host was in no stage and no call of `self.log`: Lightning's loop, callbacks, loggers.
        log_ms: How long it was in `self.log`.
    """

    step_ms: float
    categories: Mapping[Category, BusyTime]
    stages: Mapping[Stage, BusyTime]
    merge_wait_ms: float = 0.0
    blocked_ms: float = 0.0
    traffic: Mapping[Stage, Traffic] = field(default_factory=dict)
    loop_ms: float = 0.0
    log_ms: float = 0.0

    def time_of(self, kind: Category) -> BusyTime:
        """What a kind took; nothing if it was not seen."""
        return self.categories.get(kind, BusyTime())

    @property
    def bound(self) -> tuple[str, float]:
        """The busiest resource and its milliseconds: no overlap makes a step shorter than that."""
        kind, times = max(self.categories.items(), key=lambda item: item[1].busy_ms)
        return str(kind), times.busy_ms

    @property
    def to_gain_ms(self) -> float:
        """What a perfect overlap would still save."""
        return max(0.0, self.step_ms - self.bound[1])


def overlapped_by(schedule: Schedule) -> frozenset[Stage]:
    """Return the stages that a mode overlaps with others: those of coming batches, and what a deferred update awaits.

    Without a deferred update the backward of a batch waits for its gradients. What of their way autograd covers with
    the rest of the backward, it covers in every mode, `base` too.
    """
    early = {step.stage for step in schedule.steps if step.offset > 0}
    if schedule.step_of(Stage.EMBEDDING_UPDATE) is not None:
        early |= {Stage.BACKWARD, Stage.EMBEDDING_UPDATE}
    return frozenset(early)


@dataclass(frozen=True, slots=True)
class Price:
    """What a step would take with something changed.

    Args:
        name: A mode, or what would be changed, in words.
        ms: A step.
        error_ms: How far that may be off.
        staleness: Of the mode.
    """

    name: str
    ms: float
    error_ms: float
    staleness: int = 0

    def __str__(self) -> str:
        return f"{self.ms:.3g} +- {self.error_ms:.2g} ms"


def break_down(
    spans: Iterable[Span],
    window: Interval,
    *,
    overlapped: Collection[Stage] | None = None,
    num_steps: int = 1,
    host_lane: str = HOST_LANE,
    merge_lanes: Sequence[str] = (HOST_LANE, "compute"),
) -> Breakdown:
    """Say where the time of a window of a timeline went.

    Args:
        spans: All that was seen, also what began before the window or ended after it.
        window: Begin and end, milliseconds; for example from one step's beginning to the next one's.
        overlapped: Stages that the mode overlaps, as `overlapped_by` gives them: time counts as hidden where it, or
            what goes on beside it, is of such a stage. None: whatever ran, all that goes on beside other work is.
        num_steps: Steps in the window; all times are per step.
        host_lane: The lane whose waits block the host.
        merge_lanes: The lanes of the dense part, whose waits for embeddings are those at the merge.

    Source: the interval sweep of HolisticTraceAnalysis, which has communication alone; here each kind has its own
    cover, and inner spans take their time from outer ones.
    """
    own = exclusive_in(spans, window)
    by_kind = {kind: covered(span for span in own if span.kind is kind) for kind in Category}

    covers = {kind: cover(own, window, kind, host_lane=host_lane) for kind in COVERED_BY}
    early = [span for span in own if span.stage in (overlapped or ()) and span.kind is not Category.WAIT]
    by_mode = {  # of communication, also where what goes on beside it is of an overlapped stage
        kind: covered(span for span in early if kind is Category.COMMUNICATION or span.kind is kind)
        for kind in COVERED_BY
    }
    blocked = _blocked(own, host_lane)

    def times(of: Sequence[Interval], kind: Category) -> BusyTime:
        beside = intersection(of, covers.get(kind, ()))
        hidden = beside if overlapped is None else intersection(beside, by_mode.get(kind, ()))
        return BusyTime(length(of), length(hidden), length(beside) - length(hidden)) / num_steps

    categories = {kind: times(by_kind[kind], kind) for kind in (Category.DENSE, *COVERED_BY)}
    on_host = [span for span in own if span.lane == host_lane and span.kind is not Category.COMMUNICATION]
    for_data = covered(span for span in on_host if span.kind is Category.DATA)
    if for_data:
        categories[Category.DATA] = BusyTime(length(for_data) / num_steps)
    categories[Category.HOST] = BusyTime((window[1] - window[0] - length(blocked) - length(for_data)) / num_steps)
    loop_ms = length(subtract([window], covered(on_host))) / num_steps
    log_ms = sum(span.duration_ms for span in on_host if span.name == LOG) / num_steps
    stages: dict[Stage, BusyTime] = {}
    for stage in Stage:
        idle = (Category.WAIT, Category.DATA)
        parts = [span for span in own if span.stage is stage and span.kind not in idle]
        if parts:
            per_kind = [
                times(covered(span for span in parts if span.kind is kind), kind)
                for kind in {span.kind for span in parts}
            ]
            stages[stage] = sum(per_kind, BusyTime())
    waits = [span for span in own if span.kind is Category.WAIT and span.lane in merge_lanes]
    merge = covered(span for span in waits if is_for_embeddings(span.name))
    return Breakdown(
        (window[1] - window[0]) / num_steps,
        categories,
        stages,
        length(merge) / num_steps,
        length(blocked) / num_steps,
        loop_ms=loop_ms,
        log_ms=log_ms,
    )


def cover(own: Sequence[Span], window: Interval, kind: Category, *, host_lane: str = HOST_LANE) -> list[Interval]:
    """Return the intervals in which a category of work is hidden.

    Where the host does the dense part itself, as on a CPU (its lane has dense spans), all that it does has to be done:
    communication is hidden while the host does not wait. `own` is what `exclusive_in` gives of the window.
    """
    host_computes = any(span.kind is Category.DENSE and span.lane == host_lane for span in own)
    if kind is Category.COMMUNICATION and host_computes:
        return subtract([window], _blocked(own, host_lane))
    return covered(span for span in own if span.kind in COVERED_BY[kind])


def _blocked(own: Iterable[Span], host_lane: str) -> list[Interval]:
    return covered(span for span in own if span.kind is Category.WAIT and span.lane == host_lane)


def mean(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the mean of breakdowns of one step each.

    Raises:
        ValueError: There are none.
    """
    if not breakdowns:
        raise ValueError("the mean of no breakdowns: no step has been measured.")
    num = len(breakdowns)

    def mean_of(name: str) -> Any:
        values = [getattr(one, name) for one in breakdowns]
        if not isinstance(values[0], Mapping):
            return sum(values) / num
        keys = [key for key in (*Category, *Stage) if any(key in value for value in values)]
        return {key: reduce(add, [value[key] for value in values if key in value]) / num for key in keys}

    return Breakdown(*(mean_of(field.name) for field in fields(Breakdown)))
