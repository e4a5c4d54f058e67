"""A save within a step is refused where the checkpoint would have a part of what the step changes, and nowhere else."""

import itertools
from pathlib import Path

import pytest

from ..support.ranks import Ranks
from . import mid_step
from .mid_step import BUFFERS, PLACES, REFUSED


@pytest.mark.parametrize(("place", "buffers"), [*itertools.product(PLACES, BUFFERS)])
def test_a_save_is_whole_or_refused(two_ranks: Ranks, tmp_path: Path, place: str, buffers: str) -> None:
    for said, is_same in two_ranks.run(mid_step.resumed, place, buffers, str(tmp_path)):
        if (place, buffers) in REFUSED:
            assert "buffers, such as statistics of BatchNorm, have been updated" in said
        else:
            assert said == ""
            assert is_same
