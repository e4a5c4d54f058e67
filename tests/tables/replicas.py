"""Fits with replicated tables, and what they are compared with. Functions that ranks run."""

import dataclasses
import sys
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import MODES, OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.sparse import lookup
from lightning_overlap.sparse.module_context import ModuleContext
from lightning_overlap.tables import sharded_modules, table_lines
from lightning_overlap.testing.unsharded import compare_with_unsharded
from lightning_overlap.testing.watched_fit import Setting, process_group

from ..laws.unsharded import KINDS, OneModule, make_batches
from ..laws.windows import Data
from ..sparse.callers import PenalizesAll, TwoBackwards
from ..sparse.update_rates import Scheduled, factor
from ..support.cases import NUM_STEPS, Batch, Batches, Case, MakesInput, Model, TableSpec, dense_optimizer, make_batch
from ..support.fits import make_trainer, mode_and_options
from ..support.reference import Delayed, Result, collect, train, train_delayed

SMALL = ("s0", "s1", "s2")
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 2.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1.0, "eps": 1e-6}),
    "rowwise": (RowWiseAdagrad, {"lr": 1.0}),
}


def case_of(optimizer: str, **kwargs: Any) -> Case:
    """Two tables that are sharded, and three of two widths and two rates that the strategy replicates."""
    tables = (
        TableSpec("t0", ("f0",)),
        TableSpec("s0", ("f1",)),
        TableSpec("s1", ("f2", "f3"), dim=4),
        TableSpec("t1", ("f3",)),
        TableSpec("s2", ("f4",), dim=4, lr=0.7),
    )
    return Case(optimizer, tables, optimizer=OPTIMIZERS[optimizer], **kwargs)


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


MODELS = (Model, Scheduled, PenalizesAll, PenalizesAllAndFails, TwoBackwards, TwoCalls, Frozen, Writes, MakesInput)


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


def error_of_penalty(case: Case, model_class: str = "PenalizesAll") -> str:
    try:
        fit(case, "fused_sparse_dist", model_class)
    except RuntimeError as err:
        return str(err)
    return "no error"


def num_compared(case: Case, model_class: str) -> tuple[Result, int]:
    """Fit, and count how often the state of a batch ahead is compared with the tables between two steps."""
    compared = 0
    own = ModuleContext.is_overwritten

    def is_overwritten(state: Any) -> bool:
        nonlocal compared
        compared += sys._getframe(1).f_code.co_filename == lookup.__file__
        return own(state)

    with mock.patch.object(ModuleContext, "is_overwritten", is_overwritten):
        return fit(case, "fused_sparse_dist", model_class), compared


class Stop(Callback):
    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx + 1 == self.num_batches


def stopped_in_a_window(case: Case, k: int, stop: int) -> tuple[Result, list[str]]:
    """End a fit with a frozen window after a batch; return what is left, and the tables that a backward then moves."""
    model = Model(case)
    strategy = strategy_of(case, "fused_sparse_dist", frozen_window=True)
    trainer = make_trainer(strategy, accumulate_grad_batches=k, callbacks=[Stop(stop)])
    trainer.fit(model, datamodule=Batches(case))
    left = collect(model, trainer.optimizers[0], model.losses)
    model(make_batch(case, 0, dist.get_rank())).backward()
    after = collect(model, trainer.optimizers[0], model.losses).tables
    return left, [name for name, weight in after.items() if not torch.equal(weight, left.tables[name])]


def reference(case: Case, staleness: int = 0, *, scheduled: bool = False) -> Result:
    """The hand-written loop with every table sharded; under a staleness, small ones are looked up in their turn."""
    schedule: dict[str, Any] = {"factor": factor} if scheduled else {}
    if not staleness:
        return train(case, **schedule)
    tables = tuple(dataclasses.replace(t, collection="ebc_dp") if t.name in SMALL else t for t in case.tables)
    return train_delayed(dataclasses.replace(case, tables=tables), Delayed(staleness), **schedule)


