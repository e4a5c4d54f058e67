"""What the tests of the walker have in common: modules, and the modes that overlap."""

import pytest
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import EARLY_OWNERS, WeightOwner

from ..support.schedules import random_schedule

FUSED = WeightOwner.FUSED_BACKWARD
ONE_FUSED = {"ebc": frozenset({FUSED})}
ONE_MIXED = {"ebc": EARLY_OWNERS}

OVERLAPPING = {name: mode for name, mode in MODES.items() if mode.has_sparse_stages}
random_schedules = st.randoms(use_true_random=False).map(random_schedule)

TWO_AHEAD = Schedule.parse(
    "two_ahead: input_splits_dist+3/data_dist dense_forward+0/compute copy_batch_to_device+4/memcpy "
    "embedding_lookup+2/lookup input_data_dist+3/data_dist backward+0/compute optimizer_step+0/compute"
)

overlapping = pytest.mark.parametrize("schedule", OVERLAPPING.values(), ids=OVERLAPPING.keys())
