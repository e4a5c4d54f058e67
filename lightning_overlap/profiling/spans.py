"""Spans: what one lane (a stream, the host) was busy with and when; and the sweep over them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise

from ..schedules import Stage

Interval = tuple[float, float]
"""Begin and end, milliseconds."""

ALWAYS: Interval = (float("-inf"), float("inf"))

HOST_LANE = "host"  # the thread that trains
ALL_TO_ALLS = ("sizes", "ids", "embeddings", "gradients")
"""What the all-to-alls of a step carry, in their order."""

LOG = "self.log"  # name of the spans of a module's `log`
EMBEDDINGS = "embeddings"
"""Name of the all-to-all of embeddings, and of a wait for it; after a colon more can follow."""


class Category(StrEnum):
    """What a resource was busy with.

    Attributes:
        DENSE: The model's dense part: forward, backward with the fused update in it, optimizer step.
        LOOKUP: Reading the tables (TBE forward).
        COMMUNICATION: A collective, from its start to its end.
        COPY: A copy between host and device or within the device; on a CPU, fetching and staging the batch.
        DATA: The host waits for the next batch of the data loader, or makes it.
        WAIT: A lane that has nothing to do before something else ends: exposed time.
        HOST: The host at work on what is none of these: the loop, callbacks, launching kernels.
    """

    DENSE = "dense"
    LOOKUP = "lookup"
    COMMUNICATION = "communication"
    COPY = "copy"
    DATA = "data"
    WAIT = "wait"
    HOST = "host"


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
        sent_bytes: What a collective sends to other ranks, where that was counted.
        saved_bytes: Bytes more that it would have sent in full precision.
    """

    start_ms: float
    end_ms: float
    kind: Category
    lane: str
    name: str
    stage: Stage | None = None
    batch: int | None = None
    detail: str = ""
    sent_bytes: int = 0
    saved_bytes: int = 0

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.start_ms


def moments(spans: Iterable[Span], window: Interval = ALWAYS) -> Iterator[tuple[Interval, list[Span]]]:
    """Cut a window wherever a span begins or ends.

    Yields:
        Begin and end of each piece, and the spans under way in it, in the order of their beginnings; of two that began
        together the shorter one is last.
    """
    start, end = window
    seen = [span for span in spans if max(start, span.start_ms) < min(end, span.end_ms)]
    coming = deque(sorted(seen, key=lambda span: (span.start_ms, -span.end_ms)))
    edges = {edge for span in seen for edge in (span.start_ms, span.end_ms) if start < edge < end}
    under_way: list[Span] = []
    for piece in pairwise(sorted({start, end, *edges})):
        under_way = [span for span in under_way if span.end_ms > piece[0]]
        while coming and coming[0].start_ms <= piece[0]:
            under_way.append(coming.popleft())
        yield piece, under_way


def exclusive(spans: Iterable[Span], window: Interval = ALWAYS) -> list[Span]:
    """Cut spans to a window so that on each lane every moment belongs to one span, the one that began last.

    Collectives are cut to the window only: several may be under way on one lane at the same time.
    """
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    cut: list[Span] = []
    for span in spans:
        if span.kind is not Category.COMMUNICATION:
            lanes[span.lane].append(span)
        elif span.end_ms > window[0] and span.start_ms < window[1]:
            cut.append(_part(span, max(window[0], span.start_ms), min(window[1], span.end_ms)))
    for lane in lanes.values():
        last_begun = ((piece, under_way[-1]) for piece, under_way in moments(lane, window) if under_way)
        for _, run in groupby(last_begun, key=lambda found: id(found[1])):
            pieces = list(run)
            ((start_ms, _), span), ((_, end_ms), _) = pieces[0], pieces[-1]
            cut.append(_part(span, start_ms, end_ms))
    return sorted(cut, key=lambda span: (span.start_ms, span.end_ms))


def _part(span: Span, start_ms: float, end_ms: float) -> Span:
    is_whole = (start_ms, end_ms) == (span.start_ms, span.end_ms)
    return span if is_whole else replace(span, start_ms=start_ms, end_ms=end_ms)


def rows_of(spans: Iterable[Span], *, nested: bool = False) -> list[list[Span]]:
    """Spread the spans of a lane over lines of a drawing, on which none overlap, or with `nested` inner ones only."""
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
