"""Breakdowns as text: the table at the end of a monitored run, and the report of a trace."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..schedules import Schedule, Stage
from ..text import aligned
from .overlap import COVERED_BY, Block, Breakdown, BusyTime, break_down, mean
from .spans import HOST_LANE, Category, Interval, Span, exclusive
from .steps import is_on_stream, noted_stages, window_of

WORTHWHILE = 0.03  # smallest gain to advise, as a share of a step
EVEN = 0.02  # ranks are even if their waits differ by less than this share of a step
SMALL = 0.01  # smallest wait for data in the headline, as a share of a step
NUM_STALEST = 8  # tables listed with stale rows
TOP_BLOCKS = 8  # places listed that block the host; the others are added up

_OF_THE_HOST = {Category.HOST: "host working", Category.DATA: "waited for data"}  # names of the host's rows
_NEVER_HIDDEN = (Category.DENSE, Category.HOST, Category.DATA, Stage.DENSE_FORWARD, Stage.OPTIMIZER_STEP)
"""Rows with only a busy time. A backward is not among them: its collectives can be hidden."""

Row = Sequence[str]


def _rows(
    found: Mapping[Category, BusyTime] | Mapping[Stage, BusyTime], share_of: Callable[[float], str], blank: str = ""
) -> list[Row]:
    rows: list[Row] = []
    for what, times in found.items():
        name = _OF_THE_HOST.get(what, f"all {what}") if isinstance(what, Category) else str(what)
        hidden = [f"{times.hidden_ms:.2f}", f"{times.exposed_ms:.2f}", share_of(times.hidden_fraction)]
        rows.append((name, f"{times.busy_ms:.2f}", *([blank] * 3 if what in _NEVER_HIDDEN else hidden)))
    return rows


def metrics(breakdown: Breakdown) -> dict[str, float]:
    """Return the values for loggers: ms and bytes per step, and fractions between 0 and 1."""
    of_step = ("step_ms", "merge_wait_ms", "blocked_ms", "to_gain_ms", "loop_ms", "log_ms")
    values = {name: getattr(breakdown, name) for name in of_step}
    values |= {"bound_ms": breakdown.bound[1], "data_ms": breakdown.categories[Category.DATA].busy_ms}
    if breakdown.overlaps:
        values["hidden_fraction"] = sum((breakdown.categories[kind] for kind in COVERED_BY), BusyTime()).hidden_fraction
    for what, times in (*breakdown.categories.items(), *breakdown.stages.items()):
        is_hidden = breakdown.overlaps and what not in _NEVER_HIDDEN
        names = ("hidden_ms", "exposed_ms", "hidden_fraction") if is_hidden else ("busy_ms",)
        if what is not Category.DATA:
            values |= {f"{what}/{name}": getattr(times, name) for name in names}
    for stage, times in breakdown.traffic.items():
        values |= {f"{stage}/sent_bytes": times.sent, f"{stage}/saved_bytes": times.saved}
    return values


def closing_table(
    ranks: Sequence[Breakdown],  # the mean of each rank over the steps of `mode`
    num_steps: Mapping[Schedule, int],  # measured, of all modes
    mode: Schedule,
    stream: str,
    syncs: Sequence[str] = (),
    stale_rows: Mapping[str, tuple[int, int]] | None = None,  # table -> stale rows read, rows read
) -> str:
    """Return the monitor's output at the end of a run."""
    over_ranks, many, num = mean(ranks), len(ranks) > 1, num_steps[mode]
    others = [f"{one.name} ({_steps(num)})" for one, num in num_steps.items() if one != mode]
    parts = [
        f"Overlap: {mode.name}, stream {stream}; {_steps(num)} measured, {len(ranks)} ranks, ms per step",
        f"Not in this table: {', '.join(others)}" if others else "",
        stage_table(over_ranks),
        _rank_table(ranks) if many else "",
        limit_sentence(over_ranks),
        slowest_sentence(ranks) if many else "",
        _traffic_table(over_ranks.traffic) if over_ranks.traffic else "",
        stale_table(stale_rows) if stale_rows else "",
        *syncs,
        advice(ranks, mode)
        if num > 1
        else "No advice: only one step was measured. Train longer, or set OverlapMonitor(every_n_steps=...).",
    ]
    return "\n".join(filter(None, parts))


