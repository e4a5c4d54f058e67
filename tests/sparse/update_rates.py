"""Learning rates that move: fits under a schedule, and the plain loops they have to equal. Functions that ranks run."""

from typing import Any
from unittest import mock

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torch.optim import lr_scheduler

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer

from ..checkpoint.checkpoints import build_plan, planned
from ..support import cases
from ..support.cases import MIXED, ROWWISE_ADAGRAD, TABLE_WISE, Batch, ByHand, Case, Model, TableSpec
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .variants import Variant

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

CASES = (TABLE_WISE, ROWWISE_ADAGRAD, MIXED, cases.SEQUENCE, TWO_RATES)


def factor(step: int) -> float:
    """The schedule: changes by a lot with every step."""
    return (1.0, 0.1, 2.5, 0.3, 0.0, 1.7, 0.05)[step % 7]


class Rates:
    """A schedule of given factors, by step."""

    def __init__(self, factors: list[float]) -> None:
        self._factors = factors

    def __call__(self, step: int) -> float:
        return self._factors[step % len(self._factors)]


class Scheduled(Model):
    """One scheduler for the dense optimizer and the fused tables."""

    factor = staticmethod(factor)

    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        return cases.dense_optimizer(self)

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, self.make_dense_optimizer())
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, self.factor), "interval": "step"}]


def fit(
    case: Case,
    pipeline: str,
    *,
    stream: str = "data_dist",
    device_type: str = "cpu",
    factors: list[float] | None = None,
    mode_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Result:
    model = Scheduled(case)
    if factors is not None:
        model.factor = Rates(factors)
    strategy = make_strategy(model, pipeline, device_type=device_type, stream=stream, **(mode_options or {}))
    trainer = make_trainer(strategy, device_type, **kwargs)
    trainer.fit(model, datamodule=cases.Batches(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def fit_beside_a_dense_kernel(pipeline: str) -> Tensor:
    """Train fused tables of the same sharding as one of a dense kernel; return the losses."""
    case = planned(TABLE_WISE, "dense 0 0")
    model = Scheduled(case)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=build_plan(case, model, "dense 0 0"))
    make_trainer(strategy).fit(model, datamodule=cases.Batches(case, NUM_STEPS))
    return torch.stack(model.losses)


class SchedulesByHand(ByHand, Scheduled):
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


class TwoDense(SchedulesByHand):
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


class Unscheduled(Scheduled):
    def configure_optimizers(self) -> Any:
        return combined_optimizer(self, cases.dense_optimizer(self))


def collect_tables(module: Model) -> dict[str, Tensor]:
    unused = torch.optim.SGD([torch.zeros(1)])
    return collect(module, unused, module.losses).tables


def lookup_counts(pipeline: str, model_class: type[Model], **trainer_kwargs: Any) -> list[list[int]]:
    """Return the iteration count that the fused optimizers saw in each training lookup."""
    module = model_class(ROWWISE_ADAGRAD)  # FBGEMM counts for this one on a CPU
    trained: list[list[int]] = []
    kernel = SplitTableBatchedEmbeddingBagsCodegen
    forward = kernel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        embeddings = forward(self, *args, **kwargs)
        seen = [int(self.iter_cpu), int(self.iter)]
        if embeddings.requires_grad:
            embeddings.register_hook(lambda grad: trained.append(seen))
        return embeddings

    with mock.patch.object(kernel, "forward", counting):
        trainer = make_trainer(make_strategy(module, pipeline), **{"num_sanity_val_steps": 1, **trainer_kwargs})
        trainer.fit(module, datamodule=Variant(ROWWISE_ADAGRAD, "dataclass", NUM_STEPS))
    return trained
