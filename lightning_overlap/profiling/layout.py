"""What a picture of timelines shows and where: lanes and bars, the same for the PNG and the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..schedules import Stage
from .overlap import cover
from .report import TraceSummary, summarize
from .spans import (
    ALL_TO_ALLS,
    HOST_LANE,
    Category,
    Interval,
    Span,
    covered,
    exclusive_in,
    intersection,
    length,
    rows_of,
    subtract,
)
from .steps import find_steps, is_step_mark, steady_window

NUM_STEPS = 3
"""Steps that are drawn, where nobody says how many."""

BATCH_COLORS = ("#3b76af", "#e8a33d", "#4f9d69", "#b07aa1", "#6fb7c9", "#8a6d3b", "#7d86c9", "#a8b545")
"""Of batch n, the n-th modulo their number: neighbours differ, and none is the red of exposed time."""

STAGE_COLORS: Mapping[Stage, str] = dict(zip(Stage, (*BATCH_COLORS, "#d18ba3"), strict=True))
UNKNOWN_COLOR = "#b9bfc6"
EXPOSED_COLOR = "#d62728"
DATA_COLOR = "#f2e2b8"
"""Of waits for the data loader, which belong to no batch yet."""


class Look(NamedTuple):
    """How a category is drawn, in the PNG and on the page."""

    color: str
    """In the legend: each category's grey is far from the next one's."""
    words: str
    """In the legend."""
    height: float = 0.84
    """Of a bar, as a share of its line."""
    opacity: float = 1.0


LOOKS: Mapping[Category, Look] = {
    Category.DENSE: Look("#4a515a", "full: dense"),
    Category.LOOKUP: Look("#4a515a", "dotted: lookup"),
    Category.COMMUNICATION: Look("#7b848e", "lower: collective", 0.60, 0.75),
    Category.COPY: Look("#7b848e", "flat: copy", 0.40),
    Category.HOST: Look("#c3cad2", "pale: host at work", opacity=0.38),
    Category.DATA: Look(DATA_COLOR, "waiting for data"),
    Category.WAIT: Look("#fff4f2", "exposed wait"),
}

SHORT: Mapping[Stage, str] = {
    Stage.COPY_BATCH_TO_DEVICE: "copy",
    Stage.INPUT_SPLITS_DIST: "splits",
    Stage.INPUT_DATA_DIST: "ids",
    Stage.PREFETCH: "prefetch",
    Stage.EMBEDDING_LOOKUP: "lookup",
    Stage.DENSE_FORWARD: "forward",
    Stage.BACKWARD: "backward",
    Stage.OPTIMIZER_STEP: "step",
    Stage.EMBEDDING_UPDATE: "update",
}
"""The stages on bars."""

_ONE_CLOCK = 0.8
"""A rank whose spans reach over this share of the first one's window has its clock, or one near enough."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Spans of one batch, stage and kind that are too near to each other to be told apart."""

    span: Span
    """The longest one of them, with their begin and end."""
    row: int
    """The row of its lane, from 0 at the top."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream or thread, drawn on as many lines as spans overlap on it."""

    name: str
    num_rows: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One rank.

    Args:
        rank: Number of the rank, or a name that stands for it.
        summary: Figures of all steps of the rank, not only of those drawn.
        window: The part of the timeline that is drawn.
        steps: Where steps begin in it.
        lanes: The lanes, from the top.
        exposed: Intervals in which a collective ran and nothing hid it.
    """

    rank: int | str
    summary: TraceSummary
    window: Interval
    steps: tuple[float, ...]
    lanes: tuple[Lane, ...]
    exposed: tuple[Interval, ...]

    @property
    def length_ms(self) -> float:
        """How much time is drawn."""
        return self.window[1] - self.window[0]

    @property
    def num_rows(self) -> int:
        """Rows of all lanes."""
        return sum(lane.num_rows for lane in self.lanes)

    @property
    def spans(self) -> list[Span]:
        """What is drawn, bar by bar."""
        return [bar.span for lane in self.lanes for bar in lane.bars]


def lay_out(
    ranks: Mapping[int | str, Sequence[Span]],
    *,
    num_steps: int,
    resolution: float,
    overlapped: Mapping[int | str, Collection[Stage]] | None = None,
) -> list[Panel]:
    """Return what to draw.

    Ranks whose clocks agree (they are on one host) show the same moments; the others begin with their own step.

    Args:
        ranks: Spans by rank.
        num_steps: Steady steps to draw.
        resolution: Share of the drawn time below which neighbours are drawn as one.
        overlapped: As of `write_png`.

    Raises:
        ValueError: There is nothing to draw, or `num_steps` is below 1.
    """
    if not any(ranks.values()):
        raise ValueError("there is nothing to draw: no rank has a span. Record at least one step.")
    panels: list[Panel] = []
    for rank, spans in ranks.items():
        if spans:
            window = steady_window(spans, num_steps)
            if panels and _share_seen(spans, panels[0].window) > _ONE_CLOCK:
                window = panels[0].window
            panels.append(_panel(rank, spans, window, resolution, (overlapped or {}).get(rank)))
    return panels


def _share_seen(spans: Sequence[Span], window: Interval) -> float:
    seen = min(span.start_ms for span in spans), max(span.end_ms for span in spans)
    return length(intersection([seen], [window])) / length([window])


def _panel(
    rank: int | str, spans: Sequence[Span], window: Interval, resolution: float, overlapped: Collection[Stage] | None
) -> Panel:
    cut = exclusive_in((span for span in spans if not is_step_mark(span.name)), window)
    lanes = []
    for name in sorted({span.lane for span in cut}, key=_lane_order):
        rows = rows_of(span for span in cut if span.lane == name)
        bars = [bar for number, row in enumerate(rows) for bar in _bars(row, number, resolution * length([window]))]
        lanes.append(Lane(name, len(rows), tuple(bars)))
    starts = tuple(start for start, _ in find_steps(spans) if window[0] <= start < window[1])
    under_way = covered(span for span in cut if span.kind is Category.COMMUNICATION)
    exposed = tuple(subtract(under_way, cover(cut, window, Category.COMMUNICATION)))
    return Panel(rank, summarize(spans, overlapped), window, starts, tuple(lanes), exposed)


def _bars(row: Sequence[Span], number: int, least_ms: float) -> list[Bar]:
    runs: list[list[Span]] = []
    for span in row:
        last = runs[-1][-1] if runs else None
        if last is not None and _alike(last) == _alike(span) and span.start_ms - last.end_ms <= least_ms:
            runs[-1].append(span)
        else:
            runs.append([span])
    longest = [max(run, key=lambda span: span.duration_ms) for run in runs]
    return [
        Bar(replace(span, start_ms=run[0].start_ms, end_ms=run[-1].end_ms), number, len(run))
        for span, run in zip(longest, runs, strict=True)
    ]


def _alike(span: Span) -> tuple[object, ...]:
    return span.kind, span.stage, span.batch


def _lane_order(name: str) -> tuple[int, list[object]]:
    """The host on top, then its threads, then streams by number, then what only communicates."""
    order = [name == HOST_LANE, name == "autograd", name.startswith("thread"), "stream" in name]
    return order.index(True) if True in order else len(order), [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    ]


def by_batch(panels: Iterable[Panel]) -> bool:
    """Whether to colour by batch: most of what has a stage says its batch. Else the stages give the colours."""
    staged = [span for panel in panels for span in panel.spans if span.stage is not None]
    return 2 * sum(span.batch is not None for span in staged) > len(staged)


def legend(panels: Iterable[Panel], *, batches: bool) -> tuple[list[tuple[str, str]], list[Category]]:
    """Return what the legend shows: colours with what each stands for, and the categories that are drawn.

    Batches or stages have the colours; more batches than colours are not listed.
    """
    spans = [span for panel in panels for span in panel.spans]
    if batches:
        shown = sorted({span.batch for span in spans if span.batch is not None})
        colors = [(BATCH_COLORS[one % len(BATCH_COLORS)], f"batch {one}") for one in shown]
        colors = colors if len(colors) <= len(BATCH_COLORS) else []
    else:
        drawn = {span.stage for span in spans}
        colors = [(STAGE_COLORS[stage], SHORT[stage]) for stage in Stage if stage in drawn]
    kinds = {span.kind for span in spans}
    return colors, [kind for kind in LOOKS if kind in kinds]


def color_of(span: Span, *, batches: bool) -> str:
    """Return a bar's colour."""
    if span.kind is Category.DATA:
        return DATA_COLOR
    if batches:
        return UNKNOWN_COLOR if span.batch is None else BATCH_COLORS[span.batch % len(BATCH_COLORS)]
    return UNKNOWN_COLOR if span.stage is None else STAGE_COLORS[span.stage]


