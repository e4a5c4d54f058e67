"""What accounts say, in words and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..schedules import Stage
from .host_syncs import HostSync
from .overlap import Breakdown, BusyTime, mean
from .spans import Category

EVEN = 0.02
"""Ranks whose waits differ by less than this share of a step are even."""

NUM_WORST = 3
"""Host syncs that are named."""


NUM_STALEST = 8
"""Tables whose stale rows are listed."""


def metrics(breakdown: Breakdown) -> dict[str, float]:
    """Return what goes into a log: milliseconds per step, and fractions between 0 and 1, by name."""
    values = {
        "step_ms": breakdown.step_ms,
        "merge_wait_ms": breakdown.merge_wait_ms,
        "blocked_ms": breakdown.blocked_ms,
        "bound_ms": breakdown.bound[1],
        "to_gain_ms": breakdown.to_gain_ms,
        "hidden_fraction": hideable(breakdown).hidden_fraction,
    }
    named: dict[str, BusyTime] = {str(kind): times for kind, times in breakdown.kinds.items()}
    named |= {str(stage): times for stage, times in breakdown.stages.items()}
    for name, times in named.items():
        if name in _NEVER_HIDDEN:
            values[f"{name}/busy_ms"] = times.busy_ms
        else:
            values[f"{name}/hidden_ms"] = times.hidden_ms
            values[f"{name}/exposed_ms"] = times.exposed_ms
            values[f"{name}/hidden_fraction"] = times.hidden_fraction
    return values


_NEVER_HIDDEN = frozenset(map(str, (Category.DENSE, Category.HOST, Stage.DENSE_FORWARD, Stage.OPTIMIZER_STEP)))
"""What has a busy time alone; the others hide behind it. A backward has its collectives to hide."""


def hideable(breakdown: Breakdown) -> BusyTime:
    """Return communication, lookup and copy together."""
    parts = [breakdown.kinds.get(kind, BusyTime()) for kind in (Category.COMMUNICATION, Category.LOOKUP, Category.COPY)]
    return BusyTime(sum(part.busy_ms for part in parts), sum(part.hidden_ms for part in parts))


def closing_table(
    ranks: Sequence[Breakdown],
    num_steps: int,
    title: str,
    syncs: Sequence[str] = (),
    stale_rows: Mapping[str, tuple[int, int]] | None = None,
) -> str:
    """Return what a run says at its end.

    Args:
        ranks: The mean account of each rank.
        num_steps: Steps that were measured on each.
        title: What ran.
        syncs: Lines about host syncs.
        stale_rows: Rows read stale and rows read, by table, in a mode that has a staleness.
    """
    over_ranks = mean(ranks)
    lines = [f"Overlap: {title}; {num_steps} steps measured, {len(ranks)} ranks, ms per step", stage_table(over_ranks)]
    lines.append(rank_table(ranks))
    lines.append(limit_sentence(over_ranks))
    if len(ranks) > 1:
        lines.append(slowest_sentence(ranks))
    if stale_rows:
        lines.append(stale_table(stale_rows))
    return "\n".join([*lines, *syncs])


def stage_table(breakdown: Breakdown) -> str:
    """Return busy, hidden and exposed time by stage, and by kind beneath."""
    head = ("", "busy", "hidden", "exposed", "hidden %")
    rows = [_row(str(stage), times) for stage, times in breakdown.stages.items()]
    rows += [_row(f"all {kind}", times) for kind, times in breakdown.kinds.items() if kind is not Category.HOST]
    rows.append(("waited at the merge", "", "", f"{breakdown.merge_wait_ms:.2f}", ""))
    return _aligned([head, *rows])


def rank_table(ranks: Sequence[Breakdown]) -> str:
    """Return a row per rank: its step, what it was busy with, and what it waited."""
    head = ("rank", "step", "dense", "lookup", "copy", "communication", "host at work", "host waiting")
    rows = [
        (
            str(rank),
            *(
                f"{value:.2f}"
                for value in (
                    one.step_ms,
                    *(
                        one.kinds.get(kind, BusyTime()).busy_ms
                        for kind in (
                            Category.DENSE,
                            Category.LOOKUP,
                            Category.COPY,
                            Category.COMMUNICATION,
                            Category.HOST,
                        )
                    ),
                    one.blocked_ms,
                )
            ),
        )
        for rank, one in enumerate(ranks)
    ]
    return _aligned([head, *rows])


def stale_table(rows: Mapping[str, tuple[int, int]]) -> str:
    """Return the share of looked-up rows that were read stale: of the tables with the most, and of all."""
    worst = sorted(rows, key=lambda table: (-rows[table][0] / rows[table][1], table))[:NUM_STALEST]
    lines = {table: rows[table] for table in worst}
    name = "all tables" if len(worst) == len(rows) else f"all {len(rows)} tables"
    lines[name] = sum(stale for stale, _ in rows.values()), sum(read for _, read in rows.values())
    cells = [(table, str(read), str(stale), f"{stale / read:.1%}") for table, (stale, read) in lines.items()]
    return _aligned([("rows in the steps counted", "read", "stale", "stale %"), *cells])


def limit_sentence(breakdown: Breakdown) -> str:
    """Say which resource limits the step, and what overlap can still gain."""
    name, bound_ms = breakdown.bound
    what = name
    if name == str(Category.HOST):  # on a CPU the host does the dense part and the lookups itself
        parts = {
            kind: breakdown.kinds.get(kind, BusyTime()).busy_ms
            for kind in (Category.DENSE, Category.LOOKUP, Category.COPY)
        }
        most = max(parts, key=lambda kind: parts[kind])
        share = parts[most] / bound_ms if bound_ms else 0.0
        what = f"host-bound ({most} is {share:.0%} of it)" if share <= 1 else "host-bound"
    else:
        what = f"{name}-bound"
    percent = breakdown.to_gain_ms / breakdown.step_ms * 100 if breakdown.step_ms else 0.0
    return (
        f"{what}: it is busy {bound_ms:.2f} of the {breakdown.step_ms:.2f} ms of a step, so overlap cannot gain more "
        f"than {percent:.0f} %."
    )


def slowest_sentence(ranks: Sequence[Breakdown]) -> str:
    """Name the rank that the others wait for."""
    waits = [one.blocked_ms for one in ranks]
    slowest = min(range(len(ranks)), key=lambda rank: waits[rank])
    most = max(waits)
    if most - waits[slowest] < EVEN * ranks[slowest].step_ms:
        return "The ranks are even: none waits for another."
    return (
        f"Rank {slowest} is the slowest: it waits {waits[slowest]:.2f} ms a step, rank {waits.index(most)} waits "
        f"{most:.2f} ms."
    )


def sync_lines(found: Sequence[HostSync], on_cuda: bool) -> list[str]:
    """Say how many host-device syncs a step had, and name the worst: those that blocked longest, or came most often."""
    places = Counter((sync.stage, sync.source(), sync.operator) for sync in found)
    blocked = dict.fromkeys(places, 0.0)
    for sync in found:
        blocked[sync.stage, sync.source(), sync.operator] += sync.blocked_ms
    what = "host syncs" if on_cuda else "reads that would be host syncs on CUDA"
    lines = [f"{what} in a step: {len(found)}"]
    for place in sorted(places, key=lambda place: (-blocked[place] if on_cuda else 0, -places[place]))[:NUM_WORST]:
        stage, source, operator = place
        time = f", blocked {blocked[place]:.2f} ms" if on_cuda else ""
        lines.append(f"  {places[place]} x {source}: .{operator}() in {stage or 'the loop'}{time}")
    return lines


def _row(name: str, times: BusyTime) -> tuple[str, ...]:
    if name.removeprefix("all ") in _NEVER_HIDDEN:
        return name, f"{times.busy_ms:.2f}", "", "", ""
    return (
        name,
        f"{times.busy_ms:.2f}",
        f"{times.hidden_ms:.2f}",
        f"{times.exposed_ms:.2f}",
        f"{times.hidden_fraction:.0%}",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(line.rstrip() for line in lines)
