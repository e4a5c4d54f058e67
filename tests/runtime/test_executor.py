"""The executor over fake tables: laws, timelines, discovery, failures, the end of the data, the order of streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.runtime.executor import Executor
from lightning_overlap.runtime.inflight import InFlightBatch
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, MODES, SEMI_SYNC, STREAMS
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import (
    EARLY_OWNERS,
    SPARSE_STAGES,
    TRAINING_STAGES,
    Stage,
    StreamName,
    WeightOwner,
)
from lightning_overlap.testing import (
    FakeSparse,
    FakeTrainer,
    InjectedError,
    RaceError,
    RecordedEvent,
    RecordingStreams,
    Run,
    Timeline,
    check_in_flight,
    check_laws,
    check_stages,
    check_staleness,
    check_stream_order,
    random_schedule,
    run_schedule,
)

FUSED, DENSE = WeightOwner.FUSED_BACKWARD, WeightOwner.DENSE_OPTIMIZER
ONE_FUSED = {"ebc": frozenset({FUSED})}
ONE_MIXED = {"ebc": EARLY_OWNERS}

OVERLAPPING = {name: mode for name, mode in MODES.items() if mode.has_sparse_stages}
random_schedules = st.randoms(use_true_random=False).map(random_schedule)

overlapping = pytest.mark.parametrize("schedule", OVERLAPPING.values(), ids=OVERLAPPING.keys())


# -- laws -------------------------------------------------------------------------------------------------------


def test_laws_hold(mode: Schedule) -> None:
    check_laws(mode)


@settings(deadline=None, max_examples=50)
@given(random_schedules, st.booleans())
def test_laws_1_to_3_hold_for_any_schedule_that_is_accepted(schedule: Schedule, ready: bool) -> None:
    for num_batches in range(2 * schedule.depth + 1):
        run = run_schedule(schedule, num_batches, ready=ready)
        check_stages(run, num_batches, ready=ready)
        check_in_flight(run)
        check_staleness(run)


@settings(deadline=None, max_examples=50)
@given(random_schedules)
def test_all_laws_hold_for_any_schedule_that_is_accepted(schedule: Schedule) -> None:
    check_laws(schedule)


def test_a_second_epoch_is_like_the_first(mode: Schedule) -> None:
    trainer = FakeTrainer(mode)
    runs = [trainer.run(2 * mode.depth) for _ in range(2)]
    for run in runs:
        check_stages(run, 2 * mode.depth)
        check_staleness(run)
        check_stream_order(run)
    assert runs[0].timeline.events == runs[1].timeline.events


# -- timelines: C copy, S splits dist, D data dist, L lookup, F forward, B backward, O optimizer step -----------


@dataclass(frozen=True)
class Expected:
    issued: str
    drawing: str


TIMELINES: dict[str, Expected] = {
    "base": Expected(
        "C0 F0 B0 O0 C1 F1 B1 O1 C2 F2 B2 O2",
        """\
compute |C0 F0 B0 O0 C1 F1 B1 O1 C2 F2 B2 O2""",
    ),
    "sparse_dist": Expected(
        "C0 S0 C1 D0 L0 S1 F0 C2 D1 B0 O0 L1 S2 F1 D2 B1 O1 L2 F2 B2 O2",
        """\
compute    |               L0       F0             B0 O0 L1       F1          B1 O1 L2    F2    B2 O2
memcpy     |C0    C1                      C2
data_dist  |   S0    D0          S1          D1                S2       D2
host waits |            S0    D0       L0       S1          D1       L1    S2          D2    L2""",
    ),
    "fused_sparse_dist": Expected(
        "C0 S0 C1 D0 L0 S1 F0 C2 D1 B0 L1 O0 S2 F1 D2 B1 L2 O1 F2 B2 O2",
        """\
