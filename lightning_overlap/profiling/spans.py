"""Spans: what one lane (a stream, the host) was busy with and when; and arithmetic on intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

from ..schedules import Stage

Interval = tuple[float, float]
"""Begin and end, milliseconds."""

HOST_LANE = "host"
"""The thread that trains."""

ALL_TO_ALLS = ("sizes", "ids", "embeddings", "gradients")
"""What the all-to-alls of a step carry, in their order."""

LOG = "self.log"
"""Name of the spans of a module's `log`."""

EMBEDDINGS = "embeddings"
"""Name of the all-to-all of embeddings, and of a wait for it; after a colon more can follow."""


class Category(Enum):
    """What a resource was busy with."""

    DENSE = "dense"
    """The model's dense part: forward, backward with the fused update in it, optimizer step."""

    LOOKUP = "lookup"
    """Reading the tables (TBE forward)."""

    COMMUNICATION = "communication"
    """A collective, from its start to its end."""

    COPY = "copy"
    """A copy between host and device or within the device; on a CPU, fetching and staging the batch."""

    DATA = "data"
    """The host waits for the next batch of the data loader, or makes it."""

    WAIT = "wait"
    """A lane that has nothing to do before something else ends: exposed time."""

    HOST = "host"
    """The host at work on what is none of these: the loop, callbacks, launching kernels."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time.

    Args:
        start_ms: When it began; the zero is the timeline's own.
        end_ms: When it ended.
        kind: What it was.
        lane: The stream or thread it ran on. On one lane an inner span takes its time from the one around it.
        name: What to call it: a kernel's or an operator's name, or the stage's.
        stage: The stage it belongs to, if one is known.
        batch: The batch it was for, if that is known.
        detail: More, for people: the source line that waited, say.
    """

    start_ms: float
    end_ms: float
    kind: Category
    lane: str
    name: str
    stage: Stage | None = None
    batch: int | None = None
    detail: str = ""

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


def is_for_embeddings(name: str) -> bool:
    """Whether a span of this name is the all-to-all of embeddings, or a wait for it."""
    return name.partition(":")[0] in (EMBEDDINGS, "rows")  # the latter in files that earlier versions wrote


def exclusive(spans: Iterable[Span]) -> list[Span]:
    """Cut spans so that on each lane every moment belongs to one: to the one that began last.

    Collectives stay whole: several can be under way on one lane, and none of them takes the others' time.
    """
    lanes: dict[str, list[Span]] = {}
    cut: list[Span] = []
    for span in spans:
        if span.kind is Category.COMMUNICATION:
            cut.append(span)
        elif span.duration_ms > 0:
            lanes.setdefault(span.lane, []).append(span)
    for lane in lanes.values():
        cut += _exclusive_on_lane(lane)
    return sorted(cut, key=lambda span: (span.start_ms, span.end_ms))


def _exclusive_on_lane(spans: Iterable[Span]) -> Iterator[Span]:
    under_way: list[Span] = []  # in the order of their begins; of two that began together the shorter is the later one
    done_ms = 0.0
    ordered: list[Span | None] = [*sorted(spans, key=lambda span: (span.start_ms, -span.end_ms)), None]
    for coming in ordered:
        until = float("inf") if coming is None else coming.start_ms
        while under_way and done_ms < until:
            last = under_way[-1]
            if last.end_ms <= until:
                under_way.pop()
            end_ms = min(last.end_ms, until)
            if end_ms > done_ms:
                yield _part(last, done_ms, end_ms)
                done_ms = end_ms
        if coming is not None:
            under_way.append(coming)
            done_ms = coming.start_ms


def exclusive_in(spans: Iterable[Span], window: Interval) -> list[Span]:
    """Return the parts of `exclusive` spans that lie in a window.

    What began last is judged before anything is cut: in the window, an inner span and the one around it may look as if
    they had begun together.
    """
    start, end = window
    return clip(exclusive(span for span in spans if span.end_ms > start and span.start_ms < end), window)


def clip(spans: Iterable[Span], window: Interval) -> list[Span]:
    """Return the parts of spans that lie in a window."""
    start, end = window
    return [
        _part(span, max(start, span.start_ms), min(end, span.end_ms))
        for span in spans
        if span.end_ms > start and span.start_ms < end
    ]


def _part(span: Span, start_ms: float, end_ms: float) -> Span:
    is_whole = (start_ms, end_ms) == (span.start_ms, span.end_ms)
    return span if is_whole else replace(span, start_ms=start_ms, end_ms=end_ms)


def from_zero(ranks: Mapping[Any, Sequence[Span]]) -> dict[Any, list[Span]]:
    """Count time from the first thing that happened; ranks of one host share its clock."""
    zero = min((span.start_ms for spans in ranks.values() for span in spans), default=0.0)
    return {
        rank: [replace(span, start_ms=span.start_ms - zero, end_ms=span.end_ms - zero) for span in spans]
        for rank, spans in ranks.items()
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def covered(spans: Iterable[Span]) -> list[Interval]:
    """Return the time of all of these spans, as `union` does."""
    return union((span.start_ms, span.end_ms) for span in spans)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both; each must be disjoint and in order, as `union` gives them."""
    both: list[Interval] = []
    here, there = 0, 0
    while here < len(one) and there < len(other):
        start, end = max(one[here][0], other[there][0]), min(one[here][1], other[there][1])
        if start < end:
            both.append((start, end))
        if one[here][1] < other[there][1]:
            here += 1
        else:
            there += 1
    return both


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in one and not in the other; each must be disjoint and in order."""
    edges = [float("-inf"), *chain.from_iterable(other), float("inf")]
    return intersection(one, list(zip(edges[::2], edges[1::2], strict=True)))


def rows_of(spans: Iterable[Span], *, nested: bool = False) -> list[list[Span]]:
    """Spread the spans of a lane over lines of a drawing, so that no two on a line overlap.

    Args:
        spans: The spans of one lane.
        nested: Allow a span on the line of another one that it lies within.
    """
    rows: list[tuple[list[Span], list[Span]]] = []  # what is on it, and what of that is under way
    for span in sorted(spans, key=lambda span: (span.start_ms, -span.end_ms)):
        line = next((line for line in rows if _has_room(line[1], span, nested)), None)
        if line is None:
            rows.append(line := ([], []))
        for spans_of_line in line:
            spans_of_line.append(span)
    return [row for row, _ in rows]


def _has_room(under_way: list[Span], span: Span, nested: bool) -> bool:
    while under_way and under_way[-1].end_ms <= span.start_ms:
        under_way.pop()
    return not under_way or (nested and span.end_ms <= under_way[-1].end_ms)


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that disjoint intervals cover, milliseconds."""
    return sum(end - start for start, end in intervals)
