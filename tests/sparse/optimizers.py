"""Learning rates that move: fits under a schedule, and the plain loops they have to equal. Functions that ranks run."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.sparse import lookup
from lightning_overlap.tables import sharded_module
from lightning_overlap.tables.combined_optimizer import DenseAndFused
from lightning_overlap.tables.sharded_module import fused_optimizers

from ..checkpoint.checkpoints import build_plan, planned
from ..checkpoint.resumes import StatefulBatches
from ..plugin.strategies import Dense
from ..support.cases import (
    MIXED,
    ROWWISE_ADAGRAD,
    SEQUENCE,
    TABLE_WISE,
    Batch,
    Batches,
    ByHand,
    Case,
    Model,
    TableSpec,
    dense_optimizer,
    make_plan,
)
from ..support.fits import make_trainer
from ..support.reference import Result, collect
from .variants import Variant

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
        scheduler = lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(case: Case, pipeline: str, *, stream: str = "data_dist", device_type: str = "cpu", **kwargs: Any) -> Result:
    """Train under a schedule."""
    model = Scheduled(case)
    plan = make_plan(case, model, dist.get_world_size(), device_type)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, stream=stream, sharding=plan)
    trainer = make_trainer(strategy, device_type, **kwargs)
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def fit_beside_a_dense_kernel(pipeline: str) -> Tensor:
    """Train a fused table of the same sharding as one of a dense kernel; return the losses."""
    case = planned(TABLE_WISE, "dense 0 0")
    model = Scheduled(case)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=build_plan(case, model, "dense 0 0"))
    make_trainer(strategy).fit(model, datamodule=Batches(case, NUM_STEPS))
    return torch.stack(model.losses)


def fit_at_the_rate_of_the_lookup(case: Case, pipeline: str) -> Result:
    """The same with FBGEMM's own manner: the update takes the rate that the kernel had when it looked up."""
    with mock.patch.object(lookup, "_updates_at_present_rate", lambda module, set_rates: nullcontext(set_rates())):
        return fit(case, pipeline)


class Manual(ByHand, Scheduled):
    """Steps its optimizer and its schedule by hand."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()


class TwoBackwards(Manual):
    """Goes backward twice through the same embeddings, as two losses do: two updates at this step's rate."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = Model.training_step(self, batch, batch_idx)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        optimizer.step()
        self.lr_schedulers().step()


class TwoDense(Manual):
    """Two dense optimizers, one of them combined; the second one steps with every other batch."""

    def configure_optimizers(self) -> Any:
        bottom, top = torch.optim.SGD(self.bottom.parameters(), 0.2), torch.optim.Adam(self.top.parameters(), 0.02)
        combined = combined_optimizer(self, bottom)
        return [combined, top], [lr_scheduler.LambdaLR(combined, factor)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        bottom, top = self.optimizers()
        loss = Model.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in (bottom, top) if batch_idx % 2 else (bottom,):
            optimizer.step()
            optimizer.zero_grad()
        self.lr_schedulers().step()


class SeveralGroups(Scheduled):
    """Dense parameter groups with settings of their own, and a rate that a plain number schedules."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [*self.bottom.parameters()], "lr": 0.3}, {"params": [*self.top.parameters()]}]
        optimizer = combined_optimizer(self, torch.optim.AdamW(groups, 0.02, weight_decay=0.1))
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


class TwoClosures(Scheduled):
    """Evaluates its closure twice in a step, so that what was looked up in between are dropped."""

    def configure_optimizers(self) -> Any:
        class Twice(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                closure()
                return super().step(closure)

        optimizer = combined_optimizer(self, Twice([*self.bottom.parameters(), *self.top.parameters()], 0.1))
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


class LBFGS(Scheduled):
    """A dense optimizer that calls its closure several times and takes no parameter groups."""

    def configure_optimizers(self) -> Any:
        dense = torch.optim.LBFGS([*self.bottom.parameters(), *self.top.parameters()], 0.1, max_iter=3)
        optimizer = combined_optimizer(self, dense)
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


class Unscheduled(Scheduled):
    """Combined, but nobody moves a rate."""

    def configure_optimizers(self) -> Any:
        return combined_optimizer(self, dense_optimizer(self))


class Plateau(Scheduled):
    """Lowers the rates when the loss of an epoch does not fall by much."""

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


MODELS: dict[str, type[Scheduled]] = {
    cls.__name__: cls
    for cls in (
        Scheduled,
        Manual,
        TwoBackwards,
        TwoDense,
        SeveralGroups,
        TwoClosures,
        LBFGS,
        Unscheduled,
        Plateau,
    )
}


OWN_OPTIMIZERS = ("Manual", "TwoDense", "SeveralGroups", "TwoClosures", "LBFGS")
"""These leave data-parallel tables to nobody (or toggle requires_grad, which a view of a kernel cannot take)."""


@dataclass
class Report:
    """What a fit showed on one rank."""

    losses: Tensor
    tables: dict[str, Tensor]
    rates: list[list[float]]
    """Of all groups, at the end of each batch."""


def run(model: str, pipeline: str, case: Case | None = None, **trainer_kwargs: Any) -> Report:
    """Train one of `MODELS`."""
    case = case or (TABLE_WISE if model in OWN_OPTIMIZERS else MIXED)
    module = MODELS[model](case)
    rates: list[list[float]] = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            rates.append([float(g["lr"]) for optimizer in trainer.optimizers for g in optimizer.param_groups])

    plan = make_plan(case, module, dist.get_world_size())
    trainer = make_trainer(
        OverlapEmbeddingStrategy(pipeline=pipeline, sharding=plan),
        callbacks=[Notes()],
        **{"limit_val_batches": 0, **trainer_kwargs},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=Variant(case, "dataclass", NUM_STEPS))
    return Report(torch.stack(module.losses), collect_tables(module), rates)


def collect_tables(module: Model) -> dict[str, Tensor]:
    """Return this rank's shards."""
    unused = torch.optim.SGD([torch.zeros(1)])
    return collect(module, unused, module.losses).tables


# -- the optimizer itself, and a run that goes on ---------------------------------------------------------------------


def monitor(folder: str) -> dict[str, list[float]]:
    """Return the columns that LearningRateMonitor logs."""
    model = Scheduled(TWO_RATES)
    plan = make_plan(TWO_RATES, model, dist.get_world_size())
    logger = CSVLogger(folder)
    watch = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    kwargs: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "callbacks": [watch]}
    make_trainer(OverlapEmbeddingStrategy(sharding=plan), **kwargs).fit(model, datamodule=Batches(TWO_RATES, 5))
    return {name: values for name, values in watch.lrs.items() if not name.startswith("step")}


