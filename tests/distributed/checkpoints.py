"""Save, load, go on. Functions that ranks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy

from .cases import TABLE_WISE, Batches, Case, Model, make_plan
from .fits import make_trainer
from .reference import Result, collect

EPOCH = 6


def train(case: Case, pipeline: str, epochs: int, folder: str, resume: str | None = None) -> tuple[Result, str]:
    """Train `epochs` in all, from a checkpoint if given; return what there is at the end, and the last checkpoint."""
    model = Model(case)
    if resume is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # everything has to come from the checkpoint
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(case, model, dist.get_world_size()))
    kwargs: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": epochs}
    trainer = make_trainer(strategy, **kwargs)
    trainer.fit(model, datamodule=Batches(case, EPOCH), ckpt_path=resume)
    return collect(model, trainer.optimizers[0], model.losses), str(Path(saver.best_model_path))


def load_unsharded(case: Case, path: str) -> dict[str, torch.Tensor]:
    """Load a file into the plain module, as for serving."""
    model = Model.load_from_checkpoint(path, case=case, weights_only=False)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_to(path: str) -> str:
    """Train a little and save; return what the user reads if that is refused."""
    model = Model(TABLE_WISE)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
    try:
        trainer.save_checkpoint(path)
    except ValueError as err:
        return str(err)
    return "saved"


def saved_then_loaded_under(case: Case, first: str, second: str, folder: str) -> str:
    """Save under one sharding, load under another; return what the user reads."""
    for sharding, resume in ((first, None), (second, f"{folder}/a.ckpt")):
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=sharding), max_epochs=1 if resume is None else 2)
        model = Model(case)
        try:
            trainer.fit(model, datamodule=Batches(case, 2), ckpt_path=resume)
        except RuntimeError as err:
            return str(err)
        trainer.save_checkpoint(f"{folder}/a.ckpt")
    return "loaded"
