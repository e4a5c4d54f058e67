"""The layout of a picture of timelines: panels, lanes and bars."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ..schedules import Stage
from .overlap import sweep
from .report import headline, label, summarize
from .spans import ALL_TO_ALLS, HOST_LANE, Category, Interval, Span, exclusive, rows_of
from .steps import find_steps, is_step_mark, steady_window

NUM_STEPS = 3  # default number of steps to draw

BATCH_COLORS = ("#3b76af", "#e8a33d", "#4f9d69", "#b07aa1", "#6fb7c9", "#8a6d3b", "#7d86c9", "#a8b545")
"""Colour of batch n: index n modulo the length. Red is reserved for exposed time."""

STAGE_COLORS: Mapping[Stage, str] = dict(zip(Stage, (*BATCH_COLORS, "#d18ba3", "#5b8c8c"), strict=True))
UNKNOWN_COLOR = "#b9bfc6"
EXPOSED_COLOR = "#d62728"
DATA_COLOR = "#f2e2b8"  # waits for the data loader, which have no batch


class Look(NamedTuple):
    """How a category is drawn."""

    color: str  # in the legend
    words: str
    height: float = 0.84  # share of a row
    opacity: float = 1.0


LOOKS: Mapping[Category, Look] = {
    Category.DENSE: Look("#4a515a", "full: dense"),
    Category.LOOKUP: Look("#4a515a", "dotted: lookup"),
    Category.COMMUNICATION: Look("#7b848e", "lower: collective", 0.60, 0.75),
    Category.COPY: Look("#7b848e", "flat: copy", 0.40),
    Category.HOST: Look("#c3cad2", "pale: host working", opacity=0.38),
    Category.DATA: Look(DATA_COLOR, "waiting for data"),
    Category.WAIT: Look("#fff4f2", "exposed wait"),
}

SHORT: Mapping[Stage, str] = {  # stages as written on bars
    Stage.COPY_BATCH_TO_DEVICE: "copy",
    Stage.INPUT_SPLITS_DIST: "splits",
    Stage.INPUT_DATA_DIST: "ids",
    Stage.PREFETCH: "prefetch",
    Stage.EMBEDDING_LOOKUP: "lookup",
    Stage.DENSE_FORWARD: "forward",
    Stage.BACKWARD: "backward",
    Stage.WEIGHT_GRADIENTS: "weights",
    Stage.OPTIMIZER_STEP: "step",
    Stage.EMBEDDING_UPDATE: "update",
}

_ONE_CLOCK = 0.8  # ranks share a clock if a rank's spans cover this share of the first rank's window


@dataclass(frozen=True, slots=True)
class Panel:
    """One rank."""

    title: str
    num_steps: int  # of the timeline
    window: Interval  # the drawn part of it
    steps: Sequence[float]  # starts of the steps in the window
    lanes: Mapping[str, Sequence[Sequence[Span]]]  # from the top, each with as many rows as spans overlap
    exposed: Sequence[Interval]  # in which a collective was exposed

    @property
    def length_ms(self) -> float:
        """Length of the window."""
        return self.window[1] - self.window[0]

    @property
    def num_rows(self) -> int:
        """Number of rows of all lanes."""
        return sum(map(len, self.lanes.values()))

    def does(self, lane: str) -> str:
        """Return a lane's main category, for its label; '' for the host."""
        busy: defaultdict[Category, float] = defaultdict(float)
        for span in chain.from_iterable(self.lanes[lane]):
            if span.kind is not Category.WAIT and lane != HOST_LANE:
                busy[span.kind] += span.duration_ms
        most = max(busy, key=busy.__getitem__, default="")
        return most if most != lane else ""


