"""What tests of replicas begin with."""

from __future__ import annotations

import pytest

from .histories import MemorySink, Training


@pytest.fixture
def training() -> Training:
    made = Training(MemorySink(), seed=2)
    made.start(2, 1)
    made.train(2)
    made.cut()
    return made