def train_from(
    case: Case, folder: str, *, replicated: Any, epochs: int, resume: str | None = None, **options: Any
) -> tuple[Result, str, list[str]]:
    """Train `epochs` in all, from a checkpoint if given; return the end, the last checkpoint, and warnings."""
    model = Scheduled(case)
    if resume is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all has to come from the checkpoint
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    strategy = strategy_of(case, "fused_sparse_dist", replicated, **options)
    trainer = make_trainer(strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=Batches(case, 8), ckpt_path=resume)
    said = [str(warning.message) for warning in caught if "optimizer" in str(warning.message)]
    losses = model.losses or [torch.zeros(())]
    return collect(model, trainer.optimizers[0], losses), saver.best_model_path, said


def load_unsharded(case: Case, path: str) -> dict[str, Tensor]:
    loaded = Model.load_from_checkpoint(path, case=case, weights_only=True)
    return {name.split(".")[-2]: weight.detach() for name, weight in loaded.named_parameters() if "ebc" in name}


class WithBatchSize(Batches):
    def __init__(self, case: Case, batch_size: int | None) -> None:
        super().__init__(case, 2)
        self.batch_size = batch_size


def replicated_in(
    optimizer: Any, replicated: Any, batch_size: int | None = None, sharding: Any = None, **options: Any
) -> list[str] | str:
    """Return the tables that a short fit replicates, or what the user reads where that is refused."""
    case = dataclasses.replace(case_of("sgd"), optimizer=optimizer)
    model = Model(case, fused_optimizer=optimizer is not None)
    strategy = OverlapEmbeddingStrategy(sharding=sharding, replicate_tables=replicated, **options)
    try:
        make_trainer(strategy).fit(model, datamodule=WithBatchSize(case, batch_size))
    except (ValueError, TypeError) as err:
        return str(err)
    plans = [module.module_sharding_plan for module in sharded_modules(model).values()]
    return sorted(name for plan in plans for name, one in plan.items() if one.sharding_type == "data_parallel")


def replicated_of_one_name(of_second: Any, replicated: Any) -> list[str] | str:
    """Return what is replicated where two modules have a table `s0` each, or what the user reads."""
    tables = (TableSpec("s0", ("f0",)), TableSpec("s1", ("f1",)), TableSpec("s0", ("f2",), collection="second"))
    case = Case("of_one_name", tables)
    model = Model(case, fused_optimizer=False)
    for name, (cls, kwargs) in {"ebc": OPTIMIZERS["sgd"], "second": of_second}.items():
        _apply_optimizer_in_backward(cls, getattr(model, name).parameters(), dict(kwargs))
    try:
        trainer = make_trainer(OverlapEmbeddingStrategy(replicate_tables=replicated))
        trainer.fit(model, datamodule=WithBatchSize(case, 1000))
    except ValueError as err:
        return str(err)
    plans = {name: module.module_sharding_plan for name, module in sharded_modules(model).items()}
    whole = [(path, name) for path, plan in plans.items() for name, one in plan.items() if one.sharding_spec is None]
    return sorted(f"{path}.{name}" for path, name in whole)


def shown_of(case: Case, replicated: Any) -> tuple[list[tuple[str, float]], list[str]]:
    """Return name and rate of each fused group of a combined optimizer, and what the log says of the tables."""
    model = Model(case)
    trainer = make_trainer(strategy_of(case, "base", replicated))
    trainer.fit(model, datamodule=Batches(case, 2))
    groups = combined_optimizer(model, dense_optimizer(model)).fused_groups
    lines = table_lines(model, trainer.optimizers, scheduled=False, moved=False)
    return [(group["name"], group["lr"]) for group in groups], lines


def check_unsharded(name: str, pipeline: str) -> str:
    """Return what is wrong with a module whose tables but the first are replicated; nothing, if all is well."""
    kind = KINDS[name]
    with process_group("cpu"):
        options = {"sharding": {"t0": "table_wise"}, "replicate_tables": 1000}
        setting = Setting(lambda: OneModule(kind), make_batches(kind, 6), strategy_options=options)
        return compare_with_unsharded(setting, pipeline, MODES[pipeline].staleness)[0]
