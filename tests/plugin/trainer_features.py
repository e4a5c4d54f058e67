"""What Lightning's callbacks and Trainer arguments do to a module with sharded tables. Functions that ranks run."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, ModelPruning
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_overlap import OverlapEmbeddingStrategy

from ..sparse.update_rates import Scheduled
from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model, make_plan
from ..support.fits import make_trainer
from ..support.reference import Result, collect

NUM_STEPS = 12


def train(callback: str | None, pipeline: str, case: Case = TABLE_WISE, **kwargs: Any) -> tuple[Result, Any]:
    """Train three epochs with a callback of `WORKING`; return the end, and what the callback has to show."""
    model = Scheduled(case)
    made = None if callback is None else WORKING[callback](model)
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=make_plan(case, model, dist.get_world_size()))
    trainer = make_trainer(strategy, **{"callbacks": [made] if made else [], "max_epochs": 3, **kwargs})
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, datamodule=Batches(case, 6))
    shows = getattr(made, "shows", None)
    return collect(model, trainer.optimizers[0], model.losses), shows() if shows else None


class FreezesTop(BaseFinetuning):
    """Trains the top from the second epoch on. Its parameters are in the optimizer from the start."""

    def freeze_before_training(self, module: Model) -> None:
        self.freeze(module.top[0])

    def finetune_function(self, module: Model, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.make_trainable(module.top[0])


class AveragesDense(Callback):
    """The way out that the refusal of Lightning's own averages names."""

    def on_fit_start(self, trainer: Trainer, module: Model) -> None:
        self.average = AveragedModel(module.top, avg_fn=get_ema_avg_fn(0.9))

    def on_train_batch_end(self, trainer: Trainer, module: Model, *args: Any) -> None:
        self.average.update_parameters(module.top)

    def shows(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.average.parameters()])


WORKING: dict[str, Any] = {
    "GradientAccumulationScheduler": lambda model: callbacks.GradientAccumulationScheduler({0: 1, 1: 3}),
    "ModelPruning": lambda model: ModelPruning(
        "l1_unstructured", [(model.top[0], "weight")], amount=0.3, use_lottery_ticket_hypothesis=False
    ),
    "BaseFinetuning": lambda model: FreezesTop(),
    "AveragesDense": lambda model: AveragesDense(),
}


class Backbone(Model):
    @property
    def backbone(self) -> nn.Module:
        return self.ebc


class FreezesLater(BaseFinetuning):
    def freeze_before_training(self, module: Model) -> None:
        pass

    def finetune_function(self, module: Model, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        self.freeze(module.ebc)


REFUSED: dict[str, Any] = {
    "swa": lambda model: callbacks.StochasticWeightAveraging(0.1),
    "ema": lambda model: callbacks.EMAWeightAveraging(),
    "frozen_backbone": lambda model: callbacks.BackboneFinetuning(1),
    "freezes_later": lambda model: FreezesLater(),
    "prunes_tables": lambda model: ModelPruning(
        "l1_unstructured", [(model.ebc.embedding_bags["t0"], "weight")], amount=0.5
    ),
    "prunes_everything": lambda model: ModelPruning("l1_unstructured", amount=0.5),
    "batch_size_finder": lambda model: callbacks.BatchSizeFinder(),
}


def refuse(what: str) -> tuple[str, int]:
    """Return what the user reads of a callback or a precision, and the number of steps that were trained before."""
    model = Backbone(TABLE_WISE, fused_optimizer=what != "frozen_backbone")
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 1.0}))
    kwargs = {"callbacks": [REFUSED[what](model)]} if what in REFUSED else {"precision": what}
    try:
        make_trainer(strategy, **kwargs).fit(model, datamodule=Batches(TABLE_WISE, 2))
    except Exception as err:  # Lightning's own kinds of error too
        return f"{type(err).__name__}: {err}", len(model.losses)
    raise AssertionError("nothing was refused")


def find_rate(folder: str, pipeline: str) -> tuple[Result, Result, list[float], list[int]]:
    """Train with and without a search for a learning rate; return both ends, the rates, numbers of losses at ends."""
    results = []
    searched: list[float] = []
    ended: list[int] = []

    class AsksToBeCalled(Scheduled):
        def on_train_start(self) -> None:
            self.trainer.strategy.call_at_end(lambda: ended.append(len(self.losses)))  # type: ignore[attr-defined]

    class Finds(LearningRateFinder):
        def lr_find(self, trainer: Trainer, module: Any) -> None:
            super().lr_find(trainer, module)
            module.losses.clear()
            searched.extend(self.optimal_lr.results["lr"])

    for finders in ([], [Finds(num_training_steps=5, early_stop_threshold=None, update_attr=False)]):
        model = AsksToBeCalled(ROWWISE_ADAGRAD)
        strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise")
        trainer = make_trainer(strategy, callbacks=finders, default_root_dir=folder, max_epochs=2)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 8))
        results.append(collect(model, trainer.optimizers[0], model.losses))
    return results[0], results[1], searched, ended


class Configured(Scheduled):
    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case)
        self.made_on = device
        self.made: dict[str, Any] = {}
        for name in case.collections:
            self.made[name] = getattr(self, name).state_dict()
            delattr(self, name)

    def configure_model(self) -> None:
        for name in self.case.collections:
            if not hasattr(self, name):
                self.add_module(name, getattr(Model(self.case, device=self.made_on), name))


def make_module(how: str, case: Case, trainer: Trainer) -> Model:
    if how == "plain":
        return Scheduled(case)
    if how.startswith("configure_model"):
        return Configured(case, how.removeprefix("configure_model on "))
    with trainer.init_module(empty_init=how == "init_module, empty"):
        return Scheduled(case)


def train_made(how: str, case: Case) -> tuple[Result, bool]:
    """Train a module made so; return the end, and whether anything was left on meta or unsharded."""
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=make_plan(case, Model(case), dist.get_world_size())))
    model = make_module(how, case, trainer)
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    meta = any(weight.is_meta for weight in model.parameters())
    return collect(model, trainer.optimizers[0], model.losses), meta
