"""`benchmarks/scale.py`: a rank of many, in one process, with TorchRec's pipeline and with ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def collectives(num_ranks: int) -> dict[str, int]:
    """Return how many collectives a step has by arm."""
    arms = ["torchrec", "torchrec/lightning", "lightning", "fused_sparse_dist"]
    sizes = ["--ranks", str(num_ranks), "--tables", "4", "--rounds", "1", "--steps", "3", "--arms", *arms]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scale.py"), *sizes],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ.copy(),
    )
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert [row[3] for row in rows[1:]] == arms
    column = rows[0].index("collectives")
    return {row[3]: int(row[column]) for row in rows[1:]}


@pytest.mark.slow
def test_the_collectives_of_a_step_do_not_grow_with_the_ranks() -> None:
    of_few, of_many = collectives(2), collectives(32)
    assert of_few == of_many
    assert of_few["fused_sparse_dist"] < of_few["torchrec"]


@pytest.mark.slow
def test_what_a_rank_gets_of_others_at_the_start_grows_as_their_number() -> None:
    sizes = ["--ranks", "8", "256", "--tables", "4", "--sharding", "table_wise"]
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scale_start.py"), *sizes], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in ran.stdout.splitlines() if line.startswith("| ")]
    few, many = rows[1:]
    assert few[7] == many[7], "as many gathers"
    assert int(many[8].split()[0]) <= 2 * 256 / 8 * int(few[8].split()[0])
