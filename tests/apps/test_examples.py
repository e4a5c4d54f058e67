"""The examples run as their READMEs say, on two CPU processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    ("story", "python", "number"),
    [
        ("existing_module", [sys.executable], r"loss after 400 steps: (?P<loss>0\.\d+)"),
        (
            "serve_beside_training",
            [sys.executable],
            r"step 300: validation AUC trained (?P<auc>0\.\d+), served (?P=auc): equal\nage of the served tables",
        ),
        ("torchrun", [*TORCHRUN, "--standalone", "--nproc-per-node", "2"], r"validation AUC: (?P<auc>0\.\d+)"),
    ],
    ids=["existing_module", "serve_beside_training", "torchrun"],
)
def test_an_example_learns(story: str, python: list[str], number: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / story / "train.py"
    assert f"examples/{story}/train.py" in (script.parent / "README.md").read_text(encoding="utf-8")
    done = subprocess.run(
        [*python, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(number, done.stdout)
    assert found, done.stdout
    values = {name: float(value) for name, value in found.groupdict().items()}
    assert values.get("loss", 0) < 0.6
    assert values.get("auc", 1) > 0.6
