"""Once tables are sharded, nothing in the process holds the whole weights that they were made with."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks

ADAGRAD: Any = (torch.optim.Adagrad, {"lr": 1.0})


class OnArrays(Model):
    """Has its tables in arrays, whose end shows when their memory is given back."""

    def __init__(self, way: str) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=False)
        self.arrays, self.num_in_fit = list[weakref.ref[Any]](), -1
        for bag in self.ebc.embedding_bags.values():
            array = bag.weight.detach().numpy().copy()
            self.arrays.append(weakref.ref(array))
            bag.weight = nn.Parameter(torch.from_numpy(array))
        if way == "applied":
            _apply_optimizer_in_backward(ADAGRAD[0], self.ebc.parameters(), ADAGRAD[1])

    @property
    def num_held(self) -> int:
        return sum(array() is not None for array in self.arrays)

    def on_train_start(self) -> None:
        self.num_in_fit = self.num_held


def held(way: str, sharding: str) -> tuple[int, int]:
    """Return how many whole tables are left in a fit, and after it."""
    model = OnArrays(way)
    fused = None if way == "applied" or sharding == "data_parallel" else ADAGRAD
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=fused)
    gc.disable()
    try:
        make_trainer(strategy).fit(model, datamodule=Batches(TABLE_WISE, 2))
        return model.num_in_fit, model.num_held
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("way", "sharding"),
    [
        ("given", "table_wise"),
        ("applied", "table_wise"),
        ("applied", "column_wise"),
        ("given", "data_parallel"),
    ],
)
def test_nothing_holds_them(two_ranks: Ranks, way: str, sharding: str) -> None:
    assert two_ranks.run(held, way, sharding) == [(0, 0), (0, 0)]
