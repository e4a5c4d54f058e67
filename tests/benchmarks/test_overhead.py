"""`benchmarks/overhead.py`: the walker alone runs with sparse stages that do nothing."""

import runpy
from pathlib import Path

import pytest

OVERHEAD = Path(__file__).resolve().parents[2] / "benchmarks" / "overhead.py"


def test_the_walker_alone_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(OVERHEAD))["_measure_walker"](20)
    assert "fused_sparse_dist" in capsys.readouterr().out
