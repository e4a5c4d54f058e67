"""The examples run as their READMEs say, on two CPU processes; test_pages.py runs the example of torchrun."""

import difflib
import re
import shutil
from pathlib import Path

import pytest

from .pages import ROOT, run_program

pytestmark = pytest.mark.slow

NUMBERS = {  # what an example prints at the end, and the least and the most that the number in it may be
    "existing_module": (r"loss after 200 steps: (0\.\d+)", 0, 0.6),
    "serve_beside_training": (
        r"step 150: validation AUC trained (0\.\d+), served \1: equal\nage of the served tables",
        *(0.6, 1),
    ),
    "sequence_model": (r"next items found after 400 steps: (0\.\d+)", 0.35, 0.5),
    "sasrec": (r"next item among the first 10 of 600 after 200 steps: (0\.\d+)", 0.6, 0.85),
}


@pytest.mark.parametrize("story", NUMBERS)
def test_an_example_learns(story: str, tmp_path: Path) -> None:
    number, least, most = NUMBERS[story]
    said = _run(story, "train.py", tmp_path)
    found = re.search(number, said)
    assert found, said
    assert least < float(found[1]) <= most


def _run(story: str, name: str, folder: Path, *arguments: str) -> str:
    script = ROOT / "examples" / story / name
    assert f"examples/{story}/{name}" in (script.parent / "README.md").read_text(encoding="utf-8")
    return run_program(folder, str(script), *arguments).stdout


def test_a_project_moves_over(tmp_path: Path) -> None:
    """Two lines change; it goes on from the old checkpoint; the plain module serves what was trained."""
    before, after = (
        (ROOT / "examples" / "move_over" / name).read_text(encoding="utf-8").splitlines()[4:]
        for name in ("before.py", "after.py")
    )
    new = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    lines = [line for line in new if not re.search("import|max_epochs|save_checkpoint", line)]
    assert len(lines) == 2, lines
    assert "_filter(self.named_parameters())" in lines[0]
    assert "strategy = OverlapEmbeddingStrategy(" in lines[1]

    said = _run("move_over", "before.py", tmp_path)
    said += _run("move_over", "after.py", tmp_path, "--resume", "before.ckpt")
    said += _run("move_over", "serve.py", tmp_path)
    found = re.search(r"epoch 1: test AUC (0\.\d+)\nepoch 2: test AUC (0\.\d+)\nserved: test AUC (0\.\d+)", said)
    assert found, said
    old, new_auc, served = map(float, found.groups())
    assert 0.6 < old < new_auc
    assert served == pytest.approx(new_auc, abs=2e-6)


def test_a_project_of_ones_own_trains_and_its_checkpoint_is_tested(tmp_path: Path) -> None:
    """Each rank trains its own half of the 20,000 rows, though the data module knows no ranks."""
    shutil.copytree(ROOT / "examples" / "own_project", tmp_path, dirs_exist_ok=True)
    run_program(tmp_path, "-m", "shop.make_visits", "visits")
    command = ("-m", "lightning_overlap.train", "--config-dir", "configs", "experiment=wide", "trainer.max_epochs=2")
    trained = run_program(tmp_path, *command).stdout
    assert re.search(r"^steps +158$", trained, flags=re.MULTILINE), trained  # 2 * ceil(20_000 / 2 / 128)
    auc = _test_auc(trained)
    assert auc > 0.7
    [last] = tmp_path.glob("outputs/*/*/logs/*/checkpoints/last.ckpt")
    tested = run_program(tmp_path, *command, f"ckpt_path={last}", "task=test", "trainer.devices=1").stdout
    assert _test_auc(tested) == auc


def _test_auc(said: str) -> float:
    return float(re.findall(r"test.auc +(0\.\d+)", said)[-1])
