"""The runner of Lightning's own tests tells what passes with DDPStrategy only from all else."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_overlap

from ..support import interpreters

RUNNER = Path(lightning_overlap.__file__).resolve().parents[1] / "benchmarks" / "lightning_suite.py"

CHECKOUT = """
import time

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy


def strategy(**kwargs):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **kwargs)
    return type(trainer.strategy).__name__


def test_both():
    assert strategy().endswith("Strategy")


def test_neither():
    assert strategy() == "SingleDeviceStrategy", "not chosen in any arm"


@pytest.mark.parametrize("name", ["auto", "ddp_notebook_find_unused_parameters_true"])
def test_ddp_only(name):
    assert strategy(strategy=name) == "DDPStrategy"


def test_ours_only():
    assert strategy() == "OverlapEmbeddingStrategy"


def test_its_own_object():
    assert strategy(strategy=DDPStrategy()) == "DDPStrategy"


def test_skipped():
    pytest.skip("in both")


def test_in_teardown(request):
    request.addfinalizer(lambda: strategy() == "DDPStrategy" or pytest.fail("in the teardown"))


def test_hangs():
    time.sleep(60)
"""


@pytest.mark.slow
def test_the_arms_are_compared_test_by_test(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_fake.py").write_text(textwrap.dedent(CHECKOUT), encoding="utf-8")
    (folder / "test_cannot_be_imported.py").write_text("import a_package_that_is_not_there", encoding="utf-8")
    arguments = ["--lightning", str(tmp_path), "--json", str(tmp_path / "results.json"), "--jobs", "2"]
    ran = interpreters.run(
        [sys.executable, str(RUNNER), *arguments, "--together", "--test-timeout", "5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 1, ran.stderr
    found = [line.partition("::")[2] for line in ran.stdout.splitlines() if line.startswith("FINDING: ")]
    names = ("auto", "ddp_notebook_find_unused_parameters_true")
    assert found == [*(f"test_ddp_only[{name}]" for name in names), "test_in_teardown"]
    counts = dict(line.rsplit(maxsplit=1) for line in ran.stdout.splitlines() if line.startswith("  "))
    assert {kind.strip(): int(num) for kind, num in counts.items() if num.isdigit()} == {
        "passed in both": 2,
        "failed in both": 3,  # test_neither, test_hangs, and the file that cannot be imported
        "skipped in both": 1,
        "only with ours": 1,
        "expected": 0,
        "findings": 3,
    }
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["overlap"]["tests_pytorch/test_fake.py::test_in_teardown"]["error"] == "Failed: in the teardown"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["results.json", "tests"]
