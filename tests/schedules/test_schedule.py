"""A table is accepted exactly when a run of it succeeds; what is wrong with it is said in words."""

import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule, ScheduleError, Step
from lightning_overlap.schedules.stages import Stage, StreamName

from ..support.schedules import issue_order, random_schedule

SPARSE = (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST, Stage.PREFETCH, Stage.EMBEDDING_LOOKUP)
TRAINER = (Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.WEIGHT_GRADIENTS, Stage.OPTIMIZER_STEP)
LIFE_OF_A_BATCH = (Stage.COPY_BATCH_TO_DEVICE, *SPARSE, *TRAINER)
OPTIONAL = {Stage.PREFETCH, Stage.WEIGHT_GRADIENTS, Stage.EMBEDDING_UPDATE}
NEEDED = {Stage.COPY_BATCH_TO_DEVICE, *TRAINER} - OPTIONAL


def is_whole(found: set[Stage]) -> bool:
    if found >= NEEDED | ({*SPARSE} - OPTIONAL):
        return not {Stage.PREFETCH, Stage.EMBEDDING_UPDATE} <= found
    return found >= NEEDED and not found & {*SPARSE, Stage.EMBEDDING_UPDATE}


schedules = st.randoms(use_true_random=False).map(random_schedule)


def simulate(steps: tuple[Step, ...]) -> bool:
    """Whether a run of a table succeeds, found by running it: nothing here is shared with the validator."""
    furthest = max((step.offset for step in steps), default=0)
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
            written = all(Stage.BACKWARD in done[before] for before in range(batch))
            if step.stage is Stage.EMBEDDING_LOOKUP and Stage.PREFETCH in table and not written:
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
    return all(is_whole(set(done[batch])) for batch in range(num_batches))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Step, ...]:
    """Tables that can run, and tables that almost can: rows swapped, moved, shifted, added, doubled, dropped."""
    steps = list(draw(schedules).steps)
    ahead = [step for step in steps if step.stage in SPARSE]
    if ahead and draw(st.booleans()):
        lookup = steps.index(ahead[-1])
        near = (max(0, lookup + draw(st.integers(-1, 1))), ahead[-1].offset + draw(st.integers(-1, 1)))
        place, offset = draw(st.just((lookup, ahead[-1].offset)) | st.just(near))
        steps.insert(place, Step(Stage.PREFETCH, offset, StreamName.PREFETCH))
    for _ in range(draw(st.integers(0, 2))):
        index, other = (draw(st.integers(0, len(steps) - 1)) for _ in range(2))
        step = steps[index]
        match draw(st.sampled_from(["swap", "swap", "move", "shift", "shift", "stream", "double", "drop"])):
            case "swap":
                steps[index - 1], steps[index] = step, steps[index - 1]
            case "move":
                steps.insert(other, steps.pop(index))
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


@settings(max_examples=500)
@given(st.integers(0, 9).flatmap(lambda of_ten: tables() if of_ten else ANY_ROWS.map(tuple)))
def test_a_table_is_accepted_exactly_when_its_run_succeeds(steps: tuple[Step, ...]) -> None:
    try:
        Schedule("drawn", steps)
    except ScheduleError:
        assert not simulate(steps)
    else:
        assert simulate(steps)