class Picture:
    """The panels of all ranks, and the colours of their bars; arguments and errors are as for `write_png`."""

    def __init__(
        self,
        ranks: Mapping[int | str, Sequence[Span]],
        *,
        num_steps: int,
        resolution: float,  # a share of the window; spans of one batch, stage and kind that are closer are merged
        overlapped: Mapping[int | str, Collection[Stage]] | None = None,
    ) -> None:
        if not any(ranks.values()):
            raise ValueError("there is nothing to draw: no rank has spans. Record at least one step.")
        windows = _windows({rank: spans for rank, spans in ranks.items() if spans}, num_steps)
        of_rank = overlapped or {}
        self.panels = [_panel(rank, ranks[rank], one, resolution, of_rank.get(rank)) for rank, one in windows.items()]
        self._spans = [span for panel in self.panels for rows in panel.lanes.values() for row in rows for span in row]
        staged = [span.batch is not None for span in self._spans if span.stage is not None]
        self._by_batch = 2 * sum(staged) > len(staged)

    def legend(self) -> tuple[list[tuple[str, str]], list[Category]]:
        """Return (colour, meaning) pairs, empty if there are more batches than colours, and the drawn categories."""
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
        """Return the text on a bar: the all-to-all's content or the stage, and the batch if known."""
        carries, is_wait = span.name.partition(":")[0], span.kind is Category.WAIT
        if carries not in ALL_TO_ALLS:
            if span.kind is Category.DATA:
                return "data"
            if span.stage is None:
                return "wait" if is_wait else span.name
            carries = SHORT[span.stage]
        short = f"wait: {carries}" if is_wait else carries
        return short if span.batch is None or not self._by_batch else f"{short} {span.batch}"


def _windows(ranks: Mapping[int | str, Sequence[Span]], num_steps: int) -> dict[int | str, Interval]:
    """Return what to draw of each rank: one time range if their clocks agree, else ranges of one length if possible."""
    windows: dict[int | str, Interval] = {}
    ends = {rank: max(span.end_ms for span in spans) for rank, spans in ranks.items()}
    for rank, spans in ranks.items():
        first, last = next(iter(windows.values()), steady_window(spans, num_steps))
        share = min(ends[rank], last) - max(min(span.start_ms for span in spans), first)
        agrees = share > _ONE_CLOCK * (last - first)
        windows[rank] = (first, last) if agrees else steady_window(spans, num_steps)
    longest = max(end - start for start, end in windows.values())
    return {rank: (start, max(end, min(start + longest, ends[rank]))) for rank, (start, end) in windows.items()}


def _panel(
    rank: int | str, spans: Sequence[Span], window: Interval, resolution: float, overlapped: Collection[Stage] | None
) -> Panel:
    cut = exclusive((span for span in spans if not is_step_mark(span.name)), window)
    least_ms, lanes = resolution * (window[1] - window[0]), {}
    for name in sorted({span.lane for span in cut}, key=_lane_order):
        lanes[name] = [list(_bars(row, least_ms)) for row in rows_of(span for span in cut if span.lane == name)]
    exposed: list[Interval] = []
    for piece, under_way, hidden in sweep(cut, window):
        if any(span.kind is Category.COMMUNICATION for span in under_way) and Category.COMMUNICATION not in hidden:
            begin = exposed.pop()[0] if exposed and exposed[-1][1] == piece[0] else piece[0]
            exposed.append((begin, piece[1]))
    steps = [start for start, _ in find_steps(spans) if window[0] <= start < window[1]]
    found = summarize(spans, overlapped)
    return Panel(f"{label(rank)}: {headline(found)}", found.num_steps, window, steps, lanes, exposed)


def _bars(row: Sequence[Span], least_ms: float) -> Iterator[Span]:
    """Merge each run of spans that are too close to distinguish into its longest span."""
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
        yield replace(max(run, key=lambda span: span.duration_ms), start_ms=run[0].start_ms, end_ms=run[-1].end_ms)


def _lane_order(name: str) -> tuple[int, str]:
    """Sort key: the host, its threads, streams by number, groups of collectives."""
    order = [name == HOST_LANE, name == "autograd", name.startswith("thread"), "stream" in name, True]
    return order.index(True), re.sub(r"\d+", lambda number: number[0].zfill(20), name)
