"""The runner of Lightning's own tests tells what passes with DDPStrategy only from all else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_overlap

RUNNER = Path(lightning_overlap.__file__).resolve().parents[1] / "benchmarks" / "lightning_suite.py"

CHECKOUT = """
import pytest
from lightning.pytorch import Trainer


def strategy(**kwargs):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **kwargs)
    return type(trainer.strategy).__name__


def test_both():
    assert strategy().endswith("Strategy")


def test_ddp_only():
    assert strategy(strategy="ddp_notebook_find_unused_parameters_true") == "DDPStrategy"


def test_ours_only():
    assert strategy() == "OverlapEmbeddingStrategy"


def test_in_teardown(request):
    request.addfinalizer(lambda: strategy() == "DDPStrategy" or pytest.fail("in the teardown"))
"""


@pytest.mark.slow
def test_the_arms_are_compared_test_by_test(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_fake.py").write_text(CHECKOUT, encoding="utf-8")
    (folder / "test_cannot_be_imported.py").write_text("import a_package_that_is_not_there", encoding="utf-8")
    arguments = ["--lightning", str(tmp_path), "--json", str(tmp_path / "results.json"), "--jobs", "2"]
    ran = subprocess.run(
        [sys.executable, str(RUNNER), *arguments, "--together"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1, ran.stderr
    found = [line.partition("::")[2] for line in ran.stdout.splitlines() if line.startswith("FINDING: ")]
    assert found == ["test_ddp_only", "test_in_teardown"]
    counts = dict(line.rsplit(maxsplit=1) for line in ran.stdout.splitlines() if line.startswith("  "))
    assert {kind.strip(): int(num) for kind, num in counts.items() if num.isdigit()} == {
        "passed in both": 1,
        "failed in both": 1,  # the file that cannot be imported
        "skipped in both": 0,
        "only with ours": 1,
        "expected": 0,
        "findings": 2,
    }
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["overlap"]["tests_pytorch/test_fake.py::test_in_teardown"]["error"] == "Failed: in the teardown"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["results.json", "tests"]
