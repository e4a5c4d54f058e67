"""Compute how much of the communication, lookups and copies in a window of a timeline was hidden."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from ..schedules import Schedule, Stage
from .spans import EMBEDDINGS, HOST_LANE, LOG, Category, Interval, Span, exclusive, moments

COVERED_BY: Mapping[Category, frozenset[Category]] = {
    Category.COMMUNICATION: frozenset({Category.DENSE, Category.LOOKUP}),
    Category.LOOKUP: frozenset({Category.DENSE}),
    Category.COPY: frozenset({Category.DENSE, Category.LOOKUP}),
}
"""Category -> the categories that hide it when they run on other lanes at the same time. Nothing hides dense work."""


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Milliseconds of one stage or kind, and the bytes that a stage sends to other ranks.

    Args:
        busy_ms: How long it was under way.
        hidden_ms: How much of that the mode has overlapped with other work.
        elsewhere_ms: How much more overlapped with other work without the mode: by autograd's order, say.
        sent: Bytes that it sent, if they were counted.
        saved: Bytes more that it would have sent in full precision.
    """

    busy_ms: float = 0.0
    hidden_ms: float = 0.0
    elsewhere_ms: float = 0.0
    sent: float = 0.0
    saved: float = 0.0

    def __add__(self, other: Self) -> Self:
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def __truediv__(self, num: int) -> Self:
        return replace(self, **{name: getattr(self, name) / num for name in self.__slots__})

    @property
    def exposed_ms(self) -> float:
        """The busy time during which nothing ran that could hide it."""
        return max(0.0, self.busy_ms - self.hidden_ms - self.elsewhere_ms)

    @property
    def hidden_fraction(self) -> float:
        """Share of the busy time that was hidden; 1 where there was none."""
        return self.hidden_ms / self.busy_ms if self.busy_ms else 1.0


