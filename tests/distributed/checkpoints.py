"""Save, load, go on. Functions that ranks run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy

from .cases import ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model, make_batch, make_plan
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


class Stateful:
    """A loader that knows where it is, with a length or without."""

    def __init__(self, case: Case, num: int, rank: int) -> None:
        self.case, self.num, self.rank = case, num, rank
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.position = self.position % self.num, 0
        for index in range(start, self.num):
            self.position = index + 1
            yield make_batch(self.case, index, self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StatefulSized(Stateful):
    def __len__(self) -> int:
        return self.num


class StatefulBatches(Batches):
    """Batches from such a loader."""

    def __init__(self, case: Case, num: int, sized: bool) -> None:
        super().__init__(case, num)
        self.sized = sized

    def train_dataloader(self) -> Any:
        return (StatefulSized if self.sized else Stateful)(self.case, self.num_batches, self.trainer.global_rank)


def train_from(pipeline: str, sized: bool, save_at: int, folder: str, resume: str | None) -> tuple[Result, list[int]]:
    """Train two epochs, saving after step `save_at`; or go on from there. Return the end, and the batches seen."""
    model = Model(ROWWISE_ADAGRAD)
    seen: list[int] = []
    model.on_train_batch_start = lambda batch, batch_idx: seen.append(batch.inputs["sparse"][1])  # type: ignore
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1)
    plan = make_plan(ROWWISE_ADAGRAD, model, dist.get_world_size())
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=plan)
    kwargs: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 2}
    trainer = make_trainer(strategy, **kwargs)
    trainer.fit(model, datamodule=StatefulBatches(ROWWISE_ADAGRAD, 8, sized), ckpt_path=resume)
    return collect(model, trainer.optimizers[0], model.losses), seen
