"""A table is accepted exactly when a run of it succeeds; what is wrong with it is said in words."""

import re
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, MODES
from lightning_overlap.schedules.schedule import Schedule, ScheduleError, Step
from lightning_overlap.schedules.stages import Stage, StreamName

from ..support.schedules import issue_order, random_schedule

LIFE_OF_A_BATCH = (
    Stage.COPY_BATCH_TO_DEVICE,
    Stage.INPUT_SPLITS_DIST,
    Stage.INPUT_DATA_DIST,
    Stage.PREFETCH,
    Stage.EMBEDDING_LOOKUP,
    Stage.DENSE_FORWARD,
    Stage.BACKWARD,
    Stage.WEIGHT_GRADIENTS,
    Stage.OPTIMIZER_STEP,
)
TRAINER = LIFE_OF_A_BATCH[5:]
SPARSE = frozenset(LIFE_OF_A_BATCH[1:5])
OPTIONAL = {Stage.PREFETCH, Stage.WEIGHT_GRADIENTS, Stage.EMBEDDING_UPDATE}


def is_whole(stages: list[Stage]) -> bool:
    found = set(stages)
    if not {Stage.COPY_BATCH_TO_DEVICE, *TRAINER} - OPTIONAL <= found:
        return False
    if found >= SPARSE - OPTIONAL:
        return not {Stage.PREFETCH, Stage.EMBEDDING_UPDATE} <= found
    return not found & (SPARSE | {Stage.EMBEDDING_UPDATE})


schedules = st.randoms(use_true_random=False).map(random_schedule)


def written_before(done: dict[int, list[Stage]], batch: int) -> int:
    return sum(Stage.BACKWARD in done[before] for before in range(batch))


def simulate(steps: tuple[Step, ...]) -> bool:
    """Whether a run of a table succeeds, found by running it: nothing here is shared with the validator."""
    if not steps:
        return False
    furthest = max(step.offset for step in steps)
    num_batches = 2 * (furthest + 1) + 1
    done: dict[int, list[Stage]] = defaultdict(list)
    gone_back: set[int] = set()  # batches behind their backward, whose update has not come yet
    updates_later = any(step.stage is Stage.EMBEDDING_UPDATE for step in steps)
    if any(step.offset < (-1 if step.stage is Stage.EMBEDDING_UPDATE else 0) for step in steps):
        return False
    for iteration in range(-furthest, num_batches + 1):
        for step in steps:
            if step.stage in TRAINER and (step.offset != 0 or step.stream is not StreamName.COMPUTE):
                return False  # the trainer runs these itself, on the batch being trained
            batch = iteration + step.offset
            if not 0 <= batch < num_batches:
                continue
            # Sparse stages may be left out altogether, so only those of this table are needed before the forward.
            table = {other.stage for other in steps}
            if step.stage is Stage.EMBEDDING_UPDATE:
                if Stage.BACKWARD not in done[batch] or step.stage in done[batch]:
                    return False
            else:
                needed = LIFE_OF_A_BATCH[: LIFE_OF_A_BATCH.index(step.stage)]
                before = [stage for stage in done[batch] if stage is not Stage.EMBEDDING_UPDATE]
                if before != [stage for stage in needed if stage in table]:
                    return False
            if step.stage is Stage.EMBEDDING_LOOKUP and Stage.PREFETCH in table and written_before(done, batch) < batch:
                return False  # the kernel's backward is that of its last lookup
            done[batch].append(step.stage)
            if step.stage is Stage.BACKWARD and updates_later:
                gone_back.add(batch)
            elif step.stage is Stage.EMBEDDING_UPDATE:
                gone_back.discard(batch)
            elif step.stage is Stage.EMBEDDING_LOOKUP and gone_back:
                return False  # it would see the update of a module that ran its own forward, and no other
        if any(stages[-1:] == [Stage.PREFETCH] for stages in done.values()):
            return False  # an evaluation that comes now would be taken for the lookup of these ids
    return all(is_whole(done[batch]) for batch in range(num_batches))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Step, ...]:
    """Tables that can run, and tables that almost can: steps moved, shifted, doubled, dropped."""
    steps = list(draw(schedules).steps)
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(steps) - 1))
        step = steps[index]
        match draw(st.sampled_from(["move", "shift", "stream", "double", "drop"])):
            case "move":
                steps.insert(draw(st.integers(0, len(steps) - 1)), steps.pop(index))
            case "shift":
                steps[index] = Step(step.stage, step.offset + draw(st.sampled_from([-1, 1])), step.stream)
            case "stream":
                steps[index] = Step(step.stage, step.offset, draw(st.sampled_from(StreamName)))
            case "double":
                steps.append(step)
            case "drop" if len(steps) > 1:
                del steps[index]
    return tuple(steps)