def _steps(num: int) -> str:
    return f"{num} step{'s' * (num != 1)}"


def stage_table(breakdown: Breakdown) -> str:
    """Return the table of busy, hidden and exposed time by stage and category; only busy time if nothing overlaps."""
    kinds = {kind: times for kind, times in breakdown.categories.items() if kind not in _OF_THE_HOST}
    rows = _rows(breakdown.stages, "{:.0%}".format) + _rows(kinds, "{:.0%}".format)
    if breakdown.merge_wait_ms:
        rows.append(("waited for embeddings", "", "", f"{breakdown.merge_wait_ms:.2f}", ""))
    host = {
        _OF_THE_HOST[Category.DATA]: breakdown.categories[Category.DATA].busy_ms,
        "Lightning: loop, callbacks, loggers": breakdown.loop_ms,
        "Lightning: self.log": breakdown.log_ms,
    }
    rows += [(name, f"{ms:.2f}", "", "", "") for name, ms in host.items() if ms]
    if breakdown.overlaps:
        return aligned([("", "busy", "hidden", "exposed", "hidden %"), *rows])
    return aligned([("", "busy"), *((row[0], row[1] or row[3]) for row in rows)])


def _rank_table(ranks: Sequence[Breakdown]) -> str:
    kinds = (Category.DENSE, Category.LOOKUP, Category.COPY, Category.COMMUNICATION, Category.HOST)
    times = [[one.step_ms, *(one.categories[kind].busy_ms for kind in kinds), one.blocked_ms] for one in ranks]
    head = ("rank", "step", *map(str, kinds[:-1]), _OF_THE_HOST[Category.HOST], "host blocked")
    return aligned([head, *((str(rank), *(f"{ms:.2f}" for ms in of_rank)) for rank, of_rank in enumerate(times))])


def _traffic_table(traffic: Mapping[Stage, BusyTime]) -> str:
    cells = [
        (str(name), f"{one.sent / 1024:.1f}", f"{one.saved / 1024:.1f}", f"{one.saved / (one.sent + one.saved):.0%}")
        for name, one in (*traffic.items(), ("all stages", sum(traffic.values(), BusyTime())))
    ]
    return aligned([("KiB to other ranks in a step", "sent", "saved", "saved %"), *cells])


def stale_table(rows: Mapping[str, tuple[int, int]]) -> str:
    """Return the table of stale rows: for the stalest tables and for all tables together."""
    worst = sorted(rows, key=lambda table: (-rows[table][0] / rows[table][1], table))[:NUM_STALEST]
    lines = {table: rows[table] for table in worst}
    name = "all sharded tables" if len(worst) == len(rows) else f"all {len(rows)} sharded tables"
    lines[name] = sum(stale for stale, _ in rows.values()), sum(read for _, read in rows.values())
    cells = [(table, str(read), str(stale), f"{stale / read:.1%}") for table, (stale, read) in lines.items()]
    return aligned([("rows in the steps counted", "read", "stale", "stale %"), *cells])


def limit_sentence(breakdown: Breakdown) -> str:
    """Name the resource that limits the step, and the remaining gain of overlap."""
    kind, bound_ms = breakdown.bound
    if kind is Category.DATA:
        return f"data-bound: a step waits for data for {bound_ms:.2f} of its {breakdown.step_ms:.2f} ms."
    busy = f"{kind}-bound: busy for {bound_ms:.2f} of a step's {breakdown.step_ms:.2f} ms"
    if kind is Category.HOST:  # on a CPU the host computes the dense part and the lookups
        parts = (Category.DENSE, Category.LOOKUP, Category.COPY)
        most_ms, most = max((breakdown.categories[part].busy_ms, part) for part in parts)
        if most_ms <= bound_ms:
            busy += f", {most_ms / bound_ms:.0%} of that with {most}"
    return f"{busy}, so more overlap gains at most {breakdown.to_gain_ms / breakdown.step_ms * 100:.0f} %."