@given(schedules | st.sampled_from([*MODES.values()]))
def test_text_round_trips(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(f"  {str(schedule).replace(' ', '   ')}  ") == schedule


def simulated_staleness(schedule: Schedule) -> int:
    """Count, in the middle of a run, the updates of earlier batches that have not come when a batch is looked up."""
    updates = Stage.EMBEDDING_UPDATE if schedule.defers_update else Stage.BACKWARD
    written: set[int] = set()
    batch = 4 * schedule.depth
    for _, step, index in issue_order(schedule, batch + 1):
        if step.stage is updates:
            written.add(index)
        if step.stage is Stage.EMBEDDING_LOOKUP and index == batch:
            return len(set(range(batch)) - written)
    return 0  # the modules look up in their own forward


def simulated_depth(schedule: Schedule) -> int:
    """Count the batches that are fetched, and whose step or update is still to come, at the most."""
    last = [Stage.OPTIMIZER_STEP, *([Stage.EMBEDDING_UPDATE] if schedule.defers_update else [])]
    in_flight: dict[int, set[Stage]] = {}
    most = 0
    order = issue_order(schedule, 4 * schedule.depth)
    for (iteration, step, index), following in zip(order, [*order[1:], None], strict=True):
        if step.stage is Stage.COPY_BATCH_TO_DEVICE:
            in_flight[index] = set(last)
        in_flight[index].discard(step.stage)
        most = max(most, sum(bool(left) for left in in_flight.values()))
        if following is None or following[0] > iteration:  # a batch is let go where its iteration ends
            in_flight = {batch: left for batch, left in in_flight.items() if left}
    return most


@given(schedules | st.sampled_from([*MODES.values()]))
def test_staleness_and_the_late_lookup_are_those_of_a_run(schedule: Schedule) -> None:
    assert schedule.staleness == simulated_staleness(schedule)
    assert schedule.depth - 1 <= simulated_depth(schedule) <= schedule.depth
    # Tables of the dense optimizer: a lookup is fresh if it follows the step of the batch before.
    lookup, late = schedule.step_of(Stage.EMBEDDING_LOOKUP), schedule.dense_owned_lookup
    if lookup is None:
        assert late is None
        return
    stepped: set[int] = set()
    for _, step, index in issue_order(schedule, 4 * schedule.depth):
        if step.stage is Stage.OPTIMIZER_STEP:
            stepped.add(index)
        if step.stage is Stage.EMBEDDING_LOOKUP:
            is_fresh = stepped >= set(range(index))
            assert is_fresh or late is not None
    if late is not None:  # issued right after the step of batch N, for batch N + 1
        assert (late.stage, late.offset, late.stream) == (lookup.stage, 1, lookup.stream)


@given(schedules | st.sampled_from([*MODES.values()]))
def test_what_may_run_inside_the_backward_needs_nothing_of_it(schedule: Schedule) -> None:
    """These rows stand right above it, and a collective that another rank receives there is not the first of them."""
    inside = [schedule.steps[index] for index in schedule.rows_in_backward_wait]
    assert schedule.rows_in_backward_wait.stop == schedule.position(Stage.BACKWARD)
    assert not {step.stage for step in inside} & {*TRAINER, Stage.COPY_BATCH_TO_DEVICE}
    if inside:
        assert inside[0].stage not in (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST)


# -- what is wrong with a table --------------------------------------------------------------------------------

COPY, LAST = "copy_batch_to_device+1/memcpy", "backward+0/compute optimizer_step+0/compute"
SENDS, FORWARD = "input_splits_dist+1/data_dist input_data_dist+0/data_dist", "dense_forward+0/compute"

# The table as text; what is wrong with it, the numbers of the bad rows, what to do.
WRONG: dict[str, tuple[str, str, list[int], str]] = {
    "lookup_above_its_input": (
        f"{COPY} input_splits_dist+1/data_dist embedding_lookup+1/lookup {FORWARD} input_data_dist+1/data_dist {LAST}",
        *("embedding_lookup+1 (step 3) runs before input_data_dist+1 (step 5) of the same batch", [3]),
        "Move input_data_dist above step 3, or raise its batch offset to +2.",
    ),
    "offsets_the_wrong_way": (
        f"copy_batch_to_device+0/compute {SENDS} embedding_lookup+0/compute {FORWARD} {LAST}",
        *("input_splits_dist+1 (step 2) runs before copy_batch_to_device+0 (step 1) of the same batch", [2]),
        "Raise the offset of copy_batch_to_device to at least +1, or lower the offset of input_splits_dist.",
    ),
    "a_stage_twice": (
        f"{COPY} {FORWARD} copy_batch_to_device+0/memcpy backward+0/compute",
        *("copy_batch_to_device occurs twice", [3], "Keep one step per stage."),
    ),
    "training_ahead": (
        f"{COPY} {FORWARD} backward+1/compute optimizer_step+0/compute",
        *("backward (step 3) has offset 1", [3], "The trainer runs it on the batch being trained: offset 0."),
    ),
    "training_on_another_stream": (
        f"{COPY} dense_forward+0/lookup {LAST}",
        *("dense_forward (step 2) is on stream lookup", [2], "The trainer runs it on the compute stream."),
    ),
    "half_of_the_sparse_stages": (
        f"{COPY} {SENDS} {FORWARD} {LAST}",
        *("embedding_lookup is missing", [], "Add a step for every sparse stage, or for none."),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_printed_with_the_bad_row_marked(name: str) -> None:
    text, problem, bad, remedy = WRONG[name]
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(f"mine: {text}")
    first, *rows, last = str(caught.value).splitlines()
    assert (first, last) == (f"'mine': {problem}.", f"  {remedy}")
    assert [int(row.split()[1]) for row in rows if row.startswith("  >") and row.endswith("<-- here")] == bad
    assert [row[3:].split()[1] for row in rows] == text.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("copy_batch_to_device+0/compute", "expected 'name: stage+offset/stream ...', got 'copy_batch"),
        ("mine: dense_forward", "'mine': expected 'stage+offset/stream', got 'dense_forward'"),
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
    with pytest.raises(ValueError, match="step 1 is 'backward'; expected a Step"):
        Schedule("mine", ("backward",))  # type: ignore[arg-type]
