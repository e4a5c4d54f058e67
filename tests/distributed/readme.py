"""Run the README's Python as it stands. Functions that ranks run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .cases import TABLE_WISE, Batches, Model

QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks() -> list[str]:
    """Return the README's Python."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run() -> int:
    """Run all of it with a module that has tables; return the number of steps trained."""
    module = Model(TABLE_WISE, fused_optimizer=False)
    names = {"torch": torch, "module": module, "datamodule": Batches(TABLE_WISE, 3)}
    for block in python_blocks():
        exec(block.replace("devices=2", f"devices=2, max_epochs=1, {QUIET}"), names)
    return len(module.losses)
