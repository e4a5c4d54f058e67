"""After an error the processes go on: nothing of the failed fit stays in memory, and a Trainer may be used again."""

import pytest

from lightning_overlap import MODES

from ..support.ranks import Ranks, free_port
from . import after_errors


@pytest.mark.parametrize("pipeline", MODES)
def test_a_failed_fit_is_freed(two_ranks: Ranks, pipeline: str) -> None:
    """Its tables may be most of the memory. Python frees no cycles that go through autograd."""
    assert two_ranks.run(after_errors.left_over, pipeline) == [[], []]


@pytest.mark.parametrize("fails", [True, False])
def test_a_trainer_fits_again_in_a_new_process_group(two_ranks: Ranks, fails: bool) -> None:
    try:
        assert two_ranks.run(after_errors.fit_in_two_groups, (free_port(), free_port()), fails) == [4, 4]
    finally:
        two_ranks.close()  # their default group is another one