compute    |                        F0             B0       O0    F1          B1       O1 F2    B2 O2
memcpy     |C0    C1                      C2
data_dist  |   S0    D0          S1          D1                S2       D2
lookup     |               L0                         L1                         L2
host waits |            S0    D0       L0       S1       D1          L1    S2       D2       L2""",
    ),
    "fused_sparse_dist_after_optimizer": Expected(
        "C0 S0 C1 D0 L0 S1 F0 C2 D1 B0 O0 L1 S2 F1 D2 B1 O1 L2 F2 B2 O2",
        """\
compute    |                        F0             B0 O0          F1          B1 O1       F2    B2 O2
memcpy     |C0    C1                      C2
data_dist  |   S0    D0          S1          D1                S2       D2
lookup     |               L0                            L1                         L2
host waits |            S0    D0       L0       S1          D1       L1    S2          D2    L2""",
    ),
    "prefetch": Expected(
        "C0 S0 D0 C1 P0 S1 L0 D1 F0 C2 P1 B0 S2 L1 O0 D2 F1 P2 B1 L2 O1 F2 B2 O2",
        """\
compute    |                                 F0             B0       O0       F1          B1    O1 F2    B2 O2
memcpy     |C0          C1                         C2
data_dist  |   S0 D0             S1    D1                      S2       D2
prefetch   |               P0                         P1                            P2
lookup     |                        L0                            L1                         L2
host waits |         S0       D0          S1    L0       D1                S2    L1    D2             L2""",
    ),
    "semi_sync": Expected(
        "C0 S0 C1 S1 D0 C2 L0 S2 D1 F0 L1 B0 D2 O0 F1 L2 B1 O1 F2 B2 O2",
        """\
compute    |                                    F0          B0       O0 F1          B1 O1 F2    B2 O2
memcpy     |C0    C1          C2
data_dist  |   S0    S1 D0             S2 D1                   D2
lookup     |                     L0                   L1                      L2
host waits |               S0       D0       S1    L0    D1       S2       L1    D2          L2""",
    ),
}

# Tables of the dense optimizer are looked up in a second part, after its step.
MIXED_TIMELINES: dict[str, Expected] = {
    "fused_sparse_dist": Expected(
        "C0 S0 C1 D0 L0 L0 S1 F0 C2 D1 B0 L1 O0 L1 S2 F1 D2 B1 L2 O1 L2 F2 B2 O2",
        """\
compute    |                           F0             B0       O0       F1          B1       O1    F2    B2 O2
memcpy     |C0    C1                         C2
data_dist  |   S0    D0             S1          D1                   S2       D2
lookup     |               L0    L0                      L1       L1                   L2       L2
host waits |            S0    D0          L0       S1       D1             L1    S2       D2          L2""",
    ),
    "semi_sync": Expected(
        "C0 S0 C1 S1 D0 C2 L0 S2 D1 L0 F0 L1 B0 D2 O0 L1 F1 L2 B1 O1 L2 F2 B2 O2",
        """\
