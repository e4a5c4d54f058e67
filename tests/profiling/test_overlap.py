"""The accounting of timelines: by hand beside a drawing, and against a count of every millisecond."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_overlap.profiling.overlap import COVERED_BY, BusyTime, break_down, mean, overlapped_by
from lightning_overlap.profiling.report import blocks, headline, summarize, tables
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span, exclusive, rows_of
from lightning_overlap.profiling.steps import find_steps, steady_window, window_of
from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.stages import Stage

END = 14
KINDS = (Category.DENSE, Category.COMMUNICATION, Category.LOOKUP, Category.COPY)
LETTERS = {
    "F": (Category.DENSE, Stage.DENSE_FORWARD, 0),
    "B": (Category.DENSE, Stage.BACKWARD, 0),
    "S": (Category.DENSE, Stage.OPTIMIZER_STEP, 0),
    "L": (Category.LOOKUP, Stage.EMBEDDING_LOOKUP, 1),
    "i": (Category.COMMUNICATION, Stage.INPUT_DATA_DIST, 1),
    "g": (Category.COMMUNICATION, Stage.BACKWARD, 0),
    "e": (Category.COMMUNICATION, Stage.EMBEDDING_LOOKUP, 1),
    "w": (Category.WAIT, None, None),
}


def drawn(**lanes: str) -> list[Span]:
    """Spans of a drawing: a letter a millisecond."""
    spans = []
    for lane, line in lanes.items():
        end = 0
        for letter, run in itertools.groupby(line):
            start, end = end, end + len(list(run))
            if letter != " ":
                kind, stage, batch = LETTERS[letter]
                spans.append(Span(start, end, kind, lane, kind.value, stage, batch))
    return spans


spans_of_any_kind = st.lists(
    st.builds(
        lambda start, long, kind, lane, stage: Span(start, start + long, kind, lane, kind.value, stage),
        st.integers(0, END - 1),
        st.integers(1, 6),
        st.sampled_from(Category),
        st.sampled_from([HOST_LANE, "stream 7", "stream 9"]),
        st.sampled_from([None, *Stage]),
    ),
    max_size=12,
)


def busy_at(spans: list[Span], moment: int) -> set[tuple[Category, str, Stage | None]]:
    """What goes on in the millisecond that begins then: per lane what began last, and every collective."""
    there = [span for span in spans if span.start_ms <= moment < span.end_ms]
    found = {(span.kind, span.lane, span.stage) for span in there if span.kind is Category.COMMUNICATION}
    for lane in {span.lane for span in there}:
        own = [span for span in there if span.lane == lane and span.kind is not Category.COMMUNICATION]
        if own:
            top = max(reversed(own), key=lambda span: (span.start_ms, -span.end_ms, span.kind is Category.WAIT))
            found.add((top.kind, lane, top.stage))
    return found


def test_hidden_is_what_the_mode_overlaps() -> None:
    spans = drawn(
        host="FFFFFBBBBBBwwLLSSSww",  # forward, backward and step of batch 0, lookup of batch 1
        ids=" iiii",
        gradients="       ggggggggg",  # autograd has 4 ms of its way, the lookup 2, the step 1
        embeddings="                eeee",  # 2 ms under the step
    )

    def of(mode: str | None) -> tuple[BusyTime, BusyTime]:
        overlapped = None if mode is None else overlapped_by(MODES[mode])
        found = break_down(spans, (0, 20), overlapped=overlapped)
        return found.categories[Category.COMMUNICATION], found.stages[Stage.INPUT_DATA_DIST]

    whole, ids = of(None)
    assert (whole, ids) == (BusyTime(17, 13), BusyTime(4, 4)), "of a program that nobody knows"
    whole, ids = of("fused_sparse_dist")
    assert (whole, ids) == (BusyTime(17, 4 + 2 + 2, 4 + 1), BusyTime(4, 4))
    assert whole.exposed_ms == 4
    whole, ids = of("base")
    assert (whole, ids) == (BusyTime(17, 0, 13), BusyTime(4, 0, 4))
    assert whole.exposed_ms == 4
    assert of("semi_sync_deferred")[0] == BusyTime(17, 13)
    assert mean([break_down(spans, (0, 20), overlapped=())] * 2).categories[Category.COMMUNICATION] == whole


def test_what_a_mode_does_not_overlap_is_not_called_hidden() -> None:
    spans = drawn(host="FFFFwwBB", s9=" eeeee ")
    known, unknown = summarize(spans, overlapped_by(MODES["base"])), summarize(spans)
    assert "hidden" not in " ".join([headline(known), *tables(known)])
    assert "communication 2.00 ms exposed" in headline(known)
    assert "60.0 % hidden" in headline(unknown)


def test_a_wait_for_embeddings_counts_where_the_dense_part_runs() -> None:
    gemms = [Span(start, end, Category.DENSE, "stream 7", "gemm") for start, end in ((0, 1), (3, 9))]
    for name, lane, waited_ms in (
        ("embeddings", HOST_LANE, 2),
        ("embeddings: waits for all_to_all", "stream 7", 2),
        ("embeddings", "stream 9", 0),  # nothing dense runs there
        ("ids", HOST_LANE, 0),
    ):
        assert summarize([*gemms, Span(1, 3, Category.WAIT, lane, name)]).merge_wait_ms == waited_ms


def test_bytes_count_in_the_step_that_sent_them() -> None:
    ids = Span(0, 30, Category.COMMUNICATION, "gloo", "ids", Stage.INPUT_DATA_DIST)
    sent = ((-5, 1), (0, 10), (9, 100), (10, 1000))
    spans = [replace(ids, start_ms=start, sent_bytes=num, saved_bytes=3 * num) for start, num in sent]
    found = break_down([*spans, *drawn(host="BBBB")], (0, 10), num_steps=2).traffic
    assert {stage: (one.sent, one.saved) for stage, one in found.items()} == {Stage.INPUT_DATA_DIST: (55, 165)}


HOST_WAITS_BESIDE_A_GPU = [
    Span(0, 2, Category.DENSE, HOST_LANE, "forward"),
    Span(2, 4, Category.WAIT, HOST_LANE, "ids"),
    Span(2, 4, Category.COMMUNICATION, "gloo", "ids"),
    Span(2, 4, Category.DENSE, "stream 7", "gemm"),
]


@given(spans_of_any_kind, st.integers(0, END), st.integers(1, 8))
@example(HOST_WAITS_BESIDE_A_GPU, 0, 4)
def test_the_sweep_equals_a_count_of_every_millisecond(spans: list[Span], start: int, long: int) -> None:
    end = start + long
    at = [busy_at(spans, moment) for moment in range(start, end)]
    kept = break_down(spans, (start, end))
    waits, fetches = ([(kind, HOST_LANE) in _lanes(now) for now in at] for kind in (Category.WAIT, Category.DATA))
    host_computes = any((Category.DENSE, HOST_LANE) in _lanes(now) for now in at)
    for kind in KINDS:
        cover = COVERED_BY.get(kind, frozenset())
        busy = [(now, wait) for now, wait in zip(at, waits, strict=True) if any(found is kind for found, *_ in now)]
        hidden = [any(found in cover for found, *_ in now) for now, _ in busy]
        if kind is Category.COMMUNICATION and host_computes:
            hidden = [not wait for _, wait in busy]
        assert kept.categories[kind] == BusyTime(len(busy), sum(hidden)), kind
    assert kept.blocked_ms == sum(waits)
    assert kept.categories[Category.DATA].busy_ms == sum(fetches)
    assert kept.categories[Category.HOST].busy_ms == long - sum(waits) - sum(fetches)
    own = [{lane for kind, lane in _lanes(now) if kind is not Category.COMMUNICATION} for now in at]
    assert kept.loop_ms == long - sum(HOST_LANE in lanes for lanes in own)
    assert kept.merge_wait_ms == 0  # none of these waits is for embeddings
    for stage, times in kept.stages.items():
        counted = (*KINDS, Category.HOST)
        per_kind = [sum(any(k is kind and s is stage for k, _, s in now) for now in at) for kind in counted]
        assert times.busy_ms == sum(per_kind)
        assert 0 <= times.hidden_ms <= times.busy_ms == times.hidden_ms + times.exposed_ms


@given(spans_of_any_kind, st.integers(0, END), st.integers(1, 8))
def test_each_moment_of_a_lane_is_one_spans(spans: list[Span], start: int, long: int) -> None:
    alone = [span for span in spans if span.kind is not Category.COMMUNICATION]
    cut = exclusive(alone, (start, start + long))
    assert all(start <= span.start_ms < span.end_ms <= start + long for span in cut)
    for lane, moment in itertools.product({span.lane for span in alone}, range(-1, END + 8)):
        there = [one for one in alone if one.lane == lane and one.start_ms <= moment < one.end_ms]
        owners = [one for one in cut if one.lane == lane and one.start_ms <= moment < one.end_ms]
        assert len(owners) == (start <= moment < start + long and bool(there))


@given(spans_of_any_kind, st.booleans())
def test_rows_hold_every_span_and_none_overlaps(spans: list[Span], nested: bool) -> None:
    rows = rows_of(spans, nested=nested)
    assert sorted(id(span) for row in rows for span in row) == sorted(map(id, spans))
    for one, other in (pair for row in rows for pair in itertools.combinations(row, 2)):
        inside = one.start_ms <= other.start_ms and other.end_ms <= one.end_ms
        assert one.end_ms <= other.start_ms or (nested and inside)


def test_beside_a_gpu_the_hosts_share_of_a_stage_is_no_busy_time() -> None:
    host = Span(0, 5, Category.HOST, HOST_LANE, "launches", Stage.INPUT_DATA_DIST)
    sent = Span(1, 3, Category.COMMUNICATION, "stream 9", "all_to_all", Stage.INPUT_DATA_DIST)
    assert summarize([host, sent]).stages == {Stage.INPUT_DATA_DIST: BusyTime(2, 0)}
    on_cpu = [replace(span, lane=lane) for span, lane in ((host, HOST_LANE), (sent, "gloo"))]
    assert summarize(on_cpu).stages == {Stage.INPUT_DATA_DIST: BusyTime(7, 0)}  # there the host does it


def _lanes(now: set[tuple[Category, str, Stage | None]]) -> set[tuple[Category, str]]:
    return {(kind, lane) for kind, lane, _ in now}


def forwards(*starts: float, batch: bool = True) -> list[Span]:
    return [
        Span(start, start + 2, Category.DENSE, HOST_LANE, "forward", Stage.DENSE_FORWARD, number if batch else None)
        for number, start in enumerate(starts)
    ]


def test_steps_go_from_forward_to_forward_or_are_the_profilers_marks() -> None:
    for batch in (True, False):
        inner = Span(0.5, 1, Category.DENSE, HOST_LANE, "over arch", Stage.DENSE_FORWARD, 0 if batch else None)
        assert find_steps([*forwards(0, 10, 25, 35, batch=batch), inner]) == [(0, 10), (10, 25), (25, 35)]
    marks = [Span(10 * n, 10 * n + 9, Category.HOST, HOST_LANE, f"ProfilerStep#{n + 7}") for n in range(2)]
    assert find_steps([*forwards(0, 3, 6), *marks]) == [(0, 9), (10, 19)]
    assert window_of(marks) == ((0, 19), 2)
    kernel = Span(4, 30, Category.DENSE, "stream 7", "gemm")
    assert window_of([*marks, kernel]) == ((4, 30), 2)  # a GPU runs behind the marks


def test_steady_steps_are_the_usual_ones() -> None:
    spans = forwards(0, 50, 60, 70, 80, 120)  # the first and the last step are slow
    assert steady_window(spans, 3) == (50, 80)
    assert steady_window(spans, 99) == (0, 120)
    assert steady_window(drawn(host="BBBB"), 3) == (0, 4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        steady_window(spans, 0)
    with pytest.raises(ValueError, match="the timeline has no spans"):
        window_of([])


def test_what_blocked_the_host_is_added_up_by_place() -> None:
    def wait(start: float, end: float, name: str, lane: str = HOST_LANE) -> Span:
        return Span(start, end, Category.WAIT, lane, name, Stage.INPUT_SPLITS_DIST, None, "cudaMemcpyAsync")

    copies = [wait(0, 2, "aten::copy_"), wait(7, 9, "aten::copy_")]
    spans = [*copies, wait(3, 6, "aten::item"), wait(0, 9, "x", "stream 7")]
    found = [(block.name, block.total_ms, block.count) for block in blocks(spans, (0, 8))]
    assert found == [("aten::copy_", 3, 2), ("aten::item", 3, 1)]
    told = summarize([*spans, Span(0, 10, Category.HOST, HOST_LANE, "ProfilerStep#0")])
    assert "host blocked 70.0 %" in headline(told)
    assert tables(told)[-1].endswith("\nHost blocked 7.0 of 10.0 ms (70.0 %).")
