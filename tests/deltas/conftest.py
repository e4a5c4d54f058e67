"""What tests of replicas begin with."""

import pytest

from .histories import MemorySink, Training, begun


@pytest.fixture
def training() -> Training:
    return begun(MemorySink())
