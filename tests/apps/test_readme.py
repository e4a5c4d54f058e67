"""The README and the first pages: their programs run as they stand, the table of modes is the code's."""

import re
import runpy
from pathlib import Path

import pytest

from .pages import ROOT, python_of, run_program


@pytest.mark.slow
def test_programs_of_the_readme_and_the_quickstart_run(tmp_path: Path) -> None:
    blocks = [*python_of("README.md"), *python_of("docs/quickstart.md")]
    names = [block.splitlines()[0].removeprefix("# ") for block in blocks]
    assert names == ["clicks.py", "watched.py"]
    for name, block in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(block, encoding="utf-8")
        done = run_program(tmp_path, name)
        losses = [float(loss) for loss in re.findall(r"loss=(\d\.\d+)", done.stdout + done.stderr)]
        assert losses[0] > 0.68
        assert losses[-1] < 0.03
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert "Overlap: semi_sync" in done.stdout + done.stderr


def test_table_of_modes_is_generated() -> None:
    """After a change of the modes: paste what `python docs/modes_table.py` prints."""
    script = runpy.run_path(str(ROOT / "docs" / "modes_table.py"))
    assert script["modes_table"]() in (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
