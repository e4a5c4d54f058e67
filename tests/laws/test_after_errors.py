"""After an error the processes go on: nothing of the failed fit stays in memory, and a Trainer may be used again."""

import pytest

from lightning_overlap import MODES

from ..support.pairs import in_turn
from ..support.ranks import Ranks, free_port
from . import after_errors


@pytest.mark.parametrize("pipeline", MODES)
def test_a_failed_fit_is_freed(two_ranks: Ranks, pipeline: str) -> None:
    """Its tables may be most of the memory. Python frees no cycles that go through autograd."""
    assert two_ranks.run(after_errors.left_over, pipeline) == [[], []]


def test_trials_that_fail_leave_as_many_descriptors_and_threads(ranks: Ranks) -> None:
    """In every mode, by errors in several hooks."""
    trials = in_turn([*MODES, *MODES], after_errors.PLACES)
    for numbers in ranks.run(after_errors.stays_open, trials):
        assert len(numbers) == len(trials)
        half = len(numbers) // 2
        for kind, (warm, later) in enumerate([(numbers[4:half], numbers[half:])] * 2):
            # The groups of one fit have 20 descriptors and 12 threads.
            assert max(one[kind] for one in later) <= max(one[kind] for one in warm) + 3, numbers


def test_what_was_trained_before_a_failure_goes_on(two_ranks: Ranks) -> None:
    """Its Trainer reads tables and fits, though the groups of that time have ended with the failed fit."""
    assert two_ranks.run(after_errors.use_after_another_failed) == [([], 8)] * 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_trainer_fits_again_in_a_new_process_group(two_ranks: Ranks, fails: bool) -> None:
    try:
        assert two_ranks.run(after_errors.fit_in_two_groups, (free_port(), free_port()), fails) == [4, 4]
    finally:
        two_ranks.close()  # their default group is another one
