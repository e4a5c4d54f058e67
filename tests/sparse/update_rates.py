"""Learning rates that move: fits under a schedule, and the plain loops they have to equal. Functions that ranks run."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import lr_scheduler

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.sparse import lookup
from lightning_overlap.tables import sharded_module

from ..checkpoint.checkpoints import build_plan, planned
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
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .variants import Twice, Variant

NUM_STEPS = 10
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

    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        return dense_optimizer(self)

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, self.make_dense_optimizer())
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}]


def fit(case: Case, pipeline: str, *, stream: str = "data_dist", device_type: str = "cpu", **kwargs: Any) -> Result:
    model = Scheduled(case)
    strategy = make_strategy(model, pipeline, device_type=device_type, stream=stream)
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
    with mock.patch.object(lookup, "updates_at_present_rate", lambda module, set_rates: nullcontext(set_rates())):
        return fit(case, pipeline)


class Manual(ByHand, Scheduled):
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

    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": [*self.bottom.parameters()], "lr": 0.3}, {"params": [*self.top.parameters()]}]
        return torch.optim.AdamW(groups, 0.02, weight_decay=0.1)


class TwoClosures(Scheduled):
    """What was looked up between the two closures of a step is dropped."""

    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        return Twice([*self.bottom.parameters(), *self.top.parameters()], 0.1)


class LBFGS(Scheduled):
    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([*self.bottom.parameters(), *self.top.parameters()], 0.1, max_iter=3)


class Unscheduled(Scheduled):
    def configure_optimizers(self) -> Any:
        return combined_optimizer(self, dense_optimizer(self))


class Plateau(Scheduled):
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
    for cls in (Scheduled, Manual, TwoBackwards, TwoDense, SeveralGroups, TwoClosures, LBFGS, Unscheduled, Plateau)
}


# These leave data-parallel tables to nobody (or toggle requires_grad, which a view of a kernel cannot take).
OWN_OPTIMIZERS = ("Manual", "TwoDense", "SeveralGroups", "TwoClosures", "LBFGS")


@dataclass
class Report:
    losses: Tensor
    tables: dict[str, Tensor]
    rates: list[list[float]]  # of all groups, at the end of each batch


def run(model: str, pipeline: str, case: Case | None = None, **trainer_kwargs: Any) -> Report:
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
    unused = torch.optim.SGD([torch.zeros(1)])
    return collect(module, unused, module.losses).tables


def counts_of_updates(pipeline: str) -> list[int]:
    """Return the iteration counts of the kernels after a fit under a schedule; FBGEMM counts lookups for these."""
    model = Scheduled(ROWWISE_ADAGRAD)
    plan = make_plan(ROWWISE_ADAGRAD, model, dist.get_world_size())
    make_trainer(OverlapEmbeddingStrategy(pipeline=pipeline, sharding=plan)).fit(
        model, datamodule=Batches(ROWWISE_ADAGRAD, NUM_STEPS)
    )
    return [int(count) for kernel in sharded_module.tbes(model.ebc) for count in (kernel.iter, kernel.iter_cpu)]
