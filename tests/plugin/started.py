"""Fits in processes that the strategy starts, and trainers that are copied.

As a script: fits by `fork` and `spawn`; what this process then has goes to the file that is the argument.
"""

import contextlib
import copy
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext
from torch.utils.data import DataLoader

from lightning_overlap import OverlapEmbeddingStrategy

from ..support import interpreters
from ..support.cases import COLUMN_WISE, MIXED, TABLE_WISE, Batches, Case, Model, make_plan
from ..support.fits import QUIET, make_strategy, make_trainer
from ..support.reference import Result, collect
from ..tables.supported_modules import KindModel
from .strategies import Dense

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 6
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda trainer: pickle.loads(pickle.dumps(trainer)),
    "cloudpickle": lambda trainer: pickle.loads(cloudpickle.dumps(trainer)),
}


class Logged(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)


class AllBatches(Batches):
    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


class Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("a fault of rank 1")
        return super().training_step(batch, batch_idx)


class MadeLater(Model):
    def __init__(self) -> None:
        super().__init__(TABLE_WISE)
        del self.ebc

    def configure_model(self) -> None:
        if not hasattr(self, "ebc"):
            self.ebc = Model(TABLE_WISE).ebc


def run_script(folder: Path) -> dict[str, Any]:
    """Run this file as a script; return what it found."""
    command = [sys.executable, "-m", __name__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = interpreters.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        code = process.wait(110)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    assert code == 0, (folder / "log").read_text(encoding="utf-8", errors="replace")
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return found


def start(strategy: Any, **kwargs: Any) -> Trainer:
    own = LightningEnvironment()  # though these tests' ranks are in an environment of torchrun's
    return Trainer(
        accelerator="cpu", devices=2, strategy=strategy, plugins=[own], **{**QUIET, "max_epochs": 1, **kwargs}
    )


def state_of(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def fit_and_more(folder: Path, method: str, case: Case) -> dict[str, Any]:
    """Fit, evaluate, evaluate the best checkpoint, and fit again with another trainer."""
    model, data = Logged(case), AllBatches(case, NUM_STEPS)
    options = {"start_method": method, "sharding": make_plan(case, model, 2)}
    saver = ModelCheckpoint(folder / method)
    strategy = OverlapEmbeddingStrategy(**options)
    trainer = start(strategy, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(model, datamodule=data)
    found: dict[str, Any] = {"weights": state_of(model), "metrics": dict(trainer.callback_metrics)}
    if method == "spawn":
        return found
    found["unsharded"] = strategy.lightning_module is model and not dist.is_initialized()
    found["best"] = Path(saver.best_model_path).name
    found["own_optimizers"] = [
        copied.strategy.lightning_module.ebc.embedding_bags["t0"].weight._optimizer_classes
        for copied in (copies(trainer) for copies in COPIES.values())
    ]
    found["validate"] = trainer.validate(model, datamodule=data, verbose=False)
    found["test"] = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
    found["refused"] = _refusal(trainer, model, data)
    model.bottom[0].weight.data.add_(1.0)  # of this process alone
    found["before_second"] = state_of(model)
    start(OverlapEmbeddingStrategy(**options)).fit(model, datamodule=data)
    found["second"] = state_of(model)
    return found


def fit_dense(strategy: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = Dense()
    trainer = start(strategy)
    trainer.fit(model)
    return state_of(model), dict(trainer.callback_metrics)


def _refusal(trainer: Trainer, model: Any, datamodule: Any = None) -> str:
    try:
        trainer.fit(model, datamodule=datamodule)
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return "nothing was refused"


@contextlib.contextmanager
def join_all() -> Iterator[None]:
    """Let the parent read errors only after all processes have ended: it raises the error of the lowest rank then."""
    own = ProcessContext.join

    def join(context: ProcessContext, *args: Any) -> bool:
        for process in context.processes:
            process.join()
        return own(context, *args)

    with mock.patch.object(ProcessContext, "join", join):
        yield


def refuse(name: str) -> str:
    """Return what a user reads; no process is started."""
    model = {
        "on_meta": lambda: Model(TABLE_WISE, fused_optimizer=False, device="meta"),
        "managed_collision": lambda: KindModel("managed_bags"),
        "several_nodes": lambda: Model(TABLE_WISE),
    }[name]()
    num_nodes = 1 + (name == "several_nodes")
    return _refusal(start(OverlapEmbeddingStrategy(start_method="fork"), num_nodes=num_nodes), model)


def refuse_after_a_fit() -> tuple[str, str]:
    """Fit here, then let processes be started: with the same module, and with a new one."""
    model = Model(TABLE_WISE)
    make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(TABLE_WISE, 2))
    with mock.patch.dict(os.environ):  # Lightning's environment takes what torchrun set out of it
        trainers = [start(OverlapEmbeddingStrategy(start_method="fork")) for _ in range(2)]
        return _refusal(trainers[0], model), _refusal(trainers[1], Model(TABLE_WISE))


def fit_from(case: Case, state: dict[str, Tensor]) -> Result:
    """Fit on running ranks, from given weights."""
    model = Model(case)
    model.load_state_dict(state)
    trainer = make_trainer(make_strategy(model))
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses)


def copies_train_alike(how: str, tables: bool, pipeline: Any) -> dict[str, Any]:
    """Copy a trainer before, between and after fits; train with each, and with the original."""
    found: dict[str, Any] = {"losses": [], "said": []}
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding="table_wise"))
    for num_epochs in (1, 2, 3):
        with warnings.catch_warnings(record=True, action="always") as caught:
            copied = COPIES[how](trainer)
        found["said"].append([str(warning.message) for warning in caught if "copy" in str(warning.message)])
        strategy = copied.strategy
        nothing = strategy.streams is None and strategy.checkpoint_group is None and not strategy.num_in_flight
        found.setdefault("of_a_run", []).append(not nothing)
        found["losses"].append([_train(which, tables, num_epochs) for which in (copied, trainer)])
    return found


