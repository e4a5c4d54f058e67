"""Modules and data with and without the parts of an evaluation. Functions that a config names, or that ranks run."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_overlap.apps import train_worker

from ..support.cases import TABLE_WISE, Batches, Model

OF_MODULE, OF_DATA = ("validation_step", "test_step"), ("val_dataloader", "test_dataloader")
PARTS = (*OF_MODULE, *OF_DATA)


def _logs(name: str) -> Any:
    return lambda self, batch, batch_idx: self.log(name, torch.tensor(1.5))


def make_model(parts: list[str]) -> Model:
    steps = {"validation_step": _logs("val_loss"), "test_step": _logs("test_loss")}
    own = {name: step if name in parts else getattr(LightningModule, name) for name, step in steps.items()}
    made: Model = type("Ranker", (Model,), own)(TABLE_WISE)
    return made


def make_data(parts: list[str]) -> Batches:
    own = {name: lambda self: self.loader_of(range(1)) for name in OF_DATA if name in parts}
    made: Batches = type("Clicks", (Batches,), own)(TABLE_WISE, 3)
    return made


def train_with(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what a run prints, and its summary."""
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_worker.run(config, folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["modes"][-1]
    return said.getvalue(), summary
