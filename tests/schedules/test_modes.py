"""What is derived from each mode's table; and the words for an unknown name."""

import re
from typing import Any, get_args, get_type_hints

import pytest

from lightning_overlap.schedules import mode as of_modes
from lightning_overlap.schedules.mode import Mode, resolve_stream
from lightning_overlap.schedules.modes import MODES, STREAMS, ModeName, StreamPolicy
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName

LETTERS = dict(zip(Stage, "CSDPLFBWOU", strict=True))
LATE = Step(Stage.EMBEDDING_LOOKUP, 1, StreamName.LOOKUP)
DEFERRED = "embedding_update-1/lookup embedding_lookup+1/lookup input_splits_dist+3/data_dist"

# What an iteration issues, with offsets: C copy, S splits dist, D data dist, P prefetch, L lookup, F forward,
# B backward, O optimizer step, U update. Depth, staleness, lookup of tables of the dense optimizer; what may be done
# where the backward waits.
DERIVED: dict[str, tuple[str, int, int, Step | None, str]] = {
    "base": ("C0 F0 B0 O0", 1, 0, None, ""),
    "sparse_dist": ("L0 S1 F0 C2 D1 B0 O0", 3, 0, None, ""),
    "fused_sparse_dist": ("C2 F0 S2 D1 B0 L1 O0", 3, 0, LATE, ""),
    "fused_sparse_dist_after_optimizer": ("C2 F0 S2 D1 B0 O0 L1", 3, 0, None, ""),
    "prefetch": ("D1 F0 C2 P1 B0 S2 L1 O0", 3, 0, LATE, "prefetch+1/prefetch"),
    "semi_sync": ("F0 C3 L1 S3 B0 D2 O0", 4, 1, LATE, "embedding_lookup+1/lookup input_splits_dist+3/data_dist"),
    "semi_sync_deferred": ("F0 C3 D2 U-1 L1 S3 B0 O0", 5, 1, LATE, DEFERRED),
    "async_lookup": ("F0 C4 L2 S4 B0 D3 O0", 5, 2, LATE, "embedding_lookup+2/lookup input_splits_dist+4/data_dist"),
}


def issued(schedule: Schedule) -> str:
    return " ".join(f"{LETTERS[step.stage]}{step.offset}" for step in schedule)


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_from_a_table(name: str) -> None:
    mode = MODES[name]
    left = " ".join(str(mode.steps[index]) for index in mode.rows_in_backward_wait)
    assert (issued(mode), mode.depth, mode.staleness, mode.dense_owned_lookup, left) == DERIVED[name]
    assert len(mode.evaluation.rows_in_backward_wait) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("semisync", "unknown pipeline 'semisync'. Did you mean 'semi_sync'"),
        ("qqq", f"unknown pipeline 'qqq'. Known: {', '.join(MODES)}, auto."),
        (3, "pipeline must be a name (base, "),
    ],
)
def test_an_unknown_mode_lists_the_nearest(name: Any, message: str) -> None:
    with pytest.raises(TypeError if name == 3 else ValueError, match=re.escape(message)):
        Mode(name)


def test_a_stream_policy_goes_by_its_name() -> None:
    assert {name: resolve_stream(name) for name in STREAMS} == STREAMS
    message = "unknown stream 'dedicate'. Did you mean 'dedicated'? Known: current, data_dist, dedicated."
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_stream("dedicate")
    with pytest.raises(TypeError, match=r"stream must be a name \(current, .*\), got None"):
        resolve_stream(None)  # type: ignore[arg-type]


def test_editors_know_all_names_and_nobody_changes_the_modes() -> None:
    """An editor takes the class of a mode from its decorator: with `Any` it would know no option."""
    assert set(get_args(ModeName)) == {*MODES, "auto"}
    assert set(get_args(StreamPolicy)) == set(STREAMS)
    assert get_type_hints(of_modes._names_unknown_options)["return"] == type[of_modes._T]
    with pytest.raises(TypeError):
        MODES["mine"] = MODES["base"]  # type: ignore[index]
