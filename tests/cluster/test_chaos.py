"""Faults at drawn places lose nothing: a training that torchrun restarts has the losses of one without faults."""

import itertools
from pathlib import Path

import pytest

from . import chaos

# Their faults are of every kind at every place, those of saves also in every format.
SEEDS = (
    *(0, 2, 8, 14, 22, 42, 43, 100, 111, 201, 275, 334, 430, 586),
    *(607, 675, 681, 708, 750, 879, 985, 1831, 1961, 2288),
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_restarts_lose_nothing(tmp_path: Path) -> None:
    met = set()
    for trial, num_happened, found in chaos.run(SEEDS, tmp_path):
        assert found == [], trial
        met |= {(fault.place, fault.kind) for fault in trial.faults[:num_happened]}
    # A life that begins further on, as saves of threads have it, may not come to its fault.
    assert len(set(itertools.product(chaos.PLACES, chaos.KINDS)) - met) <= 2
