"""The staleness that a user chooses, the switches around a stale mode, and the words for what cannot be."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_overlap.plugin.first_words import of_mode
from lightning_overlap.schedules.mode import Mode
from lightning_overlap.schedules.modes import BASE, DEFAULT_STALENESS, MODES, SEMI_SYNC, async_lookup, defer_update
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName

from ..support.schedules import issue_order


@given(st.integers(1, 40))
def test_what_is_derived_is_what_was_asked_for(staleness: int) -> None:
    """Also, embeddings of so many batches are held ahead: from the lookup to the backward, which updates the table."""
    mode = async_lookup(staleness)
    assert (mode.staleness, mode.depth) == (staleness, staleness + 3)
    assert mode.dense_owned_lookup == Step(Stage.EMBEDDING_LOOKUP, 1, StreamName.LOOKUP)
    held, most = set[int](), 0
    for iteration, step, batch in issue_order(mode, 40):
        if step.stage is Stage.EMBEDDING_LOOKUP:
            held.add(batch)
        elif step.stage is Stage.BACKWARD:
            held.remove(batch)
        most = max(most, len([ahead for ahead in held if ahead > iteration]))
    assert (most, held) == (staleness, set())


def test_semi_sync_is_the_case_of_one() -> None:
    assert replace(async_lookup(1), name="semi_sync") == SEMI_SYNC
    assert async_lookup(DEFAULT_STALENESS).steps == MODES["async_lookup"].steps
    assert Mode("async_lookup").schedule.staleness == DEFAULT_STALENESS
    assert Mode("async_lookup", staleness=4).schedule == async_lookup(4)


STALENESS_2, BOTH = {"staleness": 2}, {"start_batch": 3, "end_batch": 3}
DEFERS = {"defer_update": True}
AUTO = "'auto' compares modes of equal losses and takes no mode options"
NO_MODE = "'auto' is not a mode: the strategy's pipeline='auto' compares modes of equal losses. Name one of them"
NEEDS = "'fused_sparse_dist' looks up after the backward and needs its update by then"


@pytest.mark.parametrize(
    ("pipeline", "options", "error", "message"),
    [
        ("semi_sync", STALENESS_2, ValueError, "the order of stages of 'semi_sync' fixes its staleness at 1. To"),
        ("base", {"staleness": 0}, ValueError, "staleness=0: the order of stages of 'base' fixes its staleness at 0"),
        ("async_lookup", {"staleness": 0}, ValueError, "got 0. For lookups that see every update, use pipeline='fused"),
        ("async_lookup", {"staleness": 1.5}, TypeError, "staleness must be a number of batches, got 1.5"),
        ("auto", STALENESS_2, ValueError, AUTO),
        ("auto", {}, ValueError, NO_MODE),
        (SEMI_SYNC, {"start_batch": -1}, ValueError, "start_batch must be at least 0 batches, got -1"),
        (SEMI_SYNC, {"end_batch": "3"}, TypeError, "end_batch must be a number of batches, got '3'"),
        (SEMI_SYNC, BOTH, ValueError, "end_batch must be larger than start_batch=3, got 3"),
        (BASE, {"start_batch": 3}, ValueError, "'base' is always exact. Use them with a stale mode (semi_sync,"),
        ("fused_sparse_dist", DEFERS, ValueError, NEEDS),
    ],
)
def test_what_cannot_be(pipeline: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Mode(pipeline, **options)


STALE = [name for name in MODES if MODES[name].staleness]


def takes(name: str, switch: str) -> bool:
    try:
        Mode(name, **{switch: True})  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


SWITCHES = {
    name: [option.name for option in fields(Mode) if option.default is False and takes(name, option.name)]
    for name in MODES
}


@st.composite
def modes(draw: st.DrawFn, names: Sequence[str] = tuple(MODES)) -> Mode:
    """Any mode with any options that it takes."""
    name = draw(st.sampled_from(names))
    options: dict[str, Any] = {switch: draw(st.booleans()) for switch in SWITCHES[name]}
    if name == "async_lookup":
        options["staleness"] = draw(st.none() | st.integers(1, 40))
    if name in STALE:
        options["start_batch"] = start = draw(st.integers(0, 50))
        options["end_batch"] = draw(st.none() | st.integers(start + 1, 99))
    try:
        return Mode(name, **options)
    except ValueError:  # two switches that exclude each other
        assume(False)
        raise


@given(modes())
def test_a_name_that_is_printed_is_that_mode(mode: Mode) -> None:
    for printed in (mode.schedule.name, str(mode.schedule)):
        assert Mode(printed).schedule == mode.schedule
        assert Mode(printed, start_batch=mode.start_batch, end_batch=mode.end_batch).schedules == mode.schedules


def meant_by(name: str) -> Any:
    """What the error about an unknown name says to write."""
    with pytest.raises(ValueError, match="unknown pipeline") as info:
        Mode(name)
    found = re.search(r"Did you mean (Mode\(.*?\)|'\w+')\?", str(info.value))
    return None if found is None else eval(found[1])


@given(modes(STALE))
def test_the_words_of_the_log_are_answered_with_the_mode_to_write(mode: Mode) -> None:
    meant = meant_by(of_mode(mode))
    assert meant.schedule.steps == mode.schedule.steps
    assert (meant.start_batch, meant.end_batch) == (mode.start_batch, mode.end_batch)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *((name, Mode("async_lookup", staleness=3)) for name in ("asynclookup_3", "async_lookup3", "async-lookup-3")),
        ("async_lookup_3_defered", Mode("async_lookup", staleness=3, defer_update=True)),
        ("semi_sync_2", Mode("async_lookup", staleness=2)),
        ("async_lookup_0", "fused_sparse_dist"),
        ("asynclookup", "async_lookup"),
    ],
)
def test_an_unknown_name_with_a_number_is_not_taken_for_a_mode_of_another_staleness(name: str, meant: Any) -> None:
    assert meant_by(name) == meant


def test_a_name_and_options_that_disagree() -> None:
    assert Mode("async_lookup_3", staleness=3, start_batch=5) == Mode("async_lookup", staleness=3, start_batch=5)
    assert Mode("async_lookup_deferred", staleness=4) == Mode("async_lookup", staleness=4, defer_update=True)
    with pytest.raises(ValueError, match="staleness=4: the name 'async_lookup_3' says 3"):
        Mode("async_lookup_3", staleness=4)
    with pytest.raises(ValueError, match=r"In Python write the Mode without quotes; in YAML write \{class_path"):
        Mode("Mode('async_lookup', staleness=3)")


def test_an_option_that_there_is_not_is_named_with_the_nearest() -> None:
    message = "Mode: unknown option 'stalness'. Did you mean 'staleness'? Known: name, stale"
    with pytest.raises(TypeError, match=re.escape(message)):
        Mode("semi_sync", stalness=2)  # type: ignore[call-arg]
    assert [*inspect.signature(Mode).parameters][:2] == ["name", "staleness"]


def test_the_table_of_each_batch() -> None:
    switched = Mode(async_lookup(3), start_batch=5, end_batch=9).schedules
    assert [switched.at(batch).staleness for batch in range(12)] == [0] * 5 + [3] * 4 + [0] * 3
    assert switched.depth == async_lookup(3).depth
    assert Mode(SEMI_SYNC).schedules is SEMI_SYNC
    from_the_first_on = Mode(SEMI_SYNC, end_batch=2).schedules
    assert [from_the_first_on.at(batch).staleness for batch in range(4)] == [1, 1, 0, 0]


def test_schedules_with_lookups_on_two_streams_cannot_follow_one_another() -> None:
    lookup = Stage.EMBEDDING_LOOKUP
    steps = [replace(step, stream=StreamName.COMPUTE) if step.stage is lookup else step for step in SEMI_SYNC]
    message = "all lookups of a run must use one stream, got 'fused_sparse_dist' on lookup, 'mine' on compute"
    with pytest.raises(ValueError, match=message):
        Mode(Schedule("mine", tuple(steps)), start_batch=4)


@pytest.mark.parametrize("mode", [SEMI_SYNC, async_lookup(3)], ids=lambda mode: mode.name)
def test_a_deferred_update_leaves_the_staleness(mode: Schedule) -> None:
    deferred = defer_update(mode)
    assert (deferred.staleness, deferred.depth) == (mode.staleness, mode.depth + 1)
    assert Mode(mode, defer_update=True).schedule == deferred