def state_dict(sharding: str) -> dict[str, Any]:
    """Return the combined optimizer's state dict after three steps."""
    model = Scheduled(ROWWISE_ADAGRAD)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=sharding))
    trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 3))
    return trainer.optimizers[0].state_dict()


def hyperparameters(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a state dict's groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]


def train_from(pipeline: str, folder: str, resume: str | None) -> tuple[Result, list[float]]:
    """Train two epochs under a schedule, saving after step 4; or go on from there.

    Returns:
        The end, and the kernels' rates in each update.
    """
    rates: list[float] = []
    model = notes_rates(Scheduled, rates)(ROWWISE_ADAGRAD)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    plan = make_plan(ROWWISE_ADAGRAD, model, dist.get_world_size())
    kwargs: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 2}
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline=pipeline, sharding=plan), **kwargs)
    trainer.fit(model, datamodule=StatefulBatches("own-sized", 6), ckpt_path=resume)
    return collect(model, trainer.optimizers[0], model.losses), rates


def notes_rates(cls: type[Scheduled], rates: list[float]) -> type[Scheduled]:
    """Return a class of module that notes the rate of its first kernel after each backward."""

    class Notes(cls):  # type: ignore[valid-type,misc]
        def on_after_backward(self) -> None:
            rates.append(fused_optimizers(self.ebc)[0].param_groups[0]["lr"])

    return Notes


def fit_again() -> list[list[float]]:
    """Fit a module twice; return the fused rates that each schedule began and ended with."""
    model = Scheduled(TABLE_WISE)
    plan = make_plan(TABLE_WISE, model, dist.get_world_size())
    seen = []
    for _ in range(2):
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=plan))
        trainer.fit(model, datamodule=Batches(TABLE_WISE, 3))
        [group] = trainer.optimizers[0].fused_groups
        seen.append([group["initial_lr"], group["lr"]])
    return seen


SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 4.0], total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.1, 1.0], [0.2, 4.0], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05),
}


def counts_of_updates(pipeline: str) -> list[int]:
    """Return the iteration counts of the kernels after a fit under a schedule; FBGEMM counts lookups for these."""
    model = Scheduled(ROWWISE_ADAGRAD)
    plan = make_plan(ROWWISE_ADAGRAD, model, dist.get_world_size())
    make_trainer(OverlapEmbeddingStrategy(pipeline=pipeline, sharding=plan)).fit(
        model, datamodule=Batches(ROWWISE_ADAGRAD, NUM_STEPS)
    )
    return [int(count) for kernel in sharded_module.tbes(model.ebc) for count in (kernel.iter, kernel.iter_cpu)]


