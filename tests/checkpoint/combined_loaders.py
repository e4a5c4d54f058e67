"""Fits on a `CombinedLoader`, resumed inside an epoch. Functions that ranks run."""

import warnings
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from ..support.cases import ROWWISE_ADAGRAD, Model
from ..support.fits import make_strategy, make_trainer
from .resumes import make_loader


class Combined(Model):
    def __init__(self) -> None:
        super().__init__(ROWWISE_ADAGRAD)
        self.seen: list[tuple[int | None, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(tuple(None if one is None else one.inputs["sparse"][1] for one in batch))
        return torch.stack([self(one) for one in batch if one is not None]).sum()


def seen_after(lengths: tuple[int, ...], mode: Any, path: str, stop: int) -> tuple[list[Any], list[Any]]:
    """Return the batches of a fit after `stop` batches, and those of a fit that resumes there."""
    whole, rest = Combined(), Combined()

    def save(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == stop:
            trainer.save_checkpoint(path)

    for model, load in ((whole, None), (rest, path)):
        rank = torch.distributed.get_rank()
        loaders = [make_loader("sized-0", ROWWISE_ADAGRAD, length, rank) for length in lengths]
        callbacks = [] if load else [LambdaCallback(on_train_batch_end=save)]
        trainer = make_trainer(make_strategy(model), callbacks=callbacks, max_epochs=2)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(model, CombinedLoader(loaders, mode), ckpt_path=load)
    return whole.seen[stop:], rest.seen