compute    |                                       F0          B0       O0    F1          B1 O1    F2    B2 O2
memcpy     |C0    C1          C2
data_dist  |   S0    S1 D0             S2 D1                      D2
lookup     |                     L0             L0       L1                L1       L2          L2
host waits |               S0       D0       S1       L0    D1       S2          L1    D2             L2""",
    ),
}


def timeline_of(schedule: Schedule, num_batches: int, modules: Mapping[str, frozenset[WeightOwner]]) -> Timeline:
    """Return the timeline of a run, without the fetches that only found the end of the data."""
    timeline = FakeTrainer(schedule, modules=modules).run(num_batches).timeline
    timeline.events = [event for event in timeline.events if event[2] < num_batches]
    return timeline


@pytest.mark.parametrize("name", TIMELINES)
def test_timeline_from_the_fill_to_the_drain(name: str) -> None:
    timeline = timeline_of(MODES[name], 3, ONE_FUSED)
    assert timeline.issued() == TIMELINES[name].issued.split()
    assert timeline.draw() == TIMELINES[name].drawing, f"got\n{timeline.draw()}"


@pytest.mark.parametrize("name", MIXED_TIMELINES)
def test_timeline_with_tables_of_the_dense_optimizer(name: str) -> None:
    timeline = timeline_of(MODES[name], 3, ONE_MIXED)
    assert timeline.issued() == MIXED_TIMELINES[name].issued.split()
    assert timeline.draw() == MIXED_TIMELINES[name].drawing, f"got\n{timeline.draw()}"


class NotesOrder(FakeSparse):
    """Notes the order in which stages begin, of all batches."""

    def clear(self) -> None:
        super().clear()
        self.begun: list[tuple[Stage, int]] = []

    def begin(self, stage: Stage, batch: int) -> None:
        super().begin(stage, batch)
        self.begun.append((stage, batch))


@pytest.mark.parametrize("schedule", OVERLAPPING.values(), ids=OVERLAPPING.keys())
@pytest.mark.parametrize(
    "left_from", [(), tuple(Stage), (Stage.INPUT_SPLITS_DIST,)], ids=["nothing", "everything", "sizes"]
)
def test_what_stands_right_above_the_backward_is_done_where_that_waits(
    schedule: Schedule, left_from: tuple[Stage, ...]
) -> None:
    trainer = FakeTrainer(schedule, sparse_type=NotesOrder, left_from=left_from)
    run = trainer.run(2 * schedule.depth)
    assert isinstance(trainer.sparse, NotesOrder)
    begun = trainer.sparse.begun
    ahead = schedule.steps[schedule.position(Stage.EMBEDDING_LOOKUP)].offset
    lookup, backward = begun.index((Stage.EMBEDDING_LOOKUP, ahead + 2)), begun.index((Stage.BACKWARD, 2))
    above = schedule.position(Stage.EMBEDDING_LOOKUP) < schedule.position(Stage.BACKWARD) and ahead > 0
    lookup_is_left = above and Stage.EMBEDDING_LOOKUP in left_from
    assert (lookup < backward) == ((above or ahead == 0) and not lookup_is_left)
    if lookup_is_left:
        deferred = Stage.EMBEDDING_UPDATE in [step.stage for step in schedule]
        assert lookup == backward + 1 + deferred
    if above and left_from:
        last = (backward if left_from == (Stage.INPUT_SPLITS_DIST,) else lookup) + 1
        assert begun[last][0] is Stage.INPUT_SPLITS_DIST
    check_staleness(run)


@pytest.mark.parametrize("name", ["sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"])
def test_ids_of_the_next_lookup_are_assembled_where_the_backward_waits(name: str) -> None:
    def assembled_behind(left_from: tuple[Stage, ...]) -> Stage:
        events = FakeTrainer(MODES[name], left_from=left_from).run(6).timeline.events
        ids = events.index(("wait", Stage.INPUT_DATA_DIST, 3))
        trained = {Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.OPTIMIZER_STEP}
        return [stage for kind, stage, _ in events[:ids] if kind == "issue" and stage in trained][-1]

    assert assembled_behind((Stage.INPUT_DATA_DIST,)) is Stage.DENSE_FORWARD  # a backward is noted when it is over
    assert assembled_behind(()) is (Stage.BACKWARD if name == "fused_sparse_dist" else Stage.OPTIMIZER_STEP)


def test_a_lookup_that_no_backward_waits_for_is_made_behind_it() -> None:
    class WaitsForNothing(FakeSparse):
        def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool:
            return True

        def backward(self, inflight: InFlightBatch) -> None:
            self.begin(Stage.BACKWARD, inflight.index)  # of a loss that no row is part of: no table is written

    trainer = FakeTrainer(SEMI_SYNC, modules=ONE_FUSED, sparse_type=WaitsForNothing)
    run = trainer.run(6)
    check_stages(run, 6)
    assert run.updates[FUSED] == []


def test_no_lookup_is_left_beside_a_modules_own_forward() -> None:
    trainer = FakeTrainer(SEMI_SYNC, sparse_type=NotesOrder, ready=False, left_from=tuple(Stage))
    run = trainer.run(6)
    assert isinstance(trainer.sparse, NotesOrder)
    assert run.served_early(0) == {False}
    begun = trainer.sparse.begun
    assert begun.index((Stage.EMBEDDING_LOOKUP, 1)) < begun.index((Stage.BACKWARD, 0))
    assert begun.index((Stage.EMBEDDING_LOOKUP, 2)) > begun.index((Stage.BACKWARD, 1))
    check_staleness(run)


def test_an_epoch_without_batches(mode: Schedule) -> None:
    run = run_schedule(mode, 0)
    assert run.trained == []
    assert run.stages == {}


# -- discovery --------------------------------------------------------------------------------------------------


@overlapping
def test_rows_from_before_the_first_forward_are_caught_up_after_it_in_order(schedule: Schedule) -> None:
    run = run_schedule(schedule, 2 * schedule.depth, ready=False)
    issued = [(stage, batch) for kind, stage, batch in run.timeline.events if kind == "issue"]
    assert not [stage for stage, batch in issued if batch == 0 and stage in SPARSE_STAGES]
    forward, backward = issued.index((Stage.DENSE_FORWARD, 0)), issued.index((Stage.BACKWARD, 0))
    assert {stage for stage, _ in issued[:forward]} <= {Stage.COPY_BATCH_TO_DEVICE}
    caught_up = [(stage, batch) for stage, batch in issued[forward:backward] if stage in SPARSE_STAGES]
    would_be = [
        (step.stage, batch)
        for iteration, step, batch in schedule.issue_order(2 * schedule.depth)
        if batch > 0
        and step.stage in SPARSE_STAGES
        and (iteration, schedule.position(step.stage)) < (0, schedule.position(Stage.BACKWARD))
    ]
    assert list(dict.fromkeys(caught_up)) == would_be
    check_stages(run, 2 * schedule.depth, ready=False)


def test_timeline_of_discovery() -> None:
    # memcpy    | C0 C1          C2
    # data_dist |          S1       D1
    # lookup    |                         L1
    # compute   |       F0             B0    O0 ...
    trainer = FakeTrainer(FUSED_SPARSE_DIST, modules=ONE_FUSED, ready=False)
    events = trainer.run(2).timeline
    issued = [text for text, (_, _, batch) in zip(events.issued(), _issues(events), strict=True) if batch < 2]
    assert issued == ["C0", "C1", "F0", "S1", "D1", "B0", "L1", "O0", "F1", "B1", "O1"]


def _issues(timeline: Timeline) -> list[tuple[str, Stage, int]]:
    return [event for event in timeline.events if event[0] == "issue"]


def test_the_second_run_knows_what_the_first_discovered() -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST, ready=False)
    assert trainer.run(3).served_early(0) == {False}
    assert trainer.run(3).served_early(0) == {True}


# -- a training_step that is skipped or repeated ---------------------------------------------------------------


@overlapping
@pytest.mark.parametrize("ready", [True, False])
def test_a_step_without_backward_leaves_the_others_as_they_are(schedule: Schedule, ready: bool) -> None:
    num_batches = 2 * schedule.depth
    for skipped in range(num_batches):
        run = run_schedule(schedule, num_batches, ready=ready, skip={skipped})
        assert run.trained == list(range(num_batches))
        assert run.updates[FUSED] == [batch for batch in range(num_batches) if batch != skipped]
        assert run.stages[skipped][-1] is Stage.DENSE_FORWARD
        assert all(run.served_early(batch) == {ready or batch > 0} for batch in range(num_batches))
        check_staleness(run)


@overlapping
def test_a_second_backward_in_a_step_drops_early_lookups(schedule: Schedule) -> None:
    for repeated in range(schedule.depth):
        run = run_schedule(schedule, 2 * schedule.depth, repeat={repeated})
        first, second = _by_call(run, repeated)
        assert {served.early for served in first} == {True}
        assert {served.early for served in second} == {False}
        saw = run.saw(repeated + 1, FUSED)
        assert saw == {(*run.updates[FUSED][: repeated + 2],)}, f"a lookup missed the second backward\n{run}"
        assert run.updates[FUSED].count(repeated) == 2
        for batch in range(repeated):
            assert run.served_early(batch) == {True}


def _by_call(run: Run, batch: int) -> tuple[list[Any], list[Any]]:
    served = [served for served in run.served if served.batch == batch]
    return served[: len(served) // 2], served[len(served) // 2 :]


@overlapping
def test_lookups_are_early_again_after_a_step_with_two_backwards(schedule: Schedule) -> None:
    run = run_schedule(schedule, 3 * schedule.depth, repeat={1})
    assert run.served_early(1 + schedule.depth) == {True}


@overlapping
def test_a_second_backward_is_ordered_before_later_lookups(schedule: Schedule) -> None:
    check_stream_order(run_schedule(schedule, 3 * schedule.depth, repeat={1, 3}))


# -- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", [True, False])
def test_a_failure_in_any_stage_of_any_batch_reaches_the_caller(mode: Schedule, ready: bool) -> None:
    num_batches = mode.depth + 1
    stages_of = FakeTrainer(mode, ready=ready).run(num_batches).stages
    for batch, stages in stages_of.items():
        for stage in stages:
            trainer = FakeTrainer(mode, ready=ready, rank=3)
            with pytest.raises(InjectedError, match=f"told to fail in {stage} of batch {batch}") as caught:
                trainer.run(num_batches, fail_at=(stage, batch))
            if stage not in TRAINING_STAGES:  # the trainer's own traceback names those
                assert f"raised in stage {stage} of batch {batch} on rank 3" in caught.value.__notes__
            trainer.executor.abandon()
            assert trainer.executor.num_ahead == 0
            assert trainer.executor.current is None
            run = trainer.run(num_batches)
            check_stages(run, num_batches, ready=trainer.sparse.served[0].early)
            check_staleness(run)


def test_an_abandoned_run_issues_nothing_more(mode: Schedule) -> None:
    trainer = FakeTrainer(mode)
    with pytest.raises(InjectedError):
        trainer.run(4, fail_at=(Stage.DENSE_FORWARD, 1))
    events = list(trainer.timeline.events)
    trainer.executor.abandon()
    trainer.executor.drain()
    trainer.executor.stage_done(Stage.OPTIMIZER_STEP)
    assert trainer.timeline.events == events


# -- the end of the data ----------------------------------------------------------------------------------------


@overlapping
def test_stopping_early_completes_every_collective(schedule: Schedule) -> None:
    for stop_after in range(2 * schedule.depth):
        for ready in (True, False):
            # `run` itself fails on a collective that is in flight after the drain.
            run = run_schedule(schedule, 4 * schedule.depth, ready=ready, stop_after=stop_after)
            assert run.trained == list(range(stop_after))
            assert max(run.stages, default=-1) <= stop_after + schedule.max_offset - 1


@overlapping
def test_there_is_something_to_complete(schedule: Schedule) -> None:
    trainer = FakeTrainer(schedule)
    with pytest.raises(InjectedError):
        trainer.run(9, fail_at=(Stage.OPTIMIZER_STEP, 3))
    assert trainer.sparse.pending


@overlapping
def test_a_batch_that_was_handed_out_but_not_trained_is_drained(schedule: Schedule) -> None:
    trainer = FakeTrainer(schedule)
    with pytest.raises(InjectedError):
        trainer.run(9, fail_at=(Stage.OPTIMIZER_STEP, 3))
    assert trainer.executor.next_batch() is not None
    trainer.executor.drain()
    assert not trainer.sparse.pending


def test_a_run_after_an_early_stop_starts_anew(mode: Schedule) -> None:
    trainer = FakeTrainer(mode)
    trainer.run(9, stop_after=2)
    run = trainer.run(5)
    check_stages(run, 5)
    check_staleness(run)
    check_stream_order(run)


@overlapping
def test_a_batch_that_the_source_held_back_is_trained_all_the_same(schedule: Schedule) -> None:
    for held in range(1, 2 * schedule.depth):
        for until in range(max(0, held - schedule.max_offset), held + 1):
            run = run_schedule(schedule, 3 * schedule.depth, hold={held: until})
            assert run.trained == list(range(3 * schedule.depth)), f"batch {held} held back until {until}\n{run}"
            check_in_flight(run)
            check_stream_order(run)
            for served in run.served:
                staleness = schedule.staleness if served.early and served.owner is FUSED else 0
                assert served.saw == tuple(range(served.batch - staleness)), f"held {held} until {until}\n{run}"


def test_a_source_that_holds_back_in_base() -> None:
    run = run_schedule(MODES["base"], 4, hold={1: 1, 3: 2})
    assert run.trained == [0, 1, 2, 3]


def test_batches_ahead_are_fetched_but_not_trained() -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST)
    with pytest.raises(InjectedError):
        trainer.run(9, fail_at=(Stage.BACKWARD, 1))
    executor = trainer.executor
    assert (executor.num_trained, executor.num_ahead, executor.num_fetched) == (2, 2, 4)


# -- the order of streams ---------------------------------------------------------------------------------------


def logged(schedule: Schedule, policy: str, modules: Mapping[str, frozenset[WeightOwner]]) -> tuple[Run, list[str]]:
    """Return a run and what its streams were told, as text."""
    streams = RecordingStreams(STREAMS[policy])
    run = FakeTrainer(schedule, modules=modules, streams=streams).run(4)
    return run, [" ".join(_text(entry)) for entry in streams.log]


def _text(entry: tuple[str, StreamName, Any]) -> tuple[str, ...]:
    kind, stream, what = entry
    if isinstance(what, RecordedEvent):
        return (kind, str(stream), "for", str(what.stream)) if kind == "wait" else (kind, str(stream))
    if isinstance(what, str):
        return kind, str(stream), what
    return (
        (kind, str(stream))
        if what is None
        else (kind, str(stream), getattr(what.what, "value", what.what or "load"), str(what.batch))
    )


@pytest.mark.parametrize("policy", STREAMS)
def test_order_of_streams_under_each_policy(mode: Schedule, policy: str) -> None:
    streams = RecordingStreams(STREAMS[policy])
    check_stream_order(FakeTrainer(mode, streams=streams).run(2 * mode.depth + 1))


@pytest.mark.parametrize("policy", STREAMS)
@overlapping
def test_batch_and_received_input_are_handed_to_the_streams_that_read_them(schedule: Schedule, policy: str) -> None:
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    assert lookup is not None
    run, log = logged(schedule, policy, ONE_MIXED)
    stream = STREAMS[policy] if lookup.stream is StreamName.LOOKUP else lookup.stream
    for batch in range(4):
        splits = log.index(f"do data_dist input_splits_dist {batch}")
        forward = log.index(f"do compute dense_forward {batch}")
        looked_up = log.index(f"do {stream} embedding_lookup {batch}")
        received = max(at for at in range(looked_up) if log[at] == f"do data_dist input_data_dist {batch}")
        assert f"record_stream data_dist batch {batch}" in log[:splits]
        assert f"record_stream compute batch {batch}" in log[:forward]
        assert f"record_stream {stream} input" in log[received:looked_up], str(run)


def test_what_the_streams_are_told_for_one_early_lookup() -> None:
    # data_dist |              receive 2 .
    # lookup    | fused update 1          ` lookup 2 (fused part)                . lookup 2 (dense optimizer's part)
    # compute   |                                             optimizer step 1 '
    _, log = logged(FUSED_SPARSE_DIST, "dedicated", ONE_MIXED)
    begin = log.index("do lookup fused_backward 1")
    end = log.index("begin_step compute", begin)
    assert [text for text in log[begin:end] if not text.startswith(("record ", "on "))] == [
        "do lookup fused_backward 1",
        "do data_dist input_data_dist 2",
        "record_stream lookup input",
        "wait lookup for data_dist",
        "do lookup embedding_lookup 2",
        "do compute dense_optimizer 1",
        "wait compute for lookup",  # behind the fused update: callbacks between two steps find it done
        "record_stream lookup input",
        "wait lookup for data_dist",
        "wait lookup for compute",
        "do lookup embedding_lookup 2",
        "do compute a callback behind the step 1",
    ]


@pytest.mark.parametrize("policy", STREAMS)
def test_waiting_for_lookups_orders_the_compute_stream_behind_them(policy: str) -> None:
    streams = RecordingStreams(STREAMS[policy])
    trainer = FakeTrainer(FUSED_SPARSE_DIST, streams=streams)
    trainer.run(4)
    trainer.executor.wait_for_lookups()
    for mark in list(streams.before):
        if mark.what in (Stage.EMBEDDING_LOOKUP, FUSED):
            assert mark in streams.record(StreamName.COMPUTE).over


@pytest.mark.parametrize("stream", [StreamName.DATA_DIST, StreamName.MEMCPY])
def test_a_lookup_row_on_another_stream_is_ordered_after_the_load_of_weights(stream: StreamName) -> None:
    rows = [Step(row.stage, row.offset, stream) if row.stream is StreamName.LOOKUP else row for row in SEMI_SYNC]
    streams = RecordingStreams()
    trainer = FakeTrainer(Schedule("mine", tuple(rows)), streams=streams)
    check_stream_order(trainer.run(9))
    trainer.executor.wait_for_lookups()
    lookups = {mark for mark in streams.before if mark.what is Stage.EMBEDDING_LOOKUP}
    assert lookups <= streams.record(StreamName.COMPUTE).over


def test_manual_optimization_reaches_the_step_when_training_step_is_over(mode: Schedule) -> None:
    trainer = FakeTrainer(mode, automatic=False)
    run = trainer.run(2 * mode.depth)
    check_stages(run, 2 * mode.depth)
    for served in run.served:
        # A lookup above BACKWARD in the table then comes after it: fresher than the table says, never staler.
        assert set(range(served.batch - mode.staleness)) <= set(served.saw)


# -- the checkers can fail --------------------------------------------------------------------------------------


def moved(schedule: Schedule, stage: Stage, above: Stage) -> tuple[Step, ...]:
    rows = [row for row in schedule if row.stage is not stage]
    row = schedule.step_of(stage)
    assert row is not None
    at = next(index for index, other in enumerate(rows) if other.stage is above)
    return (*rows[:at], row, *rows[at:])


class ClaimsToBeExact(Schedule):
    staleness = 0  # type: ignore[assignment]


class ForgetsDenseOwners(Schedule):
    dense_owned_lookup = None  # type: ignore[assignment]


class ClaimsDepth1(Schedule):
    depth = 1  # type: ignore[assignment]


def test_a_stale_schedule_that_claims_to_be_exact_is_caught() -> None:
    stale = moved(FUSED_SPARSE_DIST, Stage.EMBEDDING_LOOKUP, above=Stage.BACKWARD)
    assert Schedule("honest", stale).staleness == 1
    with pytest.raises(AssertionError, match=r"the lookup of batch 1 in tables of fused_backward saw .* \[\], with"):
        check_laws(ClaimsToBeExact("mine", stale))


def test_a_table_of_the_dense_optimizer_that_is_read_before_its_step_is_caught() -> None:
    schedule = ForgetsDenseOwners("mine", FUSED_SPARSE_DIST.steps)
    with pytest.raises(
        RaceError, match=r"the update by dense_optimizer of batch 0 .* behind embedding_lookup of batch 1"
    ):
        check_laws(schedule)
    on_one_stream = FakeTrainer(schedule, streams=RecordingStreams(StreamName.COMPUTE)).run(3)
    with pytest.raises(AssertionError, match="in tables of dense_optimizer saw the updates of batches"):
        check_staleness(on_one_stream)


def test_a_schedule_that_holds_more_batches_than_it_says_is_caught() -> None:
    with pytest.raises(AssertionError, match="2 batches in flight, the depth is 1"):
        check_in_flight(run_schedule(ClaimsDepth1("mine", FUSED_SPARSE_DIST.steps), 2))


class NeverLooksUpDeferred(Executor):
    def _run_deferred_lookup(self) -> None:
        pass


class ForgetsDiscovered(Executor):
    def _discover(self) -> None:
        if self._sparse is not None and not self._sparse.ready:
            self._waiting_for_discovery.clear()
        super()._discover()


class FetchesTwiceAsMany(Executor):
    def _fetch(self, step: Step, index: int) -> None:
        super()._fetch(step, 2 * index)


class KeepsTrained(Executor):
    def next_batch(self) -> InFlightBatch | None:
        kept = getattr(self, "kept", [])
        self.kept = [*kept, self.current]
        return super().next_batch()


class DrainsNothing(Executor):
    def drain(self) -> None:
        self.abandon()


@pytest.mark.parametrize(
    ("executor_type", "message"),
    [
        (NeverLooksUpDeferred, "batch 0 was not served from early lookups alone"),
        (FetchesTwiceAsMany, "batches in flight, the depth is 3"),
        (KeepsTrained, "4 batches in flight, the depth is 3"),
    ],
)
def test_an_executor_that_breaks_a_law_is_caught(executor_type: type[Executor], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        check_laws(FUSED_SPARSE_DIST, executor_type=executor_type)
    assert "fused_sparse_dist: input_splits_dist+1/data_dist" in str(caught.value)
    assert "memcpy     |C0" in str(caught.value)


def test_a_collective_that_is_left_in_flight_is_caught() -> None:
    with pytest.raises(AssertionError, match="still in flight after the drain: embedding_lookup of batch 2"):
        FakeTrainer(FUSED_SPARSE_DIST, executor_type=DrainsNothing).run(9, stop_after=2)


class DeafStreams(RecordingStreams):
    """Ignores the waits of one stream for another."""

    def __init__(self, waiting: StreamName, producer: StreamName) -> None:
        super().__init__()
        self.deaf = (waiting, producer)

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        if event is None or (name, event.stream) != self.deaf:
            super().wait(name, event)


@pytest.mark.parametrize(
    ("waiting", "producer", "ready", "message"),
    [
        (StreamName.DATA_DIST, StreamName.MEMCPY, True, r"input_splits_dist of batch 0 \(.* behind copy_batch"),
        (StreamName.LOOKUP, StreamName.DATA_DIST, True, "embedding_lookup of batch 0 .* behind input_data_dist"),
        (StreamName.COMPUTE, StreamName.MEMCPY, False, r"dense_forward of batch 0 \(.* behind copy_batch"),
        (
            StreamName.LOOKUP,
            StreamName.COMPUTE,
            True,
            "the update by fused_backward of batch 0 .* behind backward of batch 0",
        ),
    ],
)
def test_a_wait_that_is_left_out_is_caught(
    waiting: StreamName, producer: StreamName, ready: bool, message: str
) -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST, ready=ready, streams=DeafStreams(waiting, producer))
    with pytest.raises(RaceError, match=f"no event orders {message}"):
        trainer.run(5)


class LeavesOutDataDist(Executor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        issue = self._stages.issue

        def all_but_one(step: Step, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
            if step.stage is not Stage.INPUT_DATA_DIST:
                issue(step, inflight, owners)

        self._stages.issue = all_but_one  # type: ignore[method-assign]


TWO_AHEAD = Schedule.parse(
    "two_ahead: input_splits_dist+3/data_dist dense_forward+0/compute copy_batch_to_device+4/memcpy "
    "embedding_lookup+2/lookup input_data_dist+3/data_dist backward+0/compute optimizer_step+0/compute"
)


def test_two_lookups_ahead() -> None:
    assert TWO_AHEAD.staleness == 2
    check_laws(TWO_AHEAD)


@pytest.mark.parametrize(
    ("executor_type", "schedule"), [(LeavesOutDataDist, FUSED_SPARSE_DIST), (ForgetsDiscovered, TWO_AHEAD)]
)
def test_a_stage_that_is_left_out_is_caught(executor_type: type[Executor], schedule: Schedule) -> None:
    with pytest.raises((AssertionError, KeyError)) as caught:
        check_laws(schedule, executor_type=executor_type)
    said = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(f"{schedule.name}: " in text for text in said)