def _train(trainer: Trainer, tables: bool, num_epochs: int) -> Tensor:
    model: Any = Model(TABLE_WISE) if tables else Dense()
    trainer.fit_loop.max_epochs = num_epochs
    trainer.fit(model, datamodule=Batches(TABLE_WISE, NUM_STEPS) if tables else None)
    return torch.stack(model.losses)


def copied_module() -> str:
    model = Model(TABLE_WISE)
    make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(TABLE_WISE, 2))
    copied = copy.deepcopy(model)
    assert torch.equal(copied.bottom[0].weight, model.bottom[0].weight)
    try:
        copied.ebc(None)
    except RuntimeError as err:
        return str(err)
    raise AssertionError("the copy answered")


def missing_checkpoint(fn: str, path: str) -> tuple[str, str]:
    """Return what is said of it under DDPStrategy, and by ours of a module with tables."""

    def said(strategy: Any, model: Any) -> str:
        try:
            getattr(make_trainer(strategy), fn)(model, datamodule=AllBatches(TABLE_WISE, 2), ckpt_path=path)
        except Exception as err:
            return f"{type(err).__name__}: {err}"
        return "nothing"

    theirs = said(DDPStrategy(), Logged(TABLE_WISE, fused_optimizer=False))
    return theirs, said(OverlapEmbeddingStrategy(), Logged(TABLE_WISE))


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    dense = [fit_dense(cls(start_method="fork")) for cls in (DDPStrategy, OverlapEmbeddingStrategy)]
    torch.set_num_threads(2)
    torch.randn(500, 500).exp().sum()  # by two threads, which a forked process does not have

    def refusal(model: Model) -> str:
        return _refusal(start(OverlapEmbeddingStrategy(start_method="fork")), model, Batches(TABLE_WISE, 2))

    found: dict[str, Any] = {
        "fork": fit_and_more(folder, "fork", MIXED),
        "spawn": fit_and_more(folder, "spawn", COLUMN_WISE),
        "dense": dense,
        "made_later": refusal(MadeLater()),
    }
    with join_all():
        found["fault"] = refusal(Fails(TABLE_WISE))
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main()
