"""The loss that every launcher's training has to end with."""

import pytest

from ..support.ranks import Ranks
from .launchers import undisturbed


@pytest.fixture
def loss(two_ranks: Ranks) -> str:
    first, second = two_ranks.run_once(undisturbed)
    assert (bool(first), second) == (True, "")
    return str(first)
