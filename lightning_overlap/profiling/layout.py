"""What a picture of timelines shows and where: lanes and bars."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ..schedules import Stage
from .overlap import Breakdown, sweep
from .report import headline, label, summarize
from .spans import ALL_TO_ALLS, HOST_LANE, Category, Interval, Span, exclusive, rows_of
from .steps import find_steps, is_step_mark, steady_window

NUM_STEPS = 3  # that are drawn, where nobody says how many

BATCH_COLORS = ("#3b76af", "#e8a33d", "#4f9d69", "#b07aa1", "#6fb7c9", "#8a6d3b", "#7d86c9", "#a8b545")
"""Of batch n, the n-th modulo their number: neighbours differ, and none is the red of exposed time."""

STAGE_COLORS: Mapping[Stage, str] = dict(zip(Stage, (*BATCH_COLORS, "#d18ba3"), strict=True))
UNKNOWN_COLOR = "#b9bfc6"
EXPOSED_COLOR = "#d62728"
DATA_COLOR = "#f2e2b8"  # of waits for the data loader, which belong to no batch yet


class Look(NamedTuple):
    """How a category is drawn, in the PNG; a bar's height is a share of its line."""

    color: str  # in the legend: each category's grey is far from the next one's
    words: str
    height: float = 0.84
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

_ONE_CLOCK = 0.8  # a rank whose spans reach over this share of the first one's window has its clock, or a near one


@dataclass(frozen=True, slots=True)
class Panel:
    """One rank.

    Args:
        rank: Number of the rank, or a name that stands for it.
        found: Figures of all steps of the rank, not only of those drawn.
        window: The part of the timeline that is drawn.
        steps: Where steps begin in it.
        lanes: Streams and threads from the top, each with as many rows as spans overlap on it. Spans of one batch,
            stage and kind that are too near to each other to be told apart are one bar there.
        exposed: Intervals in which a collective ran and nothing hid it.
    """

    rank: int | str
    found: Breakdown
    window: Interval
    steps: Sequence[float]
    lanes: Mapping[str, Sequence[Sequence[Span]]]
    exposed: Sequence[Interval]

    @property
    def title(self) -> str:
        """Whose it is, and how well it overlaps."""
        return f"{label(self.rank)}: {headline(self.found)}"

    @property
    def length_ms(self) -> float:
        """How much time is drawn."""
        return self.window[1] - self.window[0]

    @property
    def num_rows(self) -> int:
        """Rows of all lanes."""
        return sum(map(len, self.lanes.values()))

    def does(self, lane: str) -> str:
        """Return what a lane mostly does, for its label: "communication" of a stream of collectives."""
        busy: Counter[Category] = Counter()
        for span in chain.from_iterable(self.lanes[lane]):
            if span.kind is not Category.WAIT and lane != HOST_LANE:
                busy[span.kind] += round(1e3 * span.duration_ms)
        most = "".join(kind for kind, _ in busy.most_common(1))
        return most if most != lane else ""


