"""Find the steps of a timeline, and the windows to measure and to draw."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ..schedules import Stage
from .spans import HOST_LANE, Category, Interval, Span

_STEP_MARK = re.compile(r"ProfilerStep#\d+$")
_NOTE = "overlapped: "
_LEAST_MS = 1e-3  # shortest window: the duration of an event may be 0


def is_step_mark(name: str) -> bool:
    """Return whether a span is torch.profiler's mark of a step."""
    return _STEP_MARK.match(name) is not None


def with_mode(spans: Iterable[Span], overlapped: Iterable[Stage]) -> list[Span]:
    """Return the spans; the step marks' details list the stages that the mode overlaps, for files."""
    note = _NOTE + (", ".join(sorted(map(str, overlapped))) or "nothing")
    return [replace(span, detail=note) if is_step_mark(span.name) else span for span in spans]


def noted_stages(spans: Iterable[Span]) -> frozenset[Stage] | None:
    """Return the stages that `with_mode` noted; None without a note."""
    for span in spans:
        if is_step_mark(span.name) and span.detail.startswith(_NOTE):
            words = span.detail.removeprefix(_NOTE).split(", ")
            return frozenset(stage for stage in Stage if str(stage) in words)
    return None


def find_steps(spans: Sequence[Span]) -> list[Interval]:
    """Return the steps of a timeline, by torch.profiler's marks, or else from a dense forward to the next."""
    marked = [(span.start_ms, span.end_ms) for span in spans if is_step_mark(span.name)]
    if marked:
        return sorted(marked)
    forwards = [span for span in spans if span.stage is Stage.DENSE_FORWARD and span.kind is not Category.COMMUNICATION]
    forwards = [span for span in forwards if span.lane == HOST_LANE] or forwards
    starts: dict[object, float] = {}
    outermost_end = float("-inf")
    for span in sorted(forwards, key=lambda span: (span.start_ms, -span.end_ms)):
        if span.kind is Category.WAIT or (span.batch is None and span.start_ms < outermost_end):
            continue
        outermost_end = max(outermost_end, span.end_ms)
        starts.setdefault(("start", span.start_ms) if span.batch is None else span.batch, span.start_ms)
    return list(pairwise(sorted(starts.values())))


def window_of(spans: Sequence[Span]) -> tuple[Interval, int]:
    """Return the window to measure, all steps or without steps the whole timeline, and its number of steps."""
    if not spans:
        raise ValueError("the timeline has no spans: record at least one step.")
    steps = find_steps(spans)
    # The streams of a GPU run later than torch.profiler's step marks: then the window covers all their work.
    on_gpu = [span for span in spans if is_on_stream(span) and span.kind is not Category.WAIT]
    marked = any(is_step_mark(span.name) for span in spans)
    ends = steps if steps and not (marked and on_gpu) else [(span.start_ms, span.end_ms) for span in on_gpu or spans]
    start, end = min(start for start, _ in ends), max(end for _, end in ends)
    return (start, max(end, start + _LEAST_MS)), max(1, len(steps))


def is_on_stream(span: Span) -> bool:
    """Return whether a span ran on a GPU's stream."""
    return "stream " in span.lane


def steady_window(spans: Sequence[Span], num_steps: int) -> Interval:
    """Return the window of `num_steps` consecutive steps whose durations are nearest to the median."""
    if num_steps < 1:
        raise ValueError(f"the number of steps to draw must be at least 1, got {num_steps}.")
    steps = find_steps(spans)
    if not steps:
        return window_of(spans)[0]
    num_steps = min(num_steps, len(steps))
    usual = statistics.median(end - start for start, end in steps)
    runs = [steps[first : first + num_steps] for first in range(len(steps) - num_steps + 1)]
    best = min(runs, key=lambda run: sum(abs(end - start - usual) for start, end in run))
    return best[0][0], best[-1][1]