def frozen_beside_zero() -> tuple[bool, bool]:
    """Whether a frozen table and one that begins with a rate of zero have moved after a schedule raised the rate."""
    model = ZeroAtFirst(ROWWISE_ADAGRAD, fused_optimizer=False)
    model.ebc.embedding_bags["t1"].weight.requires_grad_(False)
    before = {name: bag.weight.detach().clone() for name, bag in model.ebc.embedding_bags.items()}
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 0.0}))
    make_trainer(strategy).fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 4))
    moved = {name.split()[0]: not torch.equal(t, before[name.split()[0]]) for name, t in collect_tables(model).items()}
    return moved["t0"], moved["t1"]


class ZeroAtFirst(Scheduled):
    """Its schedule sets rates, whatever they began with."""

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = lr_scheduler.OneCycleLR(optimizer, [0.2, 2.0], total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def rate_without_one_given() -> tuple[list[float], list[float]]:
    """Return the fused rates of a table whose optimizer was given none: of the group, and of the kernels."""
    model = Unscheduled(TABLE_WISE, fused_optimizer=False)
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {}))
    trainer = make_trainer(strategy)
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
    kernels = [kernel.get_learning_rate() for kernel in sharded_module.tbes(model.ebc)]
    return [group["lr"] for group in trainer.optimizers[0].fused_groups], kernels


def schedule_with(name: str, dense: str) -> tuple[list[float], list[float]]:
    """Return the fused rates that a scheduler gives in six steps, and those that the kernels had in their updates."""
    seen: list[float] = []

    class Own(Scheduled):
        def configure_optimizers(self) -> Any:
            kwargs = {"SGD": {"momentum": 0.9}, "AdamW": {}}[dense]
            optimizer = combined_optimizer(
                self, getattr(torch.optim, dense)([*self.bottom.parameters(), *self.top.parameters()], 0.1, **kwargs)
            )
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}]

    model = notes_rates(Own, seen)(TABLE_WISE)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=make_plan(TABLE_WISE, model, dist.get_world_size())))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 6))
    alone = DenseAndFused(torch.optim.AdamW([torch.zeros(1)], 0.1), {2.0: []})
    if dense == "SGD":
        alone = DenseAndFused(torch.optim.SGD([torch.zeros(1)], 0.1, momentum=0.9), {2.0: []})
    scheduler, expected = SCHEDULERS[name](alone), []
    for _ in range(6):
        expected.append(float(alone.fused_groups[0]["lr"]))
        alone.step()
        scheduler.step()
    return seen, expected


def without_the_strategy() -> tuple[Tensor, Tensor]:
    """Train a module without tables by DDP, its dense optimizer combined or not."""

    class Combines(Dense):
        combine = False

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if self.combine:
                optimizer = combined_optimizer(self, optimizer)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]

    losses = []
    for combine in (False, True):
        model = Combines()
        model.combine = combine
        make_trainer(DDPStrategy(), max_epochs=2).fit(model)
        losses.append(torch.stack(model.losses))
    return losses[0], losses[1]


def refused(what: str) -> str:
    """Return what the user reads."""

    class Refused(Scheduled):
        def configure_optimizers(self) -> Any:
            dense = dense_optimizer(self)
            if what == "torchrec":
                keyed = KeyedOptimizerWrapper(
                    dict(in_backward_optimizer_filter(self.named_parameters())), lambda _: dense
                )
                return CombinedOptimizer([("ebc", self.ebc.fused_optimizer), ("", keyed)])
            if what == "keyed":
                named = dict(in_backward_optimizer_filter(self.named_parameters()))
                return combined_optimizer(self, KeyedOptimizerWrapper(named, lambda _: dense))
            if what == "two":
                self.automatic_optimization = False
                return [combined_optimizer(self, dense), combined_optimizer(self, dense)]
            optimizer = combined_optimizer(self, dense)
            if what == "add":
                optimizer.add_param_group({"params": [torch.zeros(1)]})
            optimizer.load_state_dict(dense.state_dict())
            return optimizer

    try:
        make_trainer(OverlapEmbeddingStrategy(sharding="table_wise")).fit(
            Refused(TABLE_WISE), datamodule=Batches(TABLE_WISE, 2)
        )
    except (ValueError, TypeError, RuntimeError) as err:
        return f"{type(err).__name__}: {err}"
    raise AssertionError("nothing was refused")