def slowest_sentence(ranks: Sequence[Breakdown]) -> str:
    """Name the rank that the others wait for."""
    waits = [one.blocked_ms for one in ranks]
    least, most = min(waits), max(waits)
    slowest, idlest = waits.index(least), waits.index(most)
    if most - least < EVEN * ranks[slowest].step_ms:
        return "The ranks wait about equally long for each other."
    return f"The ranks wait for rank {slowest}: it waits {least:.2f} ms per step, rank {idlest} waits {most:.2f} ms."


def summarize(spans: Sequence[Span], overlapped: Collection[Stage] | None = None) -> Breakdown:
    """Return one rank's breakdown over all its complete steps; raise a ValueError if there are no spans.

    Only time of stages in `overlapped` counts as hidden. None: of the stages noted at the step marks, or else of all.
    """
    window, num_steps = window_of(spans)
    overlapped = noted_stages(spans) if overlapped is None else overlapped
    if any(is_on_stream(span) for span in spans):  # the stage runs on the stream; the host only launches it
        spans = [replace(span, stage=None) if span.kind is Category.HOST and span.stage else span for span in spans]
    return replace(break_down(spans, window, overlapped=overlapped, num_steps=num_steps), blocks=blocks(spans, window))


def blocks(spans: Iterable[Span], window: Interval) -> list[Block]:
    """Return what blocked the host in a window, longest first."""
    found: dict[tuple[str, Stage | None, str], list[float]] = {}
    for span in exclusive((span for span in spans if span.lane == HOST_LANE), window):
        if span.kind is Category.WAIT:
            found.setdefault((span.name, span.stage, span.detail), []).append(span.duration_ms)
    entries = [Block(*key, sum(times), len(times)) for key, times in found.items()]
    return sorted(entries, key=lambda block: -block.total_ms)


def as_report(ranks: Mapping[int | str, Breakdown]) -> str:
    """Return the tables of all ranks for a terminal."""
    parts = ([f"{label(rank)}: {headline(found)}", *tables(found)] for rank, found in ranks.items())
    return "\n\n\n".join(map("\n\n".join, parts))


def label(rank: int | str) -> str:
    """Return the label of a rank or file."""
    return f"rank {rank}" if isinstance(rank, int) else rank


def headline(found: Breakdown) -> str:
    """Return a line on a rank's overlap."""
    parts = [f"{found.step_ms:.1f} ms per step" if found.num_steps > 1 else f"{found.step_ms:.1f} ms"]
    for kind in (Category.COMMUNICATION, Category.LOOKUP):
        times = found.categories[kind]
        if times.hidden_ms or (times.busy_ms and kind is Category.COMMUNICATION):
            hidden = f"{_percent(times.hidden_fraction)} hidden, " if found.overlaps else ""
            parts.append(f"{kind} {hidden}{times.exposed_ms:.2f} ms exposed")
    data_ms = found.categories[Category.DATA].busy_ms
    if data_ms > SMALL * found.step_ms:
        parts.append(f"waiting for data {_percent(data_ms / found.step_ms)}")
    parts.append(f"host blocked {_percent(found.blocked_ms / found.step_ms)}")
    return "; ".join(parts)