class Picture:
    """Timelines as they are drawn.

    Ranks whose clocks agree (they are on one host) show the same moments; the others begin with their own step. The
    colours are those of batches where most of what has a stage says its batch, else of stages.

    Arguments and errors are those of `write_png`; neighbours nearer than the resolution, a share of the drawn time, are
    drawn as one.
    """

    def __init__(
        self,
        ranks: Mapping[int | str, Sequence[Span]],
        *,
        num_steps: int,
        resolution: float,
        overlapped: Mapping[int | str, Collection[Stage]] | None = None,
    ) -> None:
        if not any(ranks.values()):
            raise ValueError("there is nothing to draw: no rank has a span. Record at least one step.")
        self.panels: list[Panel] = []
        for rank, spans in ranks.items():
            if spans:
                window = steady_window(spans, num_steps)
                if self.panels and _share_seen(spans, self.panels[0].window) > _ONE_CLOCK:
                    window = self.panels[0].window
                self.panels.append(_panel(rank, spans, window, resolution, (overlapped or {}).get(rank)))
        self._spans = [span for panel in self.panels for rows in panel.lanes.values() for row in rows for span in row]
        staged = [span.batch is not None for span in self._spans if span.stage is not None]
        self._by_batch = 2 * sum(staged) > len(staged)

    def legend(self) -> tuple[list[tuple[str, str]], list[Category]]:
        """Return the colours with what each stands for, and the categories that are drawn.

        More batches than colours are not listed.
        """
        if self._by_batch:
            shown = sorted({span.batch for span in self._spans if span.batch is not None})
            colors = [(BATCH_COLORS[one % len(BATCH_COLORS)], f"batch {one}") for one in shown]
            colors = colors if len(colors) <= len(BATCH_COLORS) else []
        else:
            drawn = {span.stage for span in self._spans}
            colors = [(STAGE_COLORS[stage], SHORT[stage]) for stage in Stage if stage in drawn]
        kinds = {span.kind for span in self._spans}
        return colors, [kind for kind in LOOKS if kind in kinds]

    def color(self, span: Span) -> str:
        """Return a bar's colour."""
        if span.kind is Category.DATA:
            return DATA_COLOR
        if self._by_batch:
            return UNKNOWN_COLOR if span.batch is None else BATCH_COLORS[span.batch % len(BATCH_COLORS)]
        return UNKNOWN_COLOR if span.stage is None else STAGE_COLORS[span.stage]

    def words(self, span: Span) -> str:
        """Return what to write on a bar: what travels or the stage, and the batch where there is one."""
        carries = span.name.partition(":")[0]
        if carries not in ALL_TO_ALLS:
            if span.kind is Category.DATA:
                return "data"
            if span.stage is None:
                return span.name if span.kind is not Category.WAIT else "wait"
            carries = SHORT[span.stage]
        short = carries if span.kind is not Category.WAIT else f"wait: {carries}"
        return short if span.batch is None or not self._by_batch else f"{short} {span.batch}"


def _share_seen(spans: Sequence[Span], window: Interval) -> float:
    """Return which share of a window spans reach over."""
    start, end = min(span.start_ms for span in spans), max(span.end_ms for span in spans)
    return (min(end, window[1]) - max(start, window[0])) / (window[1] - window[0])


def _panel(
    rank: int | str, spans: Sequence[Span], window: Interval, resolution: float, overlapped: Collection[Stage] | None
) -> Panel:
    cut = exclusive((span for span in spans if not is_step_mark(span.name)), window)
    least_ms, lanes = resolution * (window[1] - window[0]), {}
    for name in sorted({span.lane for span in cut}, key=_lane_order):
        rows = rows_of(span for span in cut if span.lane == name)
        lanes[name] = [list(_bars(row, least_ms)) for row in rows]
    exposed: list[Interval] = []
    for piece, under_way, hidden in sweep(cut, window):
        sends = any(span.kind is Category.COMMUNICATION for span in under_way)
        if sends and Category.COMMUNICATION not in hidden:
            begin = exposed.pop()[0] if exposed and exposed[-1][1] == piece[0] else piece[0]
            exposed.append((begin, piece[1]))
    steps = [start for start, _ in find_steps(spans) if window[0] <= start < window[1]]
    return Panel(rank, summarize(spans, overlapped), window, steps, lanes, exposed)


def _bars(row: Sequence[Span], least_ms: float) -> Iterator[Span]:
    """Return the longest of each run of neighbours that cannot be told apart, with their begin and end."""
    runs: list[list[Span]] = []
    for span in row:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.kind, last.stage, last.batch) == (span.kind, span.stage, span.batch)
            and span.start_ms - last.end_ms <= least_ms
        ):
            runs[-1].append(span)
        else:
            runs.append([span])
    for run in runs:
        longest = max(run, key=lambda span: span.duration_ms)
        yield replace(longest, start_ms=run[0].start_ms, end_ms=run[-1].end_ms)


def _lane_order(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """The host on top, then its threads, then streams by number, then what only communicates."""
    order = [name == HOST_LANE, name == "autograd", name.startswith("thread"), "stream" in name, True]
    return order.index(True), [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part
    ]
