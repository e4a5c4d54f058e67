"""Faults at drawn places lose nothing: a training that torchrun restarts has the losses of one without faults."""

from pathlib import Path

import pytest

from . import chaos


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_restarts_lose_nothing(tmp_path: Path) -> None:
    num_faults = 0
    for trial, happened, found in chaos.run(range(30), tmp_path):
        assert found == [], trial
        num_faults += happened
    assert num_faults >= 30
