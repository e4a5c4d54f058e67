"""Inputs whose features stand in another order in some batches, and beside others. Functions that ranks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from ..support.fits import make_trainer
from .supported_modules import (
    CASES,
    NUM_STEPS,
    Batch,
    Batches,
    KindModel,
    Outcome,
    collect,
    make_batch,
    make_plan,
    watched_strategy,
)


def elsewhere(kjt: KeyedJaggedTensor, index: int) -> KeyedJaggedTensor:
    """Return the same features in another place, from the second batch on; in every third one, beside another one."""
    keys = list(kjt.keys())
    places = list(range(len(keys)))[:: -1 if index % 2 else 1]
    moved = kjt.permute([*places, 0] if index % 3 == 2 else places)
    if index % 3 == 2:
        moved._keys[-1] = "of_no_table"
    inverse = kjt.inverse_indices_or_none()
    if inverse is not None:
        moved._inverse_indices = ([keys[place] for place in places], inverse[1][places])
    return moved


class _Elsewhere(Batches):
    def _loader(self, indices: range) -> DataLoader[Any]:
        batches = [make_batch(self.case, index, self.trainer.global_rank) for index in indices]
        moved = [Batch(one.dense, elsewhere(one.kjt, index), one.labels) for index, one in enumerate(batches)]
        return DataLoader(moved, batch_size=None)  # type: ignore[arg-type]


def fit(name: str, pipeline: str) -> Outcome:
    """Train under the strategy."""
    case, module = CASES[name], KindModel(name)
    strategy, early = watched_strategy(pipeline, make_plan(case, module))
    trainer = make_trainer(strategy, limit_val_batches=0)
    trainer.fit(module, datamodule=_Elsewhere(case, NUM_STEPS))
    return Outcome(torch.stack(module.losses), collect(module, trainer.optimizers[0]), sum(early))


def validate_between(name: str, pipeline: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what validations in the middle of a fit answer, of inputs in the order of training and elsewhere."""
    answers = []
    for data in (Batches, _Elsewhere):
        case, module = CASES[name], KindModel(name)
        strategy, _ = watched_strategy(pipeline, make_plan(case, module))
        trainer = make_trainer(strategy, num_sanity_val_steps=0, val_check_interval=4)
        validation = data(case, NUM_STEPS)
        validation.trainer = trainer
        trainer.fit(
            module,
            DataLoader([make_batch(case, i, trainer.global_rank) for i in range(4)], batch_size=None),
            validation.val_dataloader(),
        )
        answers.append(module.validated)
    return answers[0], answers[1]


def lacks_one(name: str) -> str:
    """Return the error of a batch that lacks a feature."""
    case, module = CASES[name], KindModel(name)
    batches = [make_batch(case, index, 0) for index in range(4)]
    batches[2].kjt = batches[2].kjt.permute([0, 2])
    strategy, _ = watched_strategy("fused_sparse_dist", make_plan(case, module))
    trainer = make_trainer(strategy)
    try:
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    except ValueError as err:
        return str(err)
    return "no error"
