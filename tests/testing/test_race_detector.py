"""The race checker: vector clocks by themselves, and every wait and hand-over of the walker left out in turn."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap.runtime import deferred_updates, table_writes, walker
from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName
from lightning_overlap.testing import RaceError
from lightning_overlap.testing.race_detector import Races

from ..support import mutants
from ..support.fakes import FakeTrainer, check_laws

COMPUTE, SIDE, THIRD = StreamName.COMPUTE, StreamName.DATA_DIST, StreamName.LOOKUP


# -- clocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("writes", "reads"), ("reads", "writes"), ("writes", "writes")])
def test_an_access_that_nothing_orders(first: str, second: str) -> None:
    races = Races()
    races.do("one", COMPUTE, **{first: ["table"]})
    with pytest.raises(RaceError) as caught:
        races.do("two", SIDE, **{second: ["table"]})
    assert str(caught.value) == (
        f"no event orders two ({second} on data_dist) after one ({first} on compute): a race for table. Missing: "
        "streams.wait(data_dist, event) with an event recorded on compute after one"
    )


def test_memory_of_another_stream_has_to_be_handed_over() -> None:
    races = Races()
    races.do("copy", SIDE, makes=["batch"])
    races.wait(COMPUTE, races.event(SIDE))
    with pytest.raises(
        RaceError, match=r"the memory of batch, which copy allocated on data_dist.*record_stream\(\.\.\., comp"
    ):
        races.do("forward", COMPUTE, reads=["batch"])
    races.record_stream(["batch"], COMPUTE)
    races.do("forward", COMPUTE, reads=["batch"])
    races.do("the next copy", THIRD, makes=["batch"])  # other memory
    with pytest.raises(RaceError, match="which the next copy allocated on lookup"):
        races.do("forward", COMPUTE, reads=["batch"])


NAMES = (COMPUTE, SIDE, THIRD)
KINDS = ("read", "write", "record", "wait", "join")  # `join`: record an event on another stream, and wait for it
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 5)), max_size=40)
JOINS = [("join", SIDE, NAMES.index(COMPUTE)), ("join", THIRD, NAMES.index(SIDE))]


@settings(max_examples=300)
@given(EVENTS)
@example([("read", COMPUTE, 0), ("read", SIDE, 0)])
@example([("write", COMPUTE, 0), *JOINS, ("read", THIRD, 0)])
@example([("write", COMPUTE, 0), ("join", SIDE, 0), ("join", SIDE, NAMES.index(THIRD)), ("read", SIDE, 0)])
@example([("record", COMPUTE, 0), ("write", COMPUTE, 0), ("wait", SIDE, 0), ("read", SIDE, 0)])
def test_equals_a_search_of_the_graph(steps: list[tuple[str, StreamName, int]]) -> None:
    """Against happens-before as paths in a graph of all work: edges within a stream, and by waits for events."""
    races, done, events = Races(), list[tuple[str, str]](), list[tuple[Any, set[int]]]()
    after: dict[StreamName, set[int]] = {name: set() for name in NAMES}  # all work that a stream is ordered after
    for kind, stream, number in steps:
        if kind in ("record", "join"):
            recorded = stream if kind == "record" else NAMES[number % 3]
            events.append((races.event(recorded), set(after[recorded])))
        if kind == "join" or (kind == "wait" and events):
            event, before = events[-1 if kind == "join" else number % len(events)]
            races.wait(stream, event)
            after[stream] |= before
        if kind not in ("read", "write"):
            continue
        resource = "xyz"[number % 3]
        conflicts = {at for at, (other, of) in enumerate(done) if of == resource and "write" in (kind, other)}
        uses: Any = {f"{kind}s": [resource]}
        if not conflicts <= after[stream]:
            with pytest.raises(RaceError):
                races.do(str(len(done)), stream, **uses)
            return
        races.do(str(len(done)), stream, **uses)
        after[stream] |= {len(done)}
        done.append((kind, resource))


# -- the walker -----------------------------------------------------------------------------------------------


def test_what_the_mutants_are_made_of_is_right() -> None:
    with mutants.unchanged(FILES):
        for schedule in SCHEDULES:
            check_laws(schedule)
    assert len(MUTANTS) >= 14


OWN_STREAMS = Schedule.parse(
    "own_streams: input_splits_dist+1/data_dist dense_forward+0/compute copy_batch_to_device+2/memcpy "
    "input_data_dist+1/lookup embedding_lookup+1/memcpy backward+0/compute optimizer_step+0/compute"
)
"""Every sparse stage on a stream of its own."""

UPDATES_AFTER_THE_STEP = Schedule(
    "updates_after_the_step", (*MODES["semi_sync"].steps, Step(Stage.EMBEDDING_UPDATE, 0, StreamName.LOOKUP))
)

SCHEDULES = sorted(
    (*MODES.values(), OWN_STREAMS, UPDATES_AFTER_THE_STEP), key=lambda schedule: schedule.name not in mutants.NEED_MOST
)

FILES = (walker, deferred_updates, table_writes)
OF_REAL_STAGES = (*("_finish_backward", "begin_backward", "without_lookups_ahead", "_drop_lookups"),)
"""What only real stages and a real backward ask for (`test_checked_streams.py`, `test_stream_order.py`)."""

MUTANTS = [
    (file, line, text)
    for file in FILES
    for line, text in mutants.statements(file)
    if not any((line, text) in mutants.statements(file, function) for function in OF_REAL_STAGES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line"), [entry[:2] for entry in MUTANTS], ids=[entry[2] for entry in MUTANTS])
def test_a_wait_or_hand_over_that_the_executor_leaves_out_is_caught(file: ModuleType, line: int) -> None:
    def run(schedule: Schedule) -> None:
        check_laws(schedule)
        FakeTrainer(schedule).run(12, hold={4: 4}, repeat={8})

    with mutants.without(file, line):  # the first schedule that needs it is enough
        found = any(mutants.races(partial(run, schedule)) for schedule in SCHEDULES)
    assert found, "nothing needs it, or the checker is blind to what does"
