"""Fits with replicated tables, and what they are compared with. Functions that ranks run."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.tables import sharded_modules

from ..laws.accumulated import Data
from ..plugin.strategies import logged
from ..sparse.callers import PenalizesAll, TwoBackwards
from ..sparse.update_rates import Scheduled, factor
from ..support.cases import NUM_STEPS, Batch, Batches, Case, MakesInput, Model, TableSpec, dense_optimizer
from ..support.fits import make_trainer, mode_and_options
from ..support.reference import Delayed, Result, collect, train, train_delayed
from .supported_modules import Batches as KindBatches
from .supported_modules import KindModel

SMALL = ("s0", "s1", "s2")
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-6}),
    "rowwise": (RowWiseAdagrad, {"lr": 1.0, "eps": 1e-8}),
}


def case_of(optimizer: str) -> Case:
    """Two tables that are sharded, and three of two widths and two rates that the strategy replicates."""
    tables = (
        TableSpec("t0", ("f0",)),
        TableSpec("s0", ("f1",)),
        TableSpec("s1", ("f2", "f3"), dim=4),
        TableSpec("t1", ("f3",)),
        TableSpec("s2", ("f4",), dim=4, lr=0.7),
    )
    return Case(optimizer, tables, optimizer=OPTIMIZERS[optimizer], weighted=optimizer == "sgd")


class TwoCalls(Model):
    """Calls its module twice: two updates in a step, each with a gradient of its own."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        again = dataclasses.replace(batch, dense=-batch.dense)
        return super().training_step(batch, batch_idx) + 0.5 * self(again)


class Frozen(Model):
    """Looks at its tables without a gradient in every other step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            seen = self.embeddings("ebc", batch)
        if batch_idx % 2:
            return self.dense(batch, {"ebc": seen})
        return super().training_step(batch, batch_idx)


class PenalizesReplicas(Model):
    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        small = [weight for name, weight in self.ebc.named_parameters() if name.split(".")[-2] in SMALL]
        return super().forward(batch, embeddings) + 0.1 * torch.stack([weight.square().sum() for weight in small]).sum()


class PenalizesAllAndFails(PenalizesAll):
    """Has another error at the end of its backward, before that of the penalty."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        queue = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda _: queue(self._fail))
        return loss

    def _fail(self) -> None:
        raise RuntimeError("another error")


class Writes(Model):
    """Writes a small table after its first two steps: after the second one the next batch has been looked up."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, weight in self.named_parameters():
            if batch_idx < 2 and "s0" in name:  # sharded, another rank may have it
                with torch.no_grad():
                    weight.mul_(0.5)


MODELS = (
    *(Model, Scheduled, PenalizesAll, PenalizesAllAndFails, PenalizesReplicas),
    *(TwoBackwards, TwoCalls, Frozen, Writes, MakesInput),
)


def strategy_of(case: Case, pipeline: str, replicated: Any = SMALL, **options: Any) -> OverlapEmbeddingStrategy:
    sharding = {table.name: "table_wise" for table in case.tables if table.name not in (replicated or ())}
    mode, options = mode_and_options(pipeline, options)
    return OverlapEmbeddingStrategy(mode, sharding=sharding, replicate_tables=replicated, **options)


def fit(
    case: Case, pipeline: str, model_class: str = "Model", options: dict[str, Any] | None = None, **kwargs: Any
) -> Result:
    model = {cls.__name__: cls for cls in MODELS}[model_class](case)
    trainer = make_trainer(strategy_of(case, pipeline, **(options or {})), **{"limit_val_batches": 0, **kwargs})
    trainer.fit(model, datamodule=Data(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def reference(case: Case, staleness: int = 0, *, scheduled: bool = False) -> Result:
    """The hand-written loop with every table sharded; under a staleness, small ones are looked up in their turn."""
    schedule: dict[str, Any] = {"factor": factor} if scheduled else {}
    if not staleness:
        return train(case, **schedule)
    tables = tuple(dataclasses.replace(t, collection="ebc_dp") if t.name in SMALL else t for t in case.tables)
    return train_delayed(dataclasses.replace(case, tables=tables), Delayed(staleness), **schedule)


def save(case: Case, path: str, replicated: Any, resume: str | None, **options: Any) -> Result:
    """Train an epoch, or only load a checkpoint if given; save all, and return it."""
    model = Scheduled(case)
    if resume is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all has to come from the checkpoint
    trainer = make_trainer(strategy_of(case, "fused_sparse_dist", replicated, **options))
    trainer.fit(model, datamodule=Batches(case, 8), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return collect(model, trainer.optimizers[0], model.losses or [torch.zeros(())])


def load_unsharded(case: Case, path: str) -> dict[str, Tensor]:
    loaded = Model.load_from_checkpoint(path, case=case, weights_only=True)
    return {name.split(".")[-2]: weight.detach() for name, weight in loaded.named_parameters() if "ebc" in name}


def replicated_in(
    optimizer: Any, replicated: Any, batch_size: Any = None, second: Any = None, sequence: bool = False, **options: Any
) -> list[str] | str:
    """Return the tables that a short fit replicates, or the error; `second` trains a table `s0` of a second module."""
    tables = [TableSpec(name, (f"f_{name}",)) for name in (*SMALL, "t0", "t1")]
    if second is not None:
        tables.append(TableSpec("s0", ("f_s0",), collection="second"))
    case = Case("replicated_in", tuple(tables), sequence=sequence)
    model = Model(case, fused_optimizer=False)
    for name, given in (("ebc", optimizer), ("second", second)):
        if given is not None:
            cls, kwargs = given
            _apply_optimizer_in_backward(cls, getattr(model, name).parameters(), dict(kwargs))
    trainer, data = make_trainer(OverlapEmbeddingStrategy(replicate_tables=replicated, **options)), Batches(case, 2)
    data.batch_size = batch_size  # type: ignore[attr-defined]
    try:
        trainer.fit(model, datamodule=data)
    except (ValueError, TypeError) as err:
        return str(err)
    plans = [module.module_sharding_plan for module in sharded_modules(model).values()]
    return sorted(name for plan in plans for name, one in plan.items() if one.sharding_type == "data_parallel")


def errors_of_penalties(case: Case) -> list[str]:
    """Return the errors of two fits, one after the other."""
    found = []
    for name in ("PenalizesAllAndFails", "PenalizesAll"):
        with pytest.raises(RuntimeError) as caught:
            fit(case, "fused_sparse_dist", name)
        found.append(str(caught.value))
    return found


def words_and_groups(case: Case) -> tuple[str, list[tuple[str, float]]]:
    """Return what the log says as a fit begins, and the fused groups of a combined optimizer."""
    model = Model(case)
    with logged(LOGGER) as words:
        make_trainer(strategy_of(case, "base")).fit(model, datamodule=Batches(case, 2))
    groups = combined_optimizer(model, dense_optimizer(model)).fused_groups
    return "\n".join(words), [(group["name"], group["lr"]) for group in groups]


def fit_variable_batches() -> None:
    module = KindModel("variable_batch")
    make_trainer(OverlapEmbeddingStrategy(replicate_tables=1000)).fit(module, datamodule=KindBatches(module.case))
