"""Run the Python of the README, the quickstart and the page on optimizers. Functions that ranks run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer

QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
ROOT = Path(__file__).resolve().parents[2]


def python_blocks(page: str) -> list[str]:
    """Return a page's Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run() -> tuple[int, bool]:
    """Run the page on optimizers with a module that has tables; return the number of steps, and whether rates moved."""
    names: dict[str, Any] = {"torch": torch, "datamodule": Batches(TABLE_WISE, 3)}
    first, *others = python_blocks("docs/optimizers.md")
    exec(first, names)
    module = names["module"] = _with_optimizers_of(names, fused_optimizer=False)
    for block in others:
        exec(block.replace("devices=2", f"devices=2, max_epochs=1, {QUIET}"), names)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    trainer.fit(_with_optimizers_of(names), datamodule=Batches(TABLE_WISE, 3))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return len(module.losses), rates == [1e-3 * 4 / 1000, 2.0 * 4 / 1000]


def _with_optimizers_of(names: dict[str, Any], **options: Any) -> Model:
    kind = type("OfTheReadme", (Model,), {"configure_optimizers": names["configure_optimizers"]})
    return kind(TABLE_WISE, **options)
