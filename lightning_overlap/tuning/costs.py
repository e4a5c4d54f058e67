"""Costs of the parts of a step, whatever the mode: the work of each, and the time of each all-to-all on the link.

Also what they would be if fewer bytes were sent: in fewer bits, or with small tables replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from ..profiling import ALL_TO_ALLS, HOST_LANE, BusyTime, Category, Interval, Span, exclusive
from ..schedules import Stage

BEFORE_MERGE, AFTER_MERGE = "forward until the merge", "forward from the merge on"
BEFORE_SENDING, AFTER_SENDING = "backward until it sends gradients", "backward from then on"
LOOP = "loop, callbacks, loggers"
SIZES, IDS, EMBEDDINGS, GRADIENTS = ALL_TO_ALLS

_SENDS = {Stage.INPUT_SPLITS_DIST: SIZES, Stage.INPUT_DATA_DIST: IDS}
_SENDS |= {Stage.PREFETCH: EMBEDDINGS, Stage.EMBEDDING_LOOKUP: EMBEDDINGS}
_WITHIN_FORWARD = {SIZES: IDS, IDS: EMBEDDINGS}
"""What a module's own forward does after it has sent an all-to-all."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the parts of one step, in milliseconds.

    Args:
        work: Time of the host (on CUDA of the streams) by part; a sparse stage has the name of what it sends.
        wire: Time of the link by all-to-all, as if each were alone on it.
        flight: Time from the issue of an all-to-all to its end, whatever else was under way.
        on_device: Whether the dense part runs on a device.
    """

    work: Mapping[str, float]
    wire: Mapping[str, float]
    flight: Mapping[str, float]
    on_device: bool = False


def costs_of(spans: Iterable[Span], window: Interval) -> Costs:
    """Return the costs of the parts of a step.

    While several all-to-alls are under way, or the all-reduce of dense gradients, which has no span, each looks as slow
    as all of them together. So if bytes were counted, the time of the link is divided by them.

    Args:
        spans: The spans of that step and of the one before.
        window: The step: begin and end, in milliseconds.
    """
    spans = list(spans)
    own = exclusive(spans, window)
    sent = sorted((span for span in spans if span.kind is Category.COMMUNICATION), key=lambda span: span.start_ms)
    in_window = [span for span in sent if window[0] <= span.start_ms < window[1]]
    on_device = any(span.kind is Category.DENSE and span.lane != HOST_LANE for span in own)
    waits = [span.start_ms for span in own if span.kind is Category.WAIT and span.name == EMBEDDINGS]
    merge_ms = waits[-1] if waits else window[0]
    parts = [*map(str, Stage), *_SENDS.values(), BEFORE_MERGE, AFTER_MERGE, BEFORE_SENDING, AFTER_SENDING]
    work = dict.fromkeys(parts, 0.0)
    for span in _cut(own, [one.start_ms for one in in_window]):
        if span.kind in (Category.WAIT, Category.COMMUNICATION) or not _is_the_work(span, own):
            continue
        stage = Stage.COPY_BATCH_TO_DEVICE if span.kind is Category.DATA else span.stage
        if stage is not None:
            work[_part(stage, span, in_window, merge_ms)] += span.duration_ms
    hosts = [span for span in own if span.lane == HOST_LANE and span.kind is not Category.COMMUNICATION]
    on_host = sum(span.duration_ms for span in hosts if span.stage is not None or span.kind is not Category.HOST)
    work[LOOP] = max(0.0, window[1] - window[0] - on_host)
    wire, flight = _link_times(sent, window)
    of_bytes = {name: sum(span.sent_bytes for span in in_window if span.name == name) for name in ALL_TO_ALLS}
    if total := sum(of_bytes.values()):
        wire = {name: sum(wire.values()) * num_bytes / total for name, num_bytes in of_bytes.items()}
    return Costs(work, wire, flight, on_device)


def _is_the_work(span: Span, own: Sequence[Span]) -> bool:
    """Whether a span is work of its stage, and not the host's launch of work that a device does."""
    return span.lane != HOST_LANE or not any(
        other.stage is span.stage and other.lane != HOST_LANE and other.kind is not Category.COMMUNICATION
        for other in own
        if span.stage is not None
    )


def _cut(spans: Iterable[Span], times: Sequence[float]) -> Iterable[Span]:
    """Cut spans at the given times, at which all-to-alls were sent."""
    for span in spans:
        edges = [span.start_ms, *(time for time in times if span.start_ms < time < span.end_ms), span.end_ms]
        for start, end in pairwise(edges):
            yield replace(span, start_ms=start, end_ms=end)