ANY_ROWS = st.lists(st.builds(Step, st.sampled_from(Stage), st.integers(0, 3), st.sampled_from(StreamName)))


@pytest.mark.parametrize("drawn", [tables(), ANY_ROWS.map(tuple)], ids=["almost_right", "any_rows"])
@given(data=st.data())
def test_a_table_is_accepted_exactly_when_its_run_succeeds(drawn: st.SearchStrategy[Any], data: st.DataObject) -> None:
    steps = data.draw(drawn)
    try:
        Schedule("drawn", steps)
        accepted = True
    except ScheduleError:
        accepted = False
    assert accepted == simulate(steps), " ".join(map(str, steps))


def test_the_simulation_itself_accepts_and_refuses() -> None:
    steps = FUSED_SPARSE_DIST.steps
    assert simulate(steps)
    assert not simulate(steps[1:])
    assert not simulate(tuple(reversed(steps)))


@given(schedules)
def test_text_round_trips(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_text_of_every_mode_round_trips(mode: Schedule) -> None:
    assert Schedule.parse(str(mode)) == mode
    assert Schedule.parse(f"  {str(mode).replace(' ', '   ')}  ") == mode


def test_the_text_form_is_stable() -> None:
    assert str(FUSED_SPARSE_DIST) == (
        "fused_sparse_dist: copy_batch_to_device+2/memcpy dense_forward+0/compute input_splits_dist+2/data_dist "
        "input_data_dist+1/data_dist backward+0/compute embedding_lookup+1/lookup optimizer_step+0/compute"
    )


@given(schedules)
def test_issue_order_is_what_a_run_from_the_fill_to_the_drain_issues(schedule: Schedule) -> None:
    for num_batches in range(2 * schedule.depth + 1):
        order = issue_order(schedule, num_batches)
        for batch in range(num_batches):
            stages = [step.stage for _, step, index in order if index == batch]
            assert is_whole(stages)
            assert len(set(stages)) == len(stages)
        iterations = [iteration for iteration, _, _ in order]
        assert iterations == sorted(iterations)
        assert len(order) == num_batches * len(schedule.steps)


def simulated_staleness(schedule: Schedule) -> int:
    """Count, in the middle of a run, the updates before a batch that its lookup comes too early for."""
    if not schedule.has_sparse_stages:
        return 0
    written: set[int] = set()
    batch = 4 * schedule.depth
    for _, step, index in issue_order(schedule, batch + 1):
        if step.stage is (
            Stage.BACKWARD if schedule.step_of(Stage.EMBEDDING_UPDATE) is None else Stage.EMBEDDING_UPDATE
        ):
            written.add(index)
        if step.stage is Stage.EMBEDDING_LOOKUP and index == batch:
            return len(set(range(batch)) - written)
    raise AssertionError("no lookup")


@given(schedules)
def test_staleness_and_depth_are_those_of_a_run(schedule: Schedule) -> None:
    assert schedule.staleness == simulated_staleness(schedule)
    fetched, num_done, most = 0, 0, 0
    for _, step, _ in issue_order(schedule, 4 * schedule.depth):
        fetched += step.stage is Stage.COPY_BATCH_TO_DEVICE
        most = max(most, fetched - num_done)
        num_done += step.stage is Stage.OPTIMIZER_STEP
    # A copy below OPTIMIZER_STEP comes when the trained batch is over, though the iteration is not.
    copy = schedule.step_of(Stage.COPY_BATCH_TO_DEVICE)
    assert copy is not None
    below = schedule.position(Stage.COPY_BATCH_TO_DEVICE) > schedule.position(Stage.OPTIMIZER_STEP)
    assert most == copy.offset + (not below)
    update = schedule.step_of(Stage.EMBEDDING_UPDATE)
    assert schedule.depth == copy.offset + 1 + (update is not None and update.offset == -1)


@given(schedules)
def test_tables_of_the_dense_optimizer_are_looked_up_after_its_step_and_before_the_next_forward(
    schedule: Schedule,
) -> None:
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    deferred = schedule.dense_owned_lookup
    if lookup is None:
        assert deferred is None
    elif deferred is None:
        fresh = lookup.offset == 0 or schedule.position(lookup.stage) > schedule.position(Stage.OPTIMIZER_STEP)
        assert fresh
        assert lookup.offset <= 1
    else:
        assert deferred == Step(Stage.EMBEDDING_LOOKUP, 1, lookup.stream)


# -- what is wrong with a table --------------------------------------------------------------------------------


def change(mode: str, *, drop: Stage | None = None, steps: dict[int, str] | None = None) -> str:
    texts = [str(step) for step in MODES[mode]]
    for index, text in (steps or {}).items():
        texts[index] = text
    return "mine: " + " ".join(text for text in texts if drop is None or not text.startswith(f"{drop}+"))


# The table as text; what is wrong with it, the number of the bad row, what to do.
WRONG: dict[str, tuple[str, str, int | None, str]] = {
    "lookup_above_its_input": (
        "mine: copy_batch_to_device+1/memcpy input_splits_dist+1/data_dist embedding_lookup+1/lookup "
        "dense_forward+0/compute input_data_dist+1/data_dist backward+0/compute optimizer_step+0/compute",
        "embedding_lookup+1 (step 3) runs before input_data_dist+1 (step 5) of the same batch",
        3,
        "Move input_data_dist above step 3, or raise its batch offset to +2.",
    ),
    "offsets_the_wrong_way": (
        "mine: copy_batch_to_device+0/compute input_splits_dist+1/data_dist input_data_dist+0/data_dist "
        "embedding_lookup+0/compute dense_forward+0/compute backward+0/compute optimizer_step+0/compute",
        "input_splits_dist+1 (step 2) runs before copy_batch_to_device+0 (step 1) of the same batch",
        2,
        "Raise the offset of copy_batch_to_device to at least +1, or lower the offset of input_splits_dist.",
    ),
    "a_stage_twice": (
        "mine: copy_batch_to_device+1/memcpy dense_forward+0/compute copy_batch_to_device+0/memcpy backward+0/compute",
        *("copy_batch_to_device occurs twice", 3, "Keep one step per stage."),
    ),
    "no_backward": (
        change("base", drop=Stage.BACKWARD),
        *("backward is missing", None, "Add Step(BACKWARD, 0, ...)."),
    ),
    "training_ahead": (
        change("base", steps={2: "backward+1/compute"}),
        *("backward (step 3) has offset 1", 3, "The trainer runs it on the batch being trained: offset 0."),
    ),
    "training_on_another_stream": (
        change("base", steps={2: "backward+0/lookup"}),
        *("backward (step 3) is on stream lookup", 3, "The trainer runs it on the compute stream."),
    ),
    "half_of_the_sparse_stages": (
        change("sparse_dist", drop=Stage.INPUT_DATA_DIST),
        *("input_data_dist is missing", None, "Add a step for every sparse stage, or for none."),
    ),
}
PRINTED = """\
'mine': copy_batch_to_device occurs twice.
     1  copy_batch_to_device+1/memcpy
     2  dense_forward+0/compute
  >  3  copy_batch_to_device+0/memcpy   <-- here
     4  backward+0/compute
  Keep one step per stage."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_printed_with_the_bad_row_marked(name: str) -> None:
    text, problem, bad, remedy = WRONG[name]
    steps = text.removeprefix("mine: ").split()
    rows = [f"    {number:2d}  {step}" for number, step in enumerate(steps, 1)]
    if bad is not None:
        width = max(map(len, rows))
        rows[bad - 1] = f"{rows[bad - 1].replace('   ', '  >', 1):{width}s}   <-- here"
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    said = [line.rstrip() for line in str(caught.value).splitlines()]
    assert said == [f"'mine': {problem}.", *rows, f"  {remedy}"]
    assert name != "a_stage_twice" or said == PRINTED.splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("copy_batch_to_device+0/compute", "expected 'name: stage+offset/stream ...', got 'copy_batch"),
        (": dense_forward+0/compute", "expected 'name: stage+offset/stream ...'"),
        ("mine: dense_forward", "'mine': expected 'stage+offset/stream', got 'dense_forward'"),
        ("mine: dense_forward/compute", "expected 'stage+offset/stream', got 'dense_forward/compute'"),
        ("mine: dense_forward-1/compute", "dense_forward has offset -1"),
        ("mine: embedding_update-2/compute", "embedding_update has offset -2"),
        ("mine: dense_forwards+0/compute", "'dense_forwards+0/compute' names an unknown stage or stream"),
        ("mine: dense_forward+0/gpu", "Known stages: copy_batch_to_device, .*; streams: compute, memcpy, data_dist"),
        ("mine:", "copy_batch_to_device is missing"),
        ("My mode: ", "lower-case letters, digits and '_', got 'My mode'"),
    ],
)
def test_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message if ".*" in message else re.escape(message)):
        Schedule.parse(text)


def test_a_row_that_is_no_step_is_refused() -> None:
    with pytest.raises(ScheduleError, match="step 1 is 'backward'; expected a Step"):
        Schedule("mine", ("backward",))  # type: ignore[arg-type]


def test_an_error_is_a_value_error() -> None:
    assert issubclass(ScheduleError, ValueError)
