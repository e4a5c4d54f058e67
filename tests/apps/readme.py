"""Run the Python of the README, the quickstart and the page on optimizers. Functions that ranks run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer

QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
ROOT = Path(__file__).resolve().parents[2]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run() -> tuple[int, bool]:
    """Run the page on optimizers with a module that has tables; return the number of steps, and whether rates moved."""
    names: dict[str, Any] = {"torch": torch, "datamodule": Batches(TABLE_WISE, 3)}
    first, *others = python_blocks("docs/optimizers.md")[:-1]
    exec(first, names)
    module = names["module"] = _with_optimizers_of(names, fused_optimizer=False)
    for block in others:
        exec(block.replace("devices=2", f"devices=2, max_epochs=1, {QUIET}"), names)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    trainer.fit(_with_optimizers_of(names), datamodule=Batches(TABLE_WISE, 3))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return len(module.losses), rates == [1e-3 * 4 / 1000, 2.0 * 4 / 1000]


def run_later() -> list[bool]:
    """Run the example of tables that train later; return after each step whether the tables have changed."""
    names: dict[str, Any] = {"torch": torch, "in_backward_optimizer_filter": in_backward_optimizer_filter}
    exec(python_blocks("docs/optimizers.md")[-1].replace("500", "3"), names)
    model = _with_optimizers_of(names)
    before = {name: bag.weight.detach().clone() for name, bag in model.ebc.embedding_bags.items()}
    changed: list[bool] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            weights = module.ebc.state_dict()
            shards = {name: weights[f"embedding_bags.{name}.weight"].local_shards() for name in before}
            changed.append(
                any(not torch.equal(part.tensor, before[name]) for name, own in shards.items() for part in own)
            )

    make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"), callbacks=[Looks()]).fit(
        model, datamodule=Batches(TABLE_WISE, 5)
    )
    return changed


def _with_optimizers_of(names: dict[str, Any], **options: Any) -> Model:
    kind = type("OfTheReadme", (Model,), {"configure_optimizers": names["configure_optimizers"]})
    return kind(TABLE_WISE, **options)
