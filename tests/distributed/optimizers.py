"""Learning rates that move: fits under a schedule, and the plain loops they have to equal. Functions that ranks run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer, sharded

from .cases import (
    MIXED,
    ROWWISE_ADAGRAD,
    SEQUENCE,
    TABLE_WISE,
    Batches,
    Case,
    Model,
    TableSpec,
    dense_optimizer,
    make_plan,
)
from .fits import make_trainer
from .reference import Result, collect

NUM_STEPS = 14
TWO_RATES = Case(
    "two_rates",
    (
        TableSpec("t0", ("f0",), lr=2.0),
        TableSpec("t1", ("f1",), lr=0.5),
        TableSpec("t2", ("f2",), lr=0.5, dim=16),
        TableSpec("u0", ("f1", "f2"), collection="second"),
        TableSpec("wide", ("w",), "column_wise", dim=16, lr=0.5),
        TableSpec("d0", ("f0",), "data_parallel"),
    ),
)
"""Several kernels in a module, two modules, three owners."""

CASES = (TABLE_WISE, ROWWISE_ADAGRAD, MIXED, SEQUENCE, TWO_RATES)


def factor(step: int) -> float:
    """The schedule: changes by a lot with every step."""
    return (1.0, 0.1, 2.5, 0.3, 0.0, 1.7, 0.05)[step % 7]


class Scheduled(Model):
    """One scheduler for the dense optimizer and the fused tables."""

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(case: Case, pipeline: str, **kwargs: Any) -> Result:
    """Train under a schedule."""
    model = Scheduled(case)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=make_plan(case, model, dist.get_world_size()))
    trainer = make_trainer(strategy, **kwargs)
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def fit_at_the_rate_of_the_lookup(case: Case, pipeline: str) -> Result:
    """The same with FBGEMM's own manner: the update takes the rate that the kernel had when it looked up."""
    with mock.patch.object(sharded, "_updates_at_present_rate", lambda module, set_rates: nullcontext(set_rates())):
        return fit(case, pipeline)
