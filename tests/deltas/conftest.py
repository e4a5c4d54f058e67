"""What tests of replicas begin with."""

from __future__ import annotations

import pytest

from .histories import MemorySink, Training, begun


@pytest.fixture
def training() -> Training:
    return begun(MemorySink())
