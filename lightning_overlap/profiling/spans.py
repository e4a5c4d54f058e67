"""Spans of work on a lane (a stream or the host), and the sweep over them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise

from ..schedules import Stage

Interval = tuple[float, float]  # start and end in ms

ALWAYS: Interval = (float("-inf"), float("inf"))
HOST_LANE = "host"  # the training thread
LOG = "self.log"  # name of the spans of a module's `log`
EMBEDDINGS = "embeddings"  # name of the all-to-all and of waits for it; a colon and more text may follow
ALL_TO_ALLS = ("sizes", "ids", EMBEDDINGS, "gradients")  # contents of a step's all-to-alls, in order


class Category(StrEnum):
    """Kind of work."""

    DENSE = "dense"  # forward, backward including the fused update, optimizer step
    LOOKUP = "lookup"  # reading the tables (TBE forward)
    COMMUNICATION = "communication"  # a collective
    COPY = "copy"  # between host and device or on the device; on a CPU, staging the batch
    DATA = "data"  # the host waits for the data loader's next batch, or makes it
    WAIT = "wait"  # a lane waits: exposed time
    HOST = "host"  # other work of the host: the loop, callbacks, launching kernels


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of work on a lane."""

    start_ms: float  # each timeline has its own zero
    end_ms: float
    kind: Category
    lane: str  # stream or thread; an inner span takes its time from the outer span of the same lane
    name: str  # of the kernel, operator or stage
    stage: Stage | None = None
    batch: int | None = None
    detail: str = ""  # for example the source line that waits
    sent_bytes: int = 0  # by a collective to other ranks, if counted
    saved_bytes: int = 0  # additional bytes that full precision would send

    @property
    def duration_ms(self) -> float:
        """The span's length."""
        return self.end_ms - self.start_ms


def moments(spans: Iterable[Span], window: Interval = ALWAYS) -> Iterator[tuple[Interval, list[Span]]]:
    """Cut a window at each start and end of a span; yield each piece with its spans, by start, the longer first."""
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
    """Cut spans to a window, and so that each moment of a lane belongs to the span that started last."""
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    cut: list[Span] = []
    for span in spans:
        if span.kind is not Category.COMMUNICATION:  # several collectives may run on one lane at the same time
            lanes[span.lane].append(span)
        elif span.end_ms > window[0] and span.start_ms < window[1]:
            cut.append(_part(span, max(window[0], span.start_ms), min(window[1], span.end_ms)))
    for lane in lanes.values():
        in_order = sorted(lane, key=lambda span: (span.start_ms, span.kind is Category.WAIT))  # within a stage
        last_begun = ((piece, under_way[-1]) for piece, under_way in moments(in_order, window) if under_way)
        for _, run in groupby(last_begun, key=lambda found: id(found[1])):
            pieces = list(run)
            ((start_ms, _), span), ((_, end_ms), _) = pieces[0], pieces[-1]
            cut.append(_part(span, start_ms, end_ms))
    return sorted(cut, key=lambda span: (span.start_ms, span.end_ms))


def _part(span: Span, start_ms: float, end_ms: float) -> Span:
    is_whole = (start_ms, end_ms) == (span.start_ms, span.end_ms)
    return span if is_whole else replace(span, start_ms=start_ms, end_ms=end_ms)


def rows_of(spans: Iterable[Span], *, nested: bool = False) -> list[list[Span]]:
    """Spread the spans of a lane over rows without overlap; with `nested` a row may contain nested spans."""
    rows: list[tuple[list[Span], list[Span]]] = []  # all spans of a row, and its spans in progress
    for span in sorted(spans, key=lambda span: (span.start_ms, -span.end_ms)):
        for _, under_way in rows:
            while under_way and under_way[-1].end_ms <= span.start_ms:
                under_way.pop()
        line = next((one for one in rows if not one[1] or (nested and span.end_ms <= one[1][-1].end_ms)), None)
        if line is None:
            rows.append(line := ([], []))
        for spans_of_line in line:
            spans_of_line.append(span)
    return [row for row, _ in rows]
