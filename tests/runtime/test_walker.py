"""The walker over fake tables: laws, discovery, steps that are skipped or repeated, failures."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, MODES, STREAMS
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import TRAINING_STAGES, Stage, StreamName

from ..support.fakes import FakeTrainer, InjectedError, RecordingStreams, check_laws, check_stages, check_staleness
from ..support.schedules import run_schedule
from .setups import FUSED, ONE_FUSED, TWO_AHEAD, overlapping, random_schedules


@pytest.mark.parametrize("schedule", [*MODES.values(), TWO_AHEAD], ids=lambda schedule: schedule.name)
def test_laws_hold(schedule: Schedule) -> None:
    check_laws(schedule)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(random_schedules)
def test_all_laws_hold_for_any_schedule_that_is_accepted(schedule: Schedule) -> None:
    check_laws(schedule)


INDICES = st.sets(st.integers(0, 8), max_size=2)
RUNS = st.fixed_dictionaries(
    {
        "num_batches": st.integers(0, 12),
        "skip": INDICES,
        "repeat": INDICES,
        "hold": st.dictionaries(st.integers(1, 6), st.integers(1, 6), max_size=1),
        "stop_after": st.none() | st.integers(0, 8),
    }
)


_RUN = {"num_batches": 2, "skip": set(), "repeat": set(), "hold": {}}
_IDS_ON_MEMCPY = (  # an early end leaves batch 1 in flight, and the next run has a batch 1 too
    "ids_on_memcpy: copy_batch_to_device+1/compute input_splits_dist+1/compute input_data_dist+1/memcpy "
    "embedding_lookup+0/compute dense_forward+0/compute backward+0/compute optimizer_step+0/compute"
)


@settings(max_examples=60)
@example(
    Schedule.parse(_IDS_ON_MEMCPY), StreamName.COMPUTE, False, [{**_RUN, "stop_after": 1}, {**_RUN, "stop_after": None}]
)
@given(
    random_schedules | st.sampled_from([*MODES.values()]),
    st.sampled_from([*STREAMS.values()]),
    st.booleans(),
    st.lists(RUNS, min_size=1, max_size=3),
)
def test_no_run_of_an_accepted_schedule_has_a_race_or_leaves_something_in_flight(
    schedule: Schedule, lookup: StreamName, ready: bool, runs: list[dict[str, Any]]
) -> None:
    """Epochs one after the other, with steps skipped and repeated, batches that come late, and early ends."""
    trainer = FakeTrainer(schedule, ready=ready, streams=RecordingStreams(lookup))
    for options in runs:
        # A source holds a batch back until an iteration that it reaches without it.
        hold = {batch: min(batch, until) for batch, until in options["hold"].items()}
        run = trainer.run(**{**options, "hold": hold})  # raises at a race, and at a collective that was not completed
        stop = options["stop_after"]
        assert run.trained == list(range(min(options["num_batches"], 99 if stop is None else stop)))
        trained = [batch for batch in run.trained if batch not in options["skip"] - options["repeat"]]
        assert set(run.updates[FUSED]) <= set(trained)


def test_timeline_of_discovery() -> None:
    # memcpy    | C0 C1          C2
    # data_dist |          S1       D1
    # lookup    |                         L1
    # compute   |       F0             B0    O0 ...
    trainer = FakeTrainer(FUSED_SPARSE_DIST, modules=ONE_FUSED, ready=False)
    events = trainer.run(2).timeline
    batches = [batch for kind, _, batch in events.events if kind == "issue"]
    issued = [text for text, batch in zip(events.issued(), batches, strict=True) if batch < 2]
    assert issued == ["C0", "C1", "F0", "S1", "D1", "B0", "L1", "O0", "F1", "B1", "O1"]
    assert trainer.run(3).served_early(0) == {True}, "the next run knows what feeds which module"


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
        run = run_schedule(schedule, 3 * schedule.depth, repeat={repeated})
        early = [served.early for served in run.served if served.batch == repeated]
        assert early == [True] * (len(early) // 2) + [False] * (len(early) // 2)
        saw = run.saw(repeated + 1, FUSED)
        assert saw == {(*run.updates[FUSED][: repeated + 2],)}, f"a lookup missed the second backward\n{run}"
        assert run.updates[FUSED].count(repeated) == 2
        for batch in [*range(repeated), repeated + schedule.depth]:
            assert run.served_early(batch) == {True}, "lookups are early again once the schedule has come round"


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
            trainer.walker.abandon()
            assert len(trainer.walker.batches.in_flight) == (trainer.walker.batches.current is not None)
            assert trainer.walker.batches.current is None
            run = trainer.run(num_batches)
            check_stages(run, num_batches, ready=trainer.sparse.served[0].early)
            check_staleness(run)


def test_an_abandoned_run_issues_nothing_more(mode: Schedule) -> None:
    trainer = FakeTrainer(mode)
    with pytest.raises(InjectedError):
        trainer.run(4, fail_at=(Stage.DENSE_FORWARD, 1))
    events = list(trainer.timeline.events)
    trainer.walker.abandon()
    trainer.walker.drain()
    trainer.walker.after(Stage.OPTIMIZER_STEP)
    assert trainer.timeline.events == events


def test_manual_optimization_reaches_the_step_when_training_step_is_over(mode: Schedule) -> None:
    mode = mode.with_whole_backward  # as the strategy does
    trainer = FakeTrainer(mode, automatic=False)
    run = trainer.run(2 * mode.depth)
    check_stages(run, 2 * mode.depth)
    for served in run.served:
        # A lookup above BACKWARD in the table then comes after it: fresher than the table says, never staler.
        assert set(range(served.batch - mode.staleness)) <= set(served.saw)
