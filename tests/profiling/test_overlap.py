"""The accounting of timelines: by hand beside a drawing, and against a count of every millisecond."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.profiling.overlap import COVERED_BY, BusyTime, break_down, mean, overlapped_by
from lightning_overlap.profiling.report import blocks, headline, summarize, tables
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span, exclusive, moments, rows_of
from lightning_overlap.profiling.steps import find_steps, steady_window, window_of
from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.stages import Stage

END = 14
KINDS = (Category.DENSE, Category.COMMUNICATION, Category.LOOKUP, Category.COPY)
LETTERS = {
    "D": Category.DENSE,
    "L": Category.LOOKUP,
    "c": Category.COMMUNICATION,
    "=": Category.COPY,
    "w": Category.WAIT,
    "h": Category.HOST,
}


def drawn(**lanes: str) -> list[Span]:
    """Spans of a drawing: a letter a millisecond."""
    spans = []
    for lane, line in lanes.items():
        for start, letter in enumerate(line):
            if letter != " " and (start == 0 or line[start - 1] != letter):
                end = next((at for at in range(start, len(line)) if line[at] != letter), len(line))
                spans.append(Span(start, end, LETTERS[letter], lane, LETTERS[letter].value))
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
    found = {
        (s.kind, s.lane, s.stage) for s in spans if s.kind is Category.COMMUNICATION and s.start_ms <= moment < s.end_ms
    }
    for lane in {span.lane for span in spans}:
        there = [
            (span.start_ms, -span.end_ms, span.kind is Category.WAIT, number, span)
            for number, span in enumerate(spans)
            if span.lane == lane and span.kind is not Category.COMMUNICATION and span.start_ms <= moment < span.end_ms
        ]
        if there:
            top = max(there)[-1]
            found.add((top.kind, lane, top.stage))
    return found


def test_a_step_by_hand() -> None:
    #               0         1
    #               01234567890123456789
    spans = drawn(
        host="hhhwwwwhhhhhhhhhhhhh",
        s7=" DDDDDD  DDDDLL DD   ",
        s9="   cccccc     ccc    ",
        s8="==           =====   ",
    )
    kept = break_down(spans, (0, 20))
    assert kept.step_ms == 20
    assert kept.categories[Category.DENSE] == BusyTime(12, 0)
    assert kept.categories[Category.COMMUNICATION] == BusyTime(9, 4 + 1 + 1)  # 3-7 dense, 14 lookup, 16 dense
    assert kept.categories[Category.LOOKUP] == BusyTime(2, 0)
    assert kept.categories[Category.COPY] == BusyTime(7, 1 + 2 + 2)  # 1 dense, 13-15 lookup, 16-18 dense
    assert kept.categories[Category.HOST] == BusyTime(16, 0)
    assert kept.blocked_ms == 4
    assert kept.bound == ("host", 16)
    assert kept.to_gain_ms == 4
    assert kept.categories[Category.COMMUNICATION].exposed_ms == 3
    assert kept.categories[Category.COMMUNICATION].hidden_fraction == pytest.approx(6 / 9)


def test_hidden_is_what_the_mode_overlaps() -> None:
    #                  0         1
    #                  0123456789012345678
    #  host            FFFFFBBBBBBwwLLSSSww     forward, backward and step of batch 0, lookup of batch 1
    #  ids of 1         cccc
    #  gradients of 0          ccccccccc        autograd has 4 ms of its way, the lookup 2, the step 1
    #  embeddings of 1                 ccccc    2 ms under the step
    def dense(start: int, end: int, stage: Stage) -> Span:
        return Span(start, end, Category.DENSE, HOST_LANE, str(stage), stage, 0)

    def sent(start: int, end: int, stage: Stage, batch: int) -> Span:
        return Span(start, end, Category.COMMUNICATION, "tables", str(stage), stage, batch)

    spans = [
        dense(0, 5, Stage.DENSE_FORWARD),
        dense(5, 11, Stage.BACKWARD),
        Span(11, 13, Category.WAIT, HOST_LANE, "gradients", Stage.BACKWARD, 0),
        Span(13, 15, Category.LOOKUP, HOST_LANE, "lookup", Stage.EMBEDDING_LOOKUP, 1),
        dense(15, 18, Stage.OPTIMIZER_STEP),
        Span(18, 20, Category.WAIT, HOST_LANE, "embeddings", Stage.EMBEDDING_LOOKUP, 1),
        sent(1, 5, Stage.INPUT_DATA_DIST, 1),
        sent(7, 16, Stage.BACKWARD, 0),
        sent(16, 20, Stage.EMBEDDING_LOOKUP, 1),
    ]

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
    spans = drawn(host="DDDDwwDD", s9=" ccccc ")
    known, unknown = summarize(spans, overlapped_by(MODES["base"])), summarize(spans)
    assert "hidden" not in " ".join([headline(known), *tables(known)])
    assert "communication 2.00 ms exposed" in headline(known)
    assert "60.0 % hidden" in headline(unknown)


@pytest.mark.parametrize(
    ("name", "lane", "counts"),
    [
        ("embeddings", HOST_LANE, True),
        ("embeddings: waits for all_to_all", "stream 7", True),
        ("embeddings", "stream 9", False),  # nothing dense runs there
        ("ids", HOST_LANE, False),
    ],
)
def test_a_wait_for_embeddings_counts_where_the_dense_part_runs(name: str, lane: str, counts: bool) -> None:
    gemms = [Span(start, end, Category.DENSE, "stream 7", "gemm") for start, end in ((0, 1), (3, 9))]
    assert summarize([*gemms, Span(1, 3, Category.WAIT, lane, name)]).merge_wait_ms == (2 if counts else 0)


def test_beside_a_gpu_the_hosts_share_of_a_stage_is_no_busy_time() -> None:
    host = Span(0, 5, Category.HOST, HOST_LANE, "launches", Stage.INPUT_DATA_DIST)
    sent = Span(1, 3, Category.COMMUNICATION, "stream 9", "all_to_all", Stage.INPUT_DATA_DIST)
    assert summarize([host, sent]).stages == {Stage.INPUT_DATA_DIST: BusyTime(2, 0)}
    on_cpu = [replace(span, lane=lane) for span, lane in ((host, HOST_LANE), (sent, "gloo"))]
    assert summarize(on_cpu).stages == {Stage.INPUT_DATA_DIST: BusyTime(7, 0)}  # there the host does it


def test_bytes_count_in_the_step_that_sent_them() -> None:
    spans = [
        Span(start, 30, kind, "gloo", "ids", Stage.INPUT_DATA_DIST, sent_bytes=sent, saved_bytes=3 * sent)
        for kind, start, sent in (
            *((Category.COMMUNICATION, start, sent) for start, sent in ((-5, 1), (0, 10), (9, 100), (10, 1000))),
            (Category.WAIT, 5, 0),
        )
    ]
    for num_steps in (1, 2):
        found = break_down([*spans, *drawn(host="DDDD")], (0, 10), num_steps=num_steps).traffic
        assert {stage: (one.sent, one.saved) for stage, one in found.items()} == {
            Stage.INPUT_DATA_DIST: (110 / num_steps, 330 / num_steps)
        }


def test_a_window_of_two_steps_is_accounted_per_step() -> None:
    spans = drawn(host="DDDDwwwwDDDDwwww", s9="  cccc    cccc  ")
    assert break_down(spans, (0, 16), num_steps=2).categories[Category.COMMUNICATION] == BusyTime(4, 2)
    both = mean([break_down(spans, (0, 8)), break_down(spans, (8, 16))])
    assert replace(both, num_steps=2) == break_down(spans, (0, 16), num_steps=2)
    with pytest.raises(ValueError, match="no step was measured"):
        mean([])


@given(spans_of_any_kind, st.integers(0, END), st.integers(1, 8))
def test_the_sweep_equals_a_count_of_every_millisecond(spans: list[Span], start: int, long: int) -> None:
    end = start + long
    at = [busy_at(spans, moment) for moment in range(start, end)]
    kept = break_down(spans, (start, end))
    host_computes = any((found, lane) == (Category.DENSE, HOST_LANE) for now in at for found, lane, _ in now)
    for kind in KINDS:
        cover = COVERED_BY.get(kind, frozenset())
        busy = [now for now in at if any(found == kind for found, _, _ in now)]
        hidden = [now for now in busy if any(found in cover for found, _, _ in now)]
        if kind is Category.COMMUNICATION and host_computes:
            hidden = [now for now in busy if not any((f, lane) == (Category.WAIT, HOST_LANE) for f, lane, _ in now)]
        assert kept.categories[kind] == BusyTime(len(busy), len(hidden)), kind
    waits = [now for now in at if any(kind is Category.WAIT and lane == HOST_LANE for kind, lane, _ in now)]
    assert kept.blocked_ms == len(waits)
    fetches = [now for now in at if any(kind is Category.DATA and lane == HOST_LANE for kind, lane, _ in now)]
    assert kept.categories[Category.DATA].busy_ms == len(fetches)
    assert kept.categories[Category.HOST].busy_ms == long - len(waits) - len(fetches)
    on_host = [
        now for now in at if any(kind is not Category.COMMUNICATION and lane == HOST_LANE for kind, lane, _ in now)
    ]
    assert kept.loop_ms == long - len(on_host)
    assert kept.merge_wait_ms == 0  # none of these waits is for embeddings
    for stage, times in kept.stages.items():
        counted = (*KINDS, Category.HOST)
        per_kind = [sum(any(k is kind and s is stage for k, _, s in now) for now in at) for kind in counted]
        assert times.busy_ms == sum(per_kind)
        assert 0 <= times.hidden_ms <= times.busy_ms == times.hidden_ms + times.exposed_ms
    assert all(start <= s.start_ms < s.end_ms <= end for s in exclusive(spans, (start, end)))
    assert {span for span in spans if span.kind is Category.COMMUNICATION} <= set(exclusive(spans))  # they stay whole


@given(spans_of_any_kind, st.integers(0, END), st.integers(1, 8))
def test_moments_say_what_was_under_way(spans: list[Span], start: int, long: int) -> None:
    pieces = list(moments(spans, (start, start + long)))
    assert [pieces[0][0][0], *(end for (_, end), _ in pieces)] == [*(begin for (begin, _), _ in pieces), start + long]
    for (begin, end), under_way in pieces:
        for moment in range(int(begin), int(end)):
            expected = [span for span in spans if span.start_ms <= moment < span.end_ms]
            assert sorted(map(id, under_way)) == sorted(map(id, expected))
        assert under_way == sorted(under_way, key=lambda span: (span.start_ms, -span.end_ms))


@given(spans_of_any_kind, st.booleans())
def test_rows_hold_every_span_and_none_overlaps(spans: list[Span], nested: bool) -> None:
    rows = rows_of(spans, nested=nested)
    assert sorted(map(id, (span for row in rows for span in row))) == sorted(map(id, spans))
    for row in rows:
        for number, one in enumerate(row):
            for other in row[number + 1 :]:
                inside = one.start_ms <= other.start_ms and other.end_ms <= one.end_ms
                assert one.end_ms <= other.start_ms or (nested and inside)


def forwards(*starts: float, batch: bool = True) -> list[Span]:
    return [
        Span(start, start + 2, Category.DENSE, HOST_LANE, "forward", Stage.DENSE_FORWARD, number if batch else None)
        for number, start in enumerate(starts)
    ]


@pytest.mark.parametrize("batch", [True, False])
def test_steps_go_from_forward_to_forward(batch: bool) -> None:
    inner = Span(0.5, 1, Category.DENSE, HOST_LANE, "over arch", Stage.DENSE_FORWARD, 0 if batch else None)
    assert find_steps([*forwards(0, 10, 25, 35, batch=batch), inner]) == [(0, 10), (10, 25), (25, 35)]


def test_the_profilers_marks_come_first() -> None:
    marks = [Span(10 * n, 10 * n + 9, Category.HOST, HOST_LANE, f"ProfilerStep#{n + 7}") for n in range(2)]
    assert find_steps([*forwards(0, 3, 6), *marks]) == [(0, 9), (10, 19)]
    kernel = Span(4, 30, Category.DENSE, "stream 7", "gemm")
    assert window_of([*marks, kernel]) == ((4, 30), 2)  # a GPU runs behind the marks
    assert window_of(marks) == ((0, 19), 2)


def test_steady_steps_are_the_usual_ones() -> None:
    spans = forwards(0, 50, 60, 70, 80, 120)  # the first and the last step are slow
    assert steady_window(spans, 3) == (50, 80)
    assert steady_window(spans, 99) == (0, 120)
    assert steady_window(drawn(host="DDDD"), 3) == (0, 4)
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
