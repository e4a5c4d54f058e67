"""A fit that resumes may train other tables than the one before."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.ranks import Ranks
from . import frozen_resumes


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumes_that_freeze_and_unfreeze_train_as_torch_does(
    get_ranks: Callable[..., Ranks], tmp_path: Path, num_ranks: int
) -> None:
    """In every format, with and without a combined optimizer: states of what was trained, rates of what was not."""
    chains = list(frozen_resumes.drawn(12, seed=num_ranks))
    for found in get_ranks(num_ranks).run(frozen_resumes.differences, chains, str(tmp_path), timeout_s=300):
        assert found == {case: [] for case in found}
        assert len(found) == len(chains)
