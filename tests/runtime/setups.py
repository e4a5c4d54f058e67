"""What the tests of the executor have in common: modules, and the modes that overlap."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.stages import EARLY_OWNERS, WeightOwner
from lightning_overlap.testing import random_schedule

FUSED, DENSE = WeightOwner.FUSED_BACKWARD, WeightOwner.DENSE_OPTIMIZER
ONE_FUSED = {"ebc": frozenset({FUSED})}
ONE_MIXED = {"ebc": EARLY_OWNERS}

OVERLAPPING = {name: mode for name, mode in MODES.items() if mode.has_sparse_stages}
random_schedules = st.randoms(use_true_random=False).map(random_schedule)

overlapping = pytest.mark.parametrize("schedule", OVERLAPPING.values(), ids=OVERLAPPING.keys())
