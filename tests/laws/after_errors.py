"""Fits that fail on all ranks alike, and what comes after them in the same processes. Functions that ranks run."""

import gc
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import tbes

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import QUIET, make_trainer
from .faults import InjectedError

PLACES = ("training_step", "on_before_backward", "on_after_backward", "on_train_batch_end", "optimizer_step")


class Fails(Model):
    """Raises in a hook, in the middle of a fit."""

    def __init__(self, place: str) -> None:
        super().__init__(TABLE_WISE)
        hook = getattr(self, place)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.trainer.global_step >= 2:
                raise InjectedError(place)
            return hook(*args, **kwargs)

        setattr(self, place, faulty)


def left_over(pipeline: str) -> list[str]:
    """Return after failures in which hooks the module, the strategy, or the tables of the fit before are in memory.

    The tables of the newest one may be: they are in the graph of embeddings that may be under way.
    """
    left, weights = [], []
    for place in PLACES:
        module, strategy = Fails(place), OverlapEmbeddingStrategy(pipeline, sharding="table_wise")
        held = weakref.ref(module), weakref.ref(strategy)
        before = weights
        try:
            make_trainer(strategy).fit(module, datamodule=Batches(TABLE_WISE, 6))
        except InjectedError:
            weights = [weakref.ref(weight) for kernel in tbes(module.ebc) for weight in kernel.parameters()]
            assert weights
            del module, strategy
        gc.collect()
        left += [f"module: {place}"] if any(one() is not None for one in held) else []
        left += [f"tables before: {place}"] if any(one() is not None for one in before) else []
    return left


def fit_in_two_groups(ports: tuple[int, int], fails: bool) -> int:
    """Fit two modules with one Trainer, each in a default process group of its own; return the second one's losses."""
    strategy = OverlapEmbeddingStrategy(sharding="table_wise")
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, **QUIET)
    for number, port in enumerate(ports):
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
        module: Model = Fails("training_step") if fails and number == 0 else Model(TABLE_WISE)
        try:
            trainer.fit(module, datamodule=Batches(TABLE_WISE, 4))
        except InjectedError:
            continue
        trainer.fit_loop.max_epochs = 2
        dist.barrier()
    return len(module.losses)


def stays_open(trials: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """Return how many descriptors and threads are open after each trial: its mode, and the hook that fails."""
    numbers = []
    for pipeline, place in trials:
        module = Fails(place)
        trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding="table_wise"))
        try:
            trainer.fit(module, datamodule=Batches(TABLE_WISE, 4))
        except InjectedError:
            numbers.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        del module, trainer
    return numbers


def use_after_another_failed() -> tuple[list[str], int]:
    """Fit two modules, fail with a third; then read and fit the first again. Return what differs, and its losses."""
    modules = [Model(TABLE_WISE), Model(TABLE_WISE), Fails("on_train_batch_end")]
    trainers = [make_trainer(OverlapEmbeddingStrategy(sharding="table_wise")) for _ in modules]
    tables: list[Any] = []
    for module, trainer in zip(modules, trainers, strict=True):
        with suppress(InjectedError):
            trainer.fit(module, datamodule=Batches(TABLE_WISE, 4))
        tables.append(trainer.strategy.table("t0"))  # type: ignore[attr-defined]
    for _ in range(2):
        with suppress(InjectedError):
            strategy = OverlapEmbeddingStrategy(sharding="table_wise")
            make_trainer(strategy).fit(Fails("training_step"), datamodule=Batches(TABLE_WISE, 4))
    found = [
        f"table of {number}"
        for number, (trainer, table) in enumerate(zip(trainers, tables, strict=True))
        if not torch.equal(trainer.strategy.table("t0"), table)  # type: ignore[attr-defined]
    ]
    trainers[0].fit_loop.max_epochs = 2
    trainers[0].fit(modules[0], datamodule=Batches(TABLE_WISE, 4))
    return found, len(modules[0].losses)
