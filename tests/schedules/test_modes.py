"""What is derived from each mode's table, as whole lists; and the words for an unknown name."""

import re
from collections import defaultdict

import pytest

from lightning_overlap.schedules.mode import Mode, resolve_stream
from lightning_overlap.schedules.modes import MODES, STREAMS
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName

from ..support.schedules import issue_order

LETTERS = dict(zip(Stage, "CSDPLFBWOU", strict=True))


def issues(schedule: Schedule, num_batches: int) -> dict[int, str]:
    """Return what each iteration issues, short: `S1` is the input splits dist of batch 1."""
    listed: dict[int, list[str]] = defaultdict(list)
    for iteration, step, batch in issue_order(schedule, num_batches):
        listed[iteration].append(f"{LETTERS[step.stage]}{batch}")
    return {iteration: " ".join(issued) for iteration, issued in listed.items()}


LATE = Step(Stage.EMBEDDING_LOOKUP, 1, StreamName.LOOKUP)
DEFERRED = "embedding_update-1/lookup embedding_lookup+1/lookup input_splits_dist+3/data_dist"

# Depth, staleness, lookup of tables of the dense optimizer; what may be done, and received, where the backward waits.
DERIVED: dict[str, tuple[int, int, Step | None, str, str]] = {
    "base": (1, 0, None, "", ""),
    "sparse_dist": (3, 0, None, "", "embedding_lookup+1/compute"),
    "fused_sparse_dist": (3, 0, LATE, "", "embedding_lookup+1/lookup"),
    "fused_sparse_dist_after_optimizer": (3, 0, None, "", "embedding_lookup+1/lookup"),
    "prefetch": (3, 0, LATE, "prefetch+1/prefetch", ""),
    "semi_sync": (4, 1, LATE, "embedding_lookup+1/lookup input_splits_dist+3/data_dist", ""),
    "semi_sync_deferred": (5, 1, LATE, DEFERRED, ""),
    "async_lookup": (5, 2, LATE, "embedding_lookup+2/lookup input_splits_dist+4/data_dist", ""),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_from_a_table(name: str) -> None:
    mode = MODES[name]
    left, received = " ".join(str(mode.steps[index]) for index in mode.fills_backward_wait), mode.received_in_backward
    assert (mode.depth, mode.staleness, mode.dense_owned_lookup, left, str(received or "")) == DERIVED[name]
    assert (len(mode.evaluation.fills_backward_wait), mode.evaluation.received_in_backward) == (0, None)


# C copy, S splits dist, D data dist, P prefetch, L lookup, F forward, B backward, O optimizer step, by iteration.
# Below 0 is the fill, from 2 on the drain: four batches. Drawings are in tests/runtime/test_timelines.py.
ISSUES: dict[str, dict[int, str]] = {
    "base": {0: "C0 F0 B0 O0", 1: "C1 F1 B1 O1", 2: "C2 F2 B2 O2", 3: "C3 F3 B3 O3"},
    "sparse_dist": {
        -2: "C0",
        -1: "S0 C1 D0",
        0: "L0 S1 F0 C2 D1 B0 O0",
        1: "L1 S2 F1 C3 D2 B1 O1",
        2: "L2 S3 F2 D3 B2 O2",
        3: "L3 F3 B3 O3",
    },
    "fused_sparse_dist": {
        -2: "C0 S0",
        -1: "C1 S1 D0 L0",
        0: "C2 F0 S2 D1 B0 L1 O0",
        1: "C3 F1 S3 D2 B1 L2 O1",
        2: "F2 D3 B2 L3 O2",
        3: "F3 B3 O3",
    },
    "fused_sparse_dist_after_optimizer": {
        -2: "C0 S0",
        -1: "C1 S1 D0 L0",
        0: "C2 F0 S2 D1 B0 O0 L1",
        1: "C3 F1 S3 D2 B1 O1 L2",
        2: "F2 D3 B2 O2 L3",
        3: "F3 B3 O3",
    },
    "prefetch": {
        -2: "C0 S0",
        -1: "D0 C1 P0 S1 L0",
        0: "D1 F0 C2 P1 B0 S2 L1 O0",
        1: "D2 F1 C3 P2 B1 S3 L2 O1",
        2: "D3 F2 P3 B2 L3 O2",
        3: "F3 B3 O3",
    },
    "semi_sync": {
        -3: "C0 S0",
        -2: "C1 S1 D0",
        -1: "C2 L0 S2 D1",
        0: "F0 C3 L1 S3 B0 D2 O0",
        1: "F1 L2 B1 D3 O1",
        2: "F2 L3 B2 O2",
        3: "F3 B3 O3",
    },
    "semi_sync_deferred": {
        -3: "C0 S0",
        -2: "C1 D0 S1",
        -1: "C2 D1 L0 S2",
        0: "F0 C3 D2 L1 S3 B0 O0",
        1: "F1 D3 U0 L2 B1 O1",
        2: "F2 U1 L3 B2 O2",
        3: "F3 U2 B3 O3",
        4: "U3",
    },
    "async_lookup": {
        -4: "C0 S0",
        -3: "C1 S1 D0",
        -2: "C2 L0 S2 D1",
        -1: "C3 L1 S3 D2",
        0: "F0 L2 B0 D3 O0",
        1: "F1 L3 B1 O1",
        2: "F2 B2 O2",
        3: "F3 B3 O3",
    },
}


@pytest.mark.parametrize("name", ISSUES)
def test_fill_and_drain(name: str) -> None:
    assert issues(MODES[name], 4) == ISSUES[name]


def test_a_mode_goes_by_its_schedule_name(mode: Schedule) -> None:
    assert MODES[mode.name] is mode
    assert Mode(mode.name).schedule is mode  # type: ignore[arg-type]
    assert Mode(mode).schedule is mode


@pytest.mark.parametrize(("name", "stream"), STREAMS.items())
def test_a_stream_policy_goes_by_its_name(name: str, stream: StreamName) -> None:
    assert resolve_stream(name) is stream


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("semisync", "unknown pipeline 'semisync'. Did you mean 'semi_sync'"),
        ("fused_sparse", "unknown pipeline 'fused_sparse'. Did you mean 'fused_sparse_dist'"),
        ("qqq", f"unknown pipeline 'qqq'. Known: {', '.join(MODES)}, auto."),
    ],
)
def test_an_unknown_mode_lists_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Mode(name)  # type: ignore[arg-type]


def test_an_unknown_stream_lists_the_nearest() -> None:
    message = "unknown stream 'dedicate'. Did you mean 'dedicated'? Known: current, data_dist, dedicated."
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_stream("dedicate")


def test_a_mode_that_is_no_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"pipeline must be a name \(base, .*\), got 3"):
        Mode(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"stream must be a name \(current, .*\), got None"):
        resolve_stream(None)  # type: ignore[arg-type]


def test_modes_cannot_be_changed_in_place() -> None:
    with pytest.raises(TypeError):
        MODES["mine"] = MODES["base"]  # type: ignore[index]


def test_nothing_is_received_in_a_backward_before_it_is_sent() -> None:
    steps = "copy_batch_to_device+1/memcpy dense_forward+0/compute backward+0/compute optimizer_step+0/compute"
    sent = "input_splits_dist+1/data_dist input_data_dist+1/data_dist embedding_lookup+1/lookup"
    behind = Schedule.parse(f"behind: {steps} {sent}")
    assert (behind.received_in_backward, behind.staleness) == (None, 0)
    inside = Schedule.parse(f"inside: {steps.replace('dense', sent.replace('+1', '+0') + ' dense')}")
    assert inside.received_in_backward is None
