"""The README: its code runs, its table is the code's."""

from __future__ import annotations

import runpy

from ..support.ranks import Ranks
from . import readme


def test_code_runs(two_ranks: Ranks) -> None:
    assert len(readme.python_blocks()) == 5
    assert two_ranks.run(readme.run) == [(2, True), (2, True)]  # three batches, dealt out by Lightning's sampler


def test_table_of_modes_is_generated() -> None:
    """After a change of the modes: paste what `python docs/modes_table.py` prints."""
    script = runpy.run_path(str(readme.README.parent / "docs" / "modes_table.py"))
    assert script["modes_table"]() in readme.README.read_text()
