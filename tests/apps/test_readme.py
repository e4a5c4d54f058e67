"""The README and the first pages: their programs run as they stand, the table of modes is the code's."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from ..support import interpreters
from ..support.ranks import Ranks
from . import readme


@pytest.mark.slow
def test_programs_of_the_readme_and_the_quickstart_run(tmp_path: Path) -> None:
    blocks = [*readme.python_blocks("README.md"), *readme.python_blocks("docs/quickstart.md")]
    names = [block.splitlines()[0].removeprefix("# ") for block in blocks]
    assert names == ["clicks.py", "watched.py"]
    for name, block in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(block, encoding="utf-8")
        done = interpreters.run(
            [sys.executable, name],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(readme.ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        losses = [float(loss) for loss in re.findall(r"loss=(\d\.\d+)", done.stdout + done.stderr)]
        assert losses[0] > 0.68
        assert losses[-1] < 0.03
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert "Overlap: semi_sync" in done.stdout + done.stderr


def test_code_on_optimizers_runs(two_ranks: Ranks) -> None:
    assert len(readme.python_blocks("docs/optimizers.md")) == 5
    assert two_ranks.run(readme.run) == [(2, True), (2, True)]  # three batches, dealt out by Lightning's sampler


def test_tables_train_later(two_ranks: Ranks) -> None:
    assert two_ranks.run(readme.run_later) == [[False, False, False, True, True]] * 2


def test_table_of_modes_is_generated() -> None:
    """After a change of the modes: paste what `python docs/modes_table.py` prints."""
    script = runpy.run_path(str(readme.ROOT / "docs" / "modes_table.py"))
    assert script["modes_table"]() in (readme.ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