def tables(found: Breakdown) -> list[str]:
    """Return the tables of one rank: by category, by stage, and what blocked the host."""
    head = ("busy ms", "hidden ms", "exposed ms", "hidden") if found.overlaps else ("busy ms", "exposed ms")

    def of(name: str, times: Mapping[Category, BusyTime] | Mapping[Stage, BusyTime]) -> str:
        cells = _rows(times, _percent, blank="-")
        rows = cells if found.overlaps else [(*row[:2], row[3]) for row in cells]
        return aligned([(name, *head), *rows], ruled=False)

    kinds = of("per step", {kind: times for kind, times in found.categories.items() if times.busy_ms})
    window_ms = found.step_ms * found.num_steps
    about = (
        f"{window_ms:.1f} ms, {_steps(found.num_steps)} of {found.step_ms:.2f} ms. "
        f"It waited for embeddings for {found.merge_wait_ms:.2f} ms per step; {limit_sentence(found)}"
    )
    shown, rest = list(found.blocks[:TOP_BLOCKS]), found.blocks[TOP_BLOCKS:]
    if rest:
        total_ms, count = sum(one.total_ms for one in rest), sum(one.count for one in rest)
        shown.append(Block(f"{len(rest)} others", None, "", total_ms, count))
    rows = [("host blocked by", "ms", "of window", "times", "where")]
    for one in shown:
        where = " ".join(filter(None, (one.detail, one.stage and f"({one.stage})")))
        rows.append((one.name, f"{one.total_ms:.1f}", _percent(one.total_ms / window_ms), str(one.count), where))
    blocked_ms = found.blocked_ms * found.num_steps
    share = _percent(blocked_ms / window_ms)
    blocked = aligned(rows, words=(0, 4), ruled=False)
    blocked += f"\nHost blocked {blocked_ms:.1f} of {window_ms:.1f} ms ({share})."
    return [f"{kinds}\n{about}", *([of("stage", found.stages)] if found.stages else []), blocked]


def _percent(fraction: float) -> str:
    percent = 100 * fraction
    return f"{percent:.2f} %" if percent < 10 else f"{percent:.1f} %"


def advice(ranks: Sequence[Breakdown], schedule: Schedule) -> str:
    """Return the most useful change, for the mean step of the rank that waits least."""
    found = min(ranks, key=lambda one: one.blocked_ms)
    index = ranks.index(found)
    of_loop = (
        "this time does not depend on the batch, so raise the batch size; with a logger log_every_n_steps, with a "
        "progress bar its refresh_rate"
    )
    workers = "raise num_workers of the DataLoader, while the ranks and their workers leave a CPU core free"
    losses: tuple[tuple[Callable[[Breakdown], float], str, str], ...] = (
        (lambda one: one.categories[Category.DATA].busy_ms, "waiting for data takes", workers),
        (
            lambda one: one.categories[Category.COMMUNICATION].exposed_ms,
            "exposed communication takes",
            _another_mode(schedule),
        ),
        (lambda one: one.log_ms, "self.log takes", "log fewer values, or with on_step=False"),
        (lambda one: one.loop_ms, "Lightning's loop, callbacks and loggers take", of_loop),
    )
    lost, what, change = max(losses, key=lambda one: one[0](found))
    gain_ms = lost(found)
    if len(ranks) > 1:  # the table has the mean of all ranks
        over_ranks = f"{sum(map(lost, ranks)) / len(ranks):.3g} in the mean of all ranks"
        where = f" on rank {index}, which waits least ({over_ranks})"
    else:
        where = ""
    if gain_ms <= WORTHWHILE * found.step_ms:
        return f"Advice: nothing to change; {found.bound[0]} time limits the step."
    return (
        f"Advice: {what} {gain_ms:.3g} of {found.step_ms:.3g} ms{where}: {change}. "
        f"This gains at most {gain_ms:.3g} ms per step ({gain_ms / found.step_ms:.0%})."
    )


def _another_mode(schedule: Schedule) -> str:
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    if schedule.splits_backward:
        return f"use pipeline='semi_sync_deferred' if a staleness of 1 is acceptable ({schedule.name} is exact)"
    if schedule.step_of(Stage.EMBEDDING_UPDATE) is not None:
        return "raise the batch size, or choose a sharding that sends less"
    if schedule.staleness:
        deferred = "'semi_sync_deferred'" if schedule.name == "semi_sync" else "Mode(..., defer_update=True)"
        return f"use pipeline={deferred}, which keeps the staleness"
    if lookup is None or lookup.offset < 1:
        return "use pipeline='fused_sparse_dist', which gives the same losses"
    return (
        "use pipeline='split_backward', which gives the same losses, or 'semi_sync' if a staleness of 1 is acceptable"
    )