@dataclass(frozen=True, slots=True)
class Block:
    """What the host waited for at one place of the program, which the name and detail of its spans tell."""

    name: str
    stage: Stage | None
    detail: str
    total_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a window went, per step.

    Args:
        step_ms: The window's length.
        categories: Busy and hidden time by category; `Category.HOST` is all the time that the host did not
            wait.
        stages: The same by stage, and what this rank sent to others.
        merge_wait_ms: How long the dense forward waited for embeddings.
        blocked_ms: How long the host waited for other ranks or the device, in all.
        loop_ms: How long the host was in no stage and no call of `self.log`: Lightning's loop, callbacks, loggers.
        log_ms: How long it was in `self.log`.
        overlapped: Stages that the mode overlaps, None where that is not known; of others none is said to be hidden.
        num_steps: Steps in the window.
        blocks: What blocked the host, most first, in all steps, where that was asked for.
    """

    step_ms: float
    categories: Mapping[Category, BusyTime]
    stages: Mapping[Stage, BusyTime]
    merge_wait_ms: float = 0.0
    blocked_ms: float = 0.0
    loop_ms: float = 0.0
    log_ms: float = 0.0
    overlapped: Collection[Stage] | None = None
    num_steps: int = 1
    blocks: Sequence[Block] = ()

    @property
    def total_ms(self) -> float:
        """Length of all steps."""
        return self.step_ms * self.num_steps

    @property
    def overlaps(self) -> bool:
        """Whether anything can be hidden, as far as that is known."""
        return self.overlapped is None or bool(self.overlapped)

    @property
    def traffic(self) -> dict[Stage, BusyTime]:
        """The stages that sent something to other ranks, where that was counted."""
        return {stage: times for stage, times in self.stages.items() if times.sent}

    @property
    def bound(self) -> tuple[Category, float]:
        """The busiest resource and its milliseconds: no overlap makes a step shorter than that."""
        kind, times = max(self.categories.items(), key=lambda item: item[1].busy_ms)
        return kind, times.busy_ms

    @property
    def to_gain_ms(self) -> float:
        """Time that a perfect overlap would still save, per step."""
        return max(0.0, self.step_ms - self.bound[1])


def overlapped_by(schedule: Schedule) -> frozenset[Stage]:
    """Return the stages that a mode overlaps with others: those of coming batches, and with deferred updates gradients.

    Without a deferred update the backward of a batch waits for its gradients. Autograd may overlap a part of that
    all-to-all with the rest of the backward, but does so in every mode, `base` too.
    """
    early = {step.stage for step in schedule.steps if step.offset > 0}
    if schedule.step_of(Stage.EMBEDDING_UPDATE) is not None:
        early |= {Stage.BACKWARD, Stage.EMBEDDING_UPDATE}
    return frozenset(early)


def break_down(
    spans: Iterable[Span],
    window: Interval,
    *,
    overlapped: Collection[Stage] | None = None,
    num_steps: int = 1,
    host_lane: str = HOST_LANE,
) -> Breakdown:
    """Break the time of a window of a timeline down by category and stage.

    Args:
        spans: All spans, also those that began before the window or ended after it.
        window: Begin and end, in milliseconds; for example from one step's beginning to the next one's.
        overlapped: Stages that the mode overlaps, from `overlapped_by`: time counts as hidden if it, or what overlaps
            with it, belongs to such a stage. None (the mode is not known): all time that overlaps counts as hidden.
        num_steps: Steps in the window; all times are per step.
        host_lane: The lane whose waits block the host.

    Source: the interval sweep of HolisticTraceAnalysis, which has communication alone; here each kind has its own
    cover, and inner spans take their time from outer ones.
    """
    spans = list(spans)
    # The numbers of a `BusyTime` by kind (of a stage, or of all), and what the host did, `LOG` and None among that.
    found: defaultdict[tuple[Category, Stage | None], list[float]] = defaultdict(lambda: [0.0] * 5)
    host_ms: defaultdict[str | None, float] = defaultdict(float)
    merge_ms = 0.0
    dense_lanes = {HOST_LANE, *(span.lane for span in spans if span.kind is Category.DENSE)}
    for (start_ms, end_ms), under_way, hidden in sweep(exclusive(spans, window), window, host_lane):
        ms = end_ms - start_ms
        early = {one.kind for one in under_way if one.stage in (overlapped or ()) and one.kind is not Category.WAIT}
        for kind, stage in {(one.kind, stage) for one in under_way for stage in (None, one.stage)}:
            times = found[kind, stage]
            times[0] += ms
            if kind in hidden:
                by_mode = overlapped is None or bool(early if kind is Category.COMMUNICATION else kind in early)
                times[1 if by_mode else 2] += ms
        of_host = [one for one in under_way if one.lane == host_lane and one.kind is not Category.COMMUNICATION]
        host_ms[next((LOG if one.name == LOG else one.kind for one in of_host), None)] += ms
        waits = [one.name for one in under_way if one.kind is Category.WAIT and one.lane in dense_lanes]
        merge_ms += ms * any(name.partition(":")[0] == EMBEDDINGS for name in waits)
    for span in spans:
        if span.stage is not None and span.sent_bytes and window[0] <= span.start_ms < window[1]:
            found[span.kind, span.stage][3] += span.sent_bytes
            found[span.kind, span.stage][4] += span.saved_bytes

    length_ms, blocked_ms, data_ms = window[1] - window[0], host_ms[Category.WAIT], host_ms[Category.DATA]
    busy = {key: BusyTime(*times) / num_steps for key, times in found.items()}
    categories = {kind: busy.get((kind, None), BusyTime()) for kind in (Category.DENSE, *COVERED_BY)}
    categories[Category.DATA] = BusyTime(data_ms / num_steps)
    categories[Category.HOST] = BusyTime((length_ms - blocked_ms - data_ms) / num_steps)
    stages: dict[Stage, BusyTime] = {}
    idle = (Category.WAIT, Category.DATA)
    for stage in Stage:
        parts = [times for (kind, of), times in busy.items() if of is stage and kind not in idle]
        if parts:
            stages[stage] = sum(parts, BusyTime())
    return Breakdown(
        length_ms / num_steps,
        categories,
        stages,
        merge_ms / num_steps,
        blocked_ms / num_steps,
        host_ms[None] / num_steps,
        host_ms[LOG] / num_steps,
        overlapped,
        num_steps,
    )


def sweep(
    own: Sequence[Span], window: Interval, host_lane: str = HOST_LANE
) -> Iterator[tuple[Interval, list[Span], set[Category]]]:
    """Yield the `moments` of a window, each with the categories that would be hidden in it.

    If the host does the dense part itself, as on a CPU (its lane has dense spans), communication is hidden whenever the
    host does not wait, since all its work has to be done anyway.

    Args:
        own: The spans of the window, from `exclusive`.
        window: Begin and end, in milliseconds.
        host_lane: The lane of the thread that trains.
    """
    host_computes = any(span.kind is Category.DENSE and span.lane == host_lane for span in own)
    for piece, under_way in moments(own, window):
        kinds = {span.kind for span in under_way}
        hidden = {kind for kind, by in COVERED_BY.items() if kinds & by}
        if host_computes:
            waits = any(span.kind is Category.WAIT and span.lane == host_lane for span in under_way)
            hidden = hidden - {Category.COMMUNICATION} if waits else hidden | {Category.COMMUNICATION}
        yield piece, under_way, hidden


def mean(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Return the mean of breakdowns of one step each."""
    if not breakdowns:
        raise ValueError("the mean of no breakdowns: no step has been measured.")
    num = len(breakdowns)

    def mean_of(name: str) -> Any:
        values = [getattr(one, name) for one in breakdowns]
        if isinstance(values[0], float | int):
            return sum(values) / num
        if not isinstance(values[0], Mapping):
            return values[0]
        keys = [key for key in (*Category, *Stage) if any(key in value for value in values)]
        return {key: sum((value[key] for value in values if key in value), BusyTime()) / num for key in keys}

    return Breakdown(*(mean_of(field.name) for field in fields(Breakdown)))
