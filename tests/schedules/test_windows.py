"""The tables of a frozen window: what `frozen_window` makes of a mode, and what comes of it before the step."""

import pytest

from lightning_overlap.schedules.mode import Mode
from lightning_overlap.schedules.modes import MODES, frozen_window
from lightning_overlap.schedules.schedule import Schedule

# lookup    |                    L+1 |                            U0 L+1 |
# compute   |     F0         B0   O0 |     F0         B0       O0        |
#           | a batch in the window  | its last batch, with the step     |
TABLES = {
    "sparse_dist": (
        "embedding_lookup+0/compute input_splits_dist+1/data_dist dense_forward+0/compute"
        " copy_batch_to_device+2/memcpy input_data_dist+1/data_dist backward+0/compute optimizer_step+0/compute"
        " embedding_update+0/compute",
        "embedding_lookup+0/compute input_splits_dist+1/data_dist dense_forward+0/compute"
        " copy_batch_to_device+2/memcpy input_data_dist+1/data_dist backward+0/compute optimizer_step+0/compute",
    ),
    "fused_sparse_dist": (
        "copy_batch_to_device+3/memcpy dense_forward+0/compute input_splits_dist+3/data_dist"
        " input_data_dist+2/data_dist backward+0/compute optimizer_step+0/compute embedding_update+0/lookup"
        " embedding_lookup+1/lookup",
        "copy_batch_to_device+3/memcpy dense_forward+0/compute embedding_lookup+1/lookup"
        " input_splits_dist+3/data_dist input_data_dist+2/data_dist backward+0/compute optimizer_step+0/compute",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_a_window(name: str) -> None:
    last = frozen_window(MODES[name])
    within = last.accumulating
    assert within is not None
    assert (" ".join(map(str, last)), " ".join(map(str, within))) == TABLES[name]
    assert Mode(name, frozen_window=True).schedule == last  # type: ignore[arg-type]
    assert (last.staleness, last.depth) == (0, MODES[name].depth + (name != "sparse_dist"))


def test_a_lookup_whose_ids_come_late_stays_below_the_backward() -> None:
    """A table of one's own that sends ids of N+1 after the forward of N: the lookup would wait for them there."""
    steps = "copy_batch_to_device+1/memcpy dense_forward+0/compute input_splits_dist+1/data_dist"
    rest = "input_data_dist+1/data_dist backward+0/compute optimizer_step+0/compute"
    own = Schedule.parse(f"own: {steps} {rest} embedding_update+0/lookup embedding_lookup+1/lookup")
    assert own.holds_updates
    assert own.accumulating is not None
    assert " ".join(map(str, own.accumulating)) == f"{steps} {rest} embedding_lookup+1/lookup"
