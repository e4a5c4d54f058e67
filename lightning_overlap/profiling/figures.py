"""What a timeline says in figures: its steps, its window, what blocked the host, and the table of all that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..schedules import TRAINING_STAGES, Stage
from .overlap import Breakdown, BusyTime, break_down
from .spans import HOST_LANE, Category, Interval, Span, exclusive_in
from .steps import Window, _on_stream, window_of

TOP_BLOCKS = 8
"""Lines of what blocked the host; all else is added up in one."""


@dataclass(frozen=True, slots=True)
class Block:
    """What the host waited for at one place of the program.

    Args:
        name: The operator, call or awaitable that waited.
        stage: Its stage.
        detail: The call, the annotation around it, and the source line, as far as the trace has them.
        total_ms: In all.
        count: How often.
    """

    name: str
    stage: Stage | None
    detail: str
    total_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """One rank's timeline in figures.

    Args:
        account: Per step.
        blocks: What blocked the host, most first.
        window: What they were taken from.
    """

    breakdown: Breakdown
    blocks: tuple[Block, ...]
    window: Window


def summarize(spans: Sequence[Span]) -> TraceSummary:
    """Return the figures of one rank, over all its complete steps."""
    window = window_of(spans)
    if any(_on_stream(span) for span in spans):  # the stage is done there; the host's part of it is to launch that
        spans = [replace(span, stage=None) if span.kind is Category.HOST and span.stage else span for span in spans]
    merge_lanes = (HOST_LANE, *{span.lane for span in spans if span.kind is Category.DENSE})
    return TraceSummary(
        break_down(spans, window.interval, num_steps=window.num_steps, merge_lanes=merge_lanes),
        tuple(blocks(spans, window.interval)),
        window,
    )


def blocks(spans: Iterable[Span], window: Interval) -> list[Block]:
    """Return what blocked the host in a window, most first."""
    found: dict[tuple[str, Stage | None, str], list[float]] = {}
    for span in exclusive_in((span for span in spans if span.lane == HOST_LANE), window):
        if span.kind is Category.WAIT:
            found.setdefault((span.name, span.stage, span.detail), []).append(span.duration_ms)
    entries = [Block(*key, sum(times), len(times)) for key, times in found.items()]
    return sorted(entries, key=lambda block: -block.total_ms)


def headline(figures_: TraceSummary) -> str:
    """Return the one line that says how well it overlaps."""
    kinds, step_ms = figures_.breakdown.kinds, figures_.breakdown.step_ms
    parts = [f"{step_ms:.1f} ms a step" if figures_.window.num_steps > 1 else f"{step_ms:.1f} ms"]
    for kind in (Category.COMMUNICATION, Category.LOOKUP):
        times = kinds[kind]
        if times.busy_ms:
            parts.append(f"{kind} {_percent(times.hidden_fraction)} hidden, {times.exposed_ms:.2f} ms exposed")
    blocked = figures_.breakdown.blocked_ms
    parts.append(f"host blocked {_percent(blocked / step_ms if step_ms else 0)}")
    return "; ".join(parts)


Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a head; the first column is words, the others are numbers, except a last one named "where"."""

    head: Row
    rows: tuple[Row, ...]
    note: str = ""


def tables(figures_: TraceSummary) -> list[Table]:
    """Return the tables of one rank: by kind, by stage, what blocked the host."""
    kept, total_ms = figures_.breakdown, figures_.window.end_ms - figures_.window.start_ms
    bound, bound_ms = kept.bound
    steps = figures_.window.num_steps
    head = ("busy ms", "hidden ms", "exposed ms", "hidden")
    kinds = {kind: times for kind, times in kept.kinds.items() if times.busy_ms}
    found = [
        Table(
            ("per step", *head),
            tuple(
                _row(kind, times, hides=kind not in (Category.DENSE, Category.HOST)) for kind, times in kinds.items()
            ),
            f"{total_ms:.1f} ms, {steps} step{'s' * (steps != 1)} of {kept.step_ms:.2f} ms. Busiest: {bound}, "
            f"{bound_ms:.2f} ms; perfect overlap would save {kept.to_gain_ms:.2f} ms a step. "
            f"Waited for looked-up rows: {kept.merge_wait_ms:.2f} ms.",
        )
    ]
    if kept.stages:
        found.append(
            Table(
                ("stage", *head),
                tuple(_row(stage, times, hides=stage not in TRAINING_STAGES) for stage, times in kept.stages.items()),
            )
        )
    blocked_ms = kept.blocked_ms * steps
    share = _percent(blocked_ms / total_ms if total_ms else 0)
    found.append(
        Table(
            ("host blocked by", "ms", "of window", "times", "where"),
            tuple(_block_rows(figures_.blocks, total_ms)),
            f"Host blocked {blocked_ms:.1f} of {total_ms:.1f} ms ({share}).",
        )
    )
    return found


def as_text(table: Table) -> str:
    """Return a table for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]

    def line_of(cells: Row) -> str:
        put: list[Callable[[str, int], str]] = [
            str.ljust if column == 0 or table.head[column] == "where" else str.rjust for column in range(len(cells))
        ]
        return "  ".join(place(cell, width) for place, cell, width in zip(put, cells, widths, strict=True)).rstrip()

    note = [table.note] if table.note else []
    return "\n".join([line_of(table.head), *map(line_of, table.rows), *note])


def as_report(ranks: Mapping[int | str, TraceSummary]) -> str:
    """Return the tables of all ranks for a terminal."""
    parts = []
    for rank, of_rank in ranks.items():
        parts.append("\n\n".join([f"{label(rank)}: {headline(of_rank)}", *map(as_text, tables(of_rank))]))
    return "\n\n\n".join(parts)


def label(rank: int | str) -> str:
    """Return what to call a rank, or what stands in its place."""
    return f"rank {rank}" if isinstance(rank, int) else rank


def _block_rows(found: Sequence[Block], total_ms: float) -> Iterable[Row]:
    for block in found[:TOP_BLOCKS]:
        where = " ".join(filter(None, (block.detail, f"({block.stage})" if block.stage else "")))
        share = _percent(block.total_ms / total_ms if total_ms else 0)
        yield block.name, f"{block.total_ms:.1f}", share, str(block.count), where
    rest = found[TOP_BLOCKS:]
    if rest:
        rest_ms = sum(block.total_ms for block in rest)
        count = str(sum(block.count for block in rest))
        yield f"{len(rest)} others", f"{rest_ms:.1f}", _percent(rest_ms / total_ms if total_ms else 0), count, ""


def _row(what: Category | Stage, times: BusyTime, *, hides: bool = True) -> Row:
    if not hides:
        return str(what), f"{times.busy_ms:.2f}", "-", "-", "-"
    return (
        str(what),
        f"{times.busy_ms:.2f}",
        f"{times.hidden_ms:.2f}",
        f"{times.exposed_ms:.2f}",
        _percent(times.hidden_fraction),
    )


def _percent(fraction: float) -> str:
    """Three figures: 1.36 %, 46.2 %."""
    percent = 100 * fraction
    return f"{percent:.2f} %" if percent < 10 else f"{percent:.1f} %"
