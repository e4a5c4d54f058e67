"""Compute how much communication, lookup and copy time in a window of a timeline was hidden."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from operator import add
from typing import Any, Self

from ..schedules import Schedule, Stage
from .spans import EMBEDDINGS, HOST_LANE, LOG, Category, Interval, Span, exclusive, moments

COVERED_BY: Mapping[Category, frozenset[Category]] = {  # category -> categories that hide it from other lanes
    Category.COMMUNICATION: frozenset({Category.DENSE, Category.LOOKUP}),
    Category.LOOKUP: frozenset({Category.DENSE}),
    Category.COPY: frozenset({Category.DENSE, Category.LOOKUP}),
}


@dataclass(frozen=True, slots=True)
class BusyTime:
    """Times of a stage or category, and the bytes that it sends to other ranks."""

    busy_ms: float = 0.0
    hidden_ms: float = 0.0  # the mode overlaps it with other work
    elsewhere_ms: float = 0.0  # overlaps with other work in any mode, for example by autograd's order
    sent: float = 0.0
    saved: float = 0.0  # additional bytes that full precision would send

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, astuple(self), astuple(other)))

    def __truediv__(self, num: int) -> Self:
        return type(self)(*(value / num for value in astuple(self)))

    @property
    def exposed_ms(self) -> float:
        """Busy time without other work that hides it."""
        return max(0.0, self.busy_ms - self.hidden_ms - self.elsewhere_ms)

    @property
    def hidden_fraction(self) -> float:
        """Hidden share of the busy time; 1 without busy time."""
        return self.hidden_ms / self.busy_ms if self.busy_ms else 1.0


@dataclass(frozen=True, slots=True)
class Block:
    """All waits of the host at one place in the program."""

    name: str
    stage: Stage | None
    detail: str
    total_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The times of a window, per step."""

    step_ms: float
    categories: Mapping[Category, BusyTime]  # `Category.HOST` is the time in which the host did not wait
    stages: Mapping[Stage, BusyTime]
    merge_wait_ms: float = 0.0  # the dense forward waited for embeddings
    blocked_ms: float = 0.0  # the host waited for other ranks or the device
    loop_ms: float = 0.0  # the host outside stages and `self.log`: Lightning's loop, callbacks, loggers
    log_ms: float = 0.0  # the host in `self.log`
    overlapped: Collection[Stage] | None = None  # by the mode; other stages are never hidden. None if unknown
    num_steps: int = 1
    blocks: Sequence[Block] = ()  # what blocked the host in all steps, longest first; only from `summarize`

    @property
    def overlaps(self) -> bool:
        """Whether anything can be hidden; True if unknown."""
        return self.overlapped is None or bool(self.overlapped)

    @property
    def traffic(self) -> dict[Stage, BusyTime]:
        """The stages that sent counted bytes to other ranks."""
        return {stage: times for stage, times in self.stages.items() if times.sent}

    @property
    def bound(self) -> tuple[Category, float]:
        """The busiest category and its ms, a lower bound of a step with perfect overlap."""
        kind, times = max(self.categories.items(), key=lambda item: item[1].busy_ms)
        return kind, times.busy_ms

    @property
    def to_gain_ms(self) -> float:
        """Time per step that a perfect overlap would save."""
        return max(0.0, self.step_ms - self.bound[1])


def overlapped_by(schedule: Schedule) -> frozenset[Stage]:
    """Return the stages that a mode overlaps: those for later batches; with deferred updates also gradients."""
    early = {step.stage for step in schedule.steps if step.offset > 0}
    # Else the backward waits for gradients. Autograd may overlap a part of that wait, but does so in `base` as well.
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
    """Break the time of a window of `num_steps` steps down by category and stage.

    Time counts as hidden if a stage in `overlapped` is involved; if None, all time that overlaps other work counts.

    Source: the interval sweep of HolisticTraceAnalysis for communication; here other categories can be hidden as well,
    and inner spans take their time from outer spans.
    """
    spans = list(spans)
    # (category, stage or None for all stages) -> arguments of `BusyTime`; category, `LOG` or None -> the host's time.
    found: defaultdict[tuple[Category, Stage | None], list[float]] = defaultdict(lambda: [0.0] * len(fields(BusyTime)))
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
        on_host = [one for one in under_way if one.lane == host_lane and one.kind is not Category.COMMUNICATION]
        host_ms[next((LOG if one.name == LOG else one.kind for one in on_host), None)] += ms
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
    for stage in Stage:
        kinds = [kind for kind, of in busy if of is stage and kind not in (Category.WAIT, Category.DATA)]
        if kinds:
            stages[stage] = sum((busy[kind, stage] for kind in kinds), BusyTime())
    merge_ms, blocked_ms, loop_ms, log_ms = (
        ms / num_steps for ms in (merge_ms, blocked_ms, host_ms[None], host_ms[LOG])
    )
    step_ms = length_ms / num_steps
    return Breakdown(step_ms, categories, stages, merge_ms, blocked_ms, loop_ms, log_ms, overlapped, num_steps)


def sweep(
    own: Sequence[Span], window: Interval, host_lane: str = HOST_LANE
) -> Iterator[tuple[Interval, list[Span], set[Category]]]:
    """Yield `moments` of a window's `exclusive` spans, each with the categories that are hidden if in progress."""
    # If the host computes the dense part, as on a CPU, communication is hidden whenever the host does not wait.
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
        raise ValueError("there is no breakdown to average: no step was measured.")
    num = len(breakdowns)

    def mean_of(*values: Any) -> Any:
        if isinstance(values[0], float | int):
            return sum(values) / num
        if not isinstance(values[0], Mapping):
            return values[0]
        keys = [key for key in (*Category, *Stage) if any(key in value for value in values)]
        return {key: sum((value[key] for value in values if key in value), BusyTime()) / num for key in keys}

    return Breakdown(*(mean_of(*(getattr(one, field.name) for one in breakdowns)) for field in fields(Breakdown)))