def text_of(span: Span, *, batches: bool) -> str:
    """Return what to write on a bar: what travels or the stage, and the batch where there is one."""
    carries = span.name.partition(":")[0]
    if carries not in ALL_TO_ALLS:
        if span.kind is Category.DATA:
            return "data"
        if span.stage is None:
            return span.name if span.kind is not Category.WAIT else "wait"
        carries = SHORT[span.stage]
    short = carries if span.kind is not Category.WAIT else f"wait: {carries}"
    return short if span.batch is None or not batches else f"{short} {span.batch}"


def shares(lane: Lane) -> str:
    """Return what a lane mostly does, for its label: "communication" for a stream of collectives."""
    busy: Counter[Category] = Counter()
    for bar in lane.bars:
        if bar.span.kind is not Category.WAIT and lane.name != HOST_LANE:
            busy[bar.span.kind] += round(1e3 * bar.span.duration_ms)
    return "".join(str(kind) for kind, _ in busy.most_common(1))


def hidden_in(panel: Panel, bar: Bar) -> float | None:
    """Return which share of a collective was hidden, None for all else and for what the mode does not overlap."""
    overlapped = panel.summary.overlapped
    if overlapped is not None and bar.span.stage not in overlapped:
        return None
    if bar.span.kind is not Category.COMMUNICATION or not bar.span.duration_ms:
        return None
    exposed = length(intersection([(bar.span.start_ms, bar.span.end_ms)], panel.exposed))
    return max(0.0, 1 - exposed / bar.span.duration_ms)
