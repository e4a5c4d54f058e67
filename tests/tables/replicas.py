"""Fits with replicated tables, and what they are compared with. Functions that ranks run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import Batches, Case, Model, TableSpec
from ..support.fits import make_trainer
from ..support.reference import Delayed, Result, collect, train, train_delayed

SMALL = ("s0", "s1", "s2")
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-6}),
    "rowwise": (RowWiseAdagrad, {"lr": 1.0}),
}


def case_of(optimizer: str, **kwargs: Any) -> Case:
    """Two tables that are sharded, and three of two widths that the strategy replicates."""
    tables = (
        TableSpec("t0", ("f0",)),
        TableSpec("s0", ("f1",)),
        TableSpec("s1", ("f2", "f3"), dim=4),
        TableSpec("t1", ("f3",)),
        TableSpec("s2", ("f4",), dim=4),
    )
    return Case(optimizer, tables, optimizer=OPTIMIZERS[optimizer], **kwargs)


def strategy_of(pipeline: str, replicated: Any = SMALL, **options: Any) -> OverlapEmbeddingStrategy:
    sharding = {"t0": "table_wise", "t1": "table_wise"}
    return OverlapEmbeddingStrategy(pipeline, sharding=sharding, replicate_tables=replicated, **options)


def fit(case: Case, pipeline: str, options: dict[str, Any] | None = None, **kwargs: Any) -> Result:
    model = Model(case)
    trainer = make_trainer(strategy_of(pipeline, **(options or {})), **kwargs)
    trainer.fit(model, datamodule=Batches(case))
    return collect(model, trainer.optimizers[0], model.losses)


def reference(case: Case, staleness: int = 0) -> Result:
    """The hand-written loop with every table sharded; under a staleness, small ones are looked up in their turn."""
    if not staleness:
        return train(case)
    tables = tuple(dataclasses.replace(t, collection="ebc_dp") if t.name in SMALL else t for t in case.tables)
    return train_delayed(dataclasses.replace(case, tables=tables), Delayed(staleness))