def _part(stage: Stage, span: Span, sent: Sequence[Span], merge_ms: float) -> str:
    before = [one.name for one in sent if one.stage is stage and one.start_ms <= span.start_ms]
    if stage is Stage.BACKWARD:
        return AFTER_SENDING if GRADIENTS in before else BEFORE_SENDING
    if stage is not Stage.DENSE_FORWARD:
        return _SENDS.get(stage, str(stage))
    inside = _WITHIN_FORWARD.get(before[-1]) if before else None
    return inside or (BEFORE_MERGE if span.start_ms < merge_ms else AFTER_MERGE)


def _link_times(sent: Sequence[Span], window: Interval) -> tuple[dict[str, float], dict[str, float]]:
    """Return `wire` and `flight` of the all-to-alls that ended in a window."""
    wire, flight = dict.fromkeys(ALL_TO_ALLS, 0.0), dict.fromkeys(ALL_TO_ALLS, 0.0)
    free_ms = float("-inf")
    for span in sent:
        alone_ms = max(0.0, span.end_ms - max(span.start_ms, free_ms))
        free_ms = max(free_ms, span.end_ms)
        if span.name in wire and window[0] < span.end_ms <= window[1]:
            wire[span.name] += alone_ms
            flight[span.name] = max(flight[span.name], span.duration_ms)
    if not flight[SIZES]:  # sizes were sent with ids; alone they take no longer than any other all-to-all
        flight[SIZES] = min((ms for ms in flight.values() if ms), default=0.0)
    return wire, flight


def over_ranks(ranks: Sequence[Costs], slowest: int) -> Costs:
    """Return the costs of a step of all ranks: the work of rank `slowest`, which waits least.

    An all-to-all ends when every rank has issued it. The rank that issues it last measures its real time, the minimum.
    """
    return replace(ranks[slowest], wire=_each(min, ranks, "wire"), flight=_each(min, ranks, "flight"))


def mean_costs(found: Sequence[Costs]) -> Costs:
    """Return the mean of the costs of several steps."""
    work, wire, flight = (_each(fmean, found, kind) for kind in ("work", "wire", "flight"))
    return Costs(work, wire, flight, found[0].on_device)


def _each(of: Callable[[list[float]], float], found: Sequence[Costs], kind: str) -> dict[str, float]:
    times = [getattr(one, kind) for one in found]
    return {name: of([one[name] for one in times]) for name in times[0]}


def shrunk(costs: Costs, share: float) -> Costs:
    """Return the costs if embeddings and gradients had `share` of their bytes."""

    def shrink(times: Mapping[str, float]) -> dict[str, float]:
        return {name: ms * share if name in (EMBEDDINGS, GRADIENTS) else ms for name, ms in times.items()}

    return replace(costs, wire=shrink(costs.wire), flight=shrink(costs.flight))


# -- replicated tables ----------------------------------------------------------------------------------------------

NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bags:
    """A shard of a table whose pooled embeddings are sent between ranks."""

    name: str
    """Name of the table; column-wise shards of one table share it."""
    num_rows: int
    """Rows of the table."""
    num_columns: int
    """Columns of the shard."""
    num_features: int
    """Features that are looked up in it; each sends one embedding for a sample."""


def with_replicas(
    tables: Iterable[Bags], costs: Costs, traffic: Mapping[Stage, BusyTime], num_ranks: int
) -> tuple[list[str], Costs] | None:
    """Return the tables that send more bytes than an all-reduce of their gradients, and the costs with them replicated.

    Args:
        tables: All shards whose embeddings are sent.
        costs: The costs of a step's parts, as measured.
        traffic: Bytes that a rank sends in a step, by stage, in full precision.
        num_ranks: How many ranks there are.

    Returns:
        Names of the tables and the costs; None if there is no such table, or if bytes were not counted by stage.
    """
    tables = list(tables)
    sent = sum(traffic[stage].sent for stage in (Stage.EMBEDDING_LOOKUP, Stage.BACKWARD) if stage in traffic)
    link_ms = costs.wire[EMBEDDINGS] + costs.wire[GRADIENTS]
    width = sum(table.num_columns * table.num_features for table in tables)
    if Stage.EMBEDDING_LOOKUP not in traffic or not (sent and link_ms and width):
        return None
    share: dict[str, float] = defaultdict(float)  # column-wise shards have the name of their table
    reduced: dict[str, float] = defaultdict(float)
    for table in tables:
        share[table.name] += table.num_columns * table.num_features / width
        reduced[table.name] += 2 * (num_ranks - 1) / num_ranks * table.num_rows * table.num_columns * NUMBER_BYTES
    chosen = [name for name in share if reduced[name] < share[name] * sent]
    if not chosen:
        return None
    all_reduce_ms = sum(reduced[name] for name in chosen) * link_ms / sent
    work = {**costs.work, AFTER_SENDING: costs.work[AFTER_SENDING] + all_reduce_ms}
    return chosen, replace(shrunk(costs, 1 - sum(share[name] for name in chosen)), work=work)
