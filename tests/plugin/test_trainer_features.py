"""Lightning's callbacks and Trainer arguments: what works equals `base`, what does not is refused by name."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, ModelPruning
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_overlap import MODES, OverlapEmbeddingStrategy

from ..sparse.update_rates import Scheduled
from ..support.cases import MIXED, ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from ..support.reference import Result, collect

NUM_STEPS = 12


def fit(trainer: Trainer, model: Model, num_batches: int) -> Result:
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, datamodule=Batches(model.case, num_batches))
    return collect(model, trainer.optimizers[0], model.losses)


def train(callback: str | None, pipeline: str) -> tuple[Result, Any]:
    """Train three epochs with a callback of `WORKING`; return the end, and what the callback has to show."""
    model = Scheduled(TABLE_WISE)
    made = None if callback is None else WORKING[callback](model)
    trainer = make_trainer(make_strategy(model, pipeline), callbacks=[made] if made else [], max_epochs=3)
    result = fit(trainer, model, 6)
    return result, made.shows() if hasattr(made, "shows") else None


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


REFUSED: dict[str, Any] = {
    "swa": lambda: callbacks.StochasticWeightAveraging(0.1),
    "ema": lambda: callbacks.EMAWeightAveraging(),
    "frozen_backbone": lambda: callbacks.BackboneFinetuning(1),
    "freezes_later": lambda: callbacks.LambdaCallback(
        on_train_epoch_start=lambda _, module: BaseFinetuning.freeze(module.ebc)
    ),
    "prunes_everything": lambda: ModelPruning("l1_unstructured", amount=0.5),
    "batch_size_finder": lambda: callbacks.BatchSizeFinder(),
}


def refuse(what: str) -> tuple[str, int]:
    """Return what the user reads of a callback or a precision, and the number of steps that were trained before."""
    model = Backbone(TABLE_WISE, fused_optimizer=what != "frozen_backbone")
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 1.0}))
    kwargs = {"callbacks": [REFUSED[what]()]} if what in REFUSED else {"precision": what}
    try:
        make_trainer(strategy, **kwargs).fit(model, datamodule=Batches(TABLE_WISE, 2))
    except Exception as err:  # Lightning's own kinds of error too
        return f"{type(err).__name__}: {err}", len(model.losses)
    raise AssertionError("nothing was refused")


def find_rate(folder: str, pipeline: str) -> tuple[Result, Result, list[float]]:
    results = []
    searched: list[float] = []

    class Finds(LearningRateFinder):
        def lr_find(self, trainer: Trainer, module: Any) -> None:
            super().lr_find(trainer, module)
            module.losses.clear()
            searched.extend(self.optimal_lr.results["lr"])

    for finders in ([], [Finds(num_training_steps=5, early_stop_threshold=None, update_attr=False)]):
        model = Scheduled(ROWWISE_ADAGRAD)
        trainer = make_trainer(make_strategy(model, pipeline), callbacks=finders, default_root_dir=folder, max_epochs=2)
        results.append(fit(trainer, model, 8))
    return results[0], results[1], searched


class Configured(Scheduled):
    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case)
        self.made_on = device
        for name in case.collections:
            delattr(self, name)

    def configure_model(self) -> None:
        for name in self.case.collections:
            if not hasattr(self, name):
                self.add_module(name, getattr(Model(self.case, device=self.made_on), name))


def train_made(how: str, case: Case) -> tuple[Result, bool]:
    """Train a module made so; return the end, and whether anything was left on meta."""
    trainer = make_trainer(make_strategy(Model(case)))
    if how.startswith("configure_model"):
        model: Model = Configured(case, how.removeprefix("configure_model on "))
    else:
        with nullcontext() if how == "plain" else trainer.init_module(empty_init=how == "init_module, empty"):
            model = Scheduled(case)
    result = fit(trainer, model, NUM_STEPS)
    return result, any(weight.is_meta for weight in model.parameters())


EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and name != "base"]


@pytest.mark.parametrize("callback", WORKING)
def test_a_callback_works_in_every_mode(two_ranks: Ranks, callback: str) -> None:
    expected = two_ranks.run(train, callback, "base")
    without = two_ranks.run_once(train, None, "base")
    for pipeline in EARLY:
        for mine, theirs in zip(two_ranks.run(train, callback, pipeline), expected, strict=True):
            assert mine[0].differences(theirs[0]) == [], pipeline
            assert mine[1] is theirs[1] is None or torch.equal(mine[1], theirs[1])
    assert (expected[0][0].differences(without[0][0]) != []) == (callback != "AveragesDense")  # which only watches


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("swa", ["StochasticWeightAveraging cannot be used with sharded tables", "ExponentialMovingAverage("]),
        ("ema", ["EMAWeightAveraging cannot be used with sharded tables", "ExponentialMovingAverage("]),
        ("frozen_backbone", ["BackboneFinetuning cannot", "rate with combined_optimizer", "'Tables that train later'"]),
        ("prunes_everything", ["ModelPruning cannot be used", "parameters_to_prune="]),
        ("batch_size_finder", ["MisconfigurationException", "not supported with distributed strategies"]),
        ("16-true", ["precision='16-true'", "bf16-mixed"]),
        ("bf16-true", ["precision='bf16-true'", "bf16-mixed"]),
        ("64-true", ["precision='64-true'", "32-true"]),
    ],
)
def test_refused_on_every_rank_before_the_first_step(two_ranks: Ranks, what: str, parts: list[str]) -> None:
    if what == "ema" and not hasattr(callbacks, "WeightAveraging"):
        pytest.skip("Lightning 2.6 has it")
    for message, num_steps in two_ranks.run(refuse, what):
        assert [part for part in parts if part not in message] == [], message
        assert num_steps == 0


def test_a_table_cannot_be_frozen_once_it_is_sharded(ranks: Ranks) -> None:
    for message, num_steps in ranks.run(refuse, "freezes_later"):
        assert ".weight cannot be frozen (requires_grad=False) any more: the table is sharded" in message
        assert "Freeze it before fit" in message
        assert num_steps == 0


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_learning_rate_finder_leaves_no_trace(ranks: Ranks, pipeline: str, tmp_path: Path) -> None:
    for without, with_it, searched in ranks.run(find_rate, str(tmp_path), pipeline):
        assert len(set(searched)) == 5
        assert with_it.differences(without) == []


@pytest.mark.parametrize("case", [TABLE_WISE, MIXED], ids=lambda case: case.name)
@pytest.mark.parametrize("how", ["init_module", "init_module, empty", "configure_model on cpu"])
def test_wherever_the_module_is_made(ranks: Ranks, how: str, case: Case) -> None:
    expected = ranks.run_once(train_made, "plain", case)
    for (mine, meta), (theirs, _) in zip(ranks.run(train_made, how, case), expected, strict=True):
        assert not meta
        assert mine.differences(theirs) == []


def test_tables_made_on_meta_in_configure_model(ranks: Ranks) -> None:
    """They come to life as shards, with weights of their own, and train."""
    for result, meta in ranks.run(train_made, "configure_model on meta", TABLE_WISE):
        assert not meta
        assert result.losses.isfinite().all()
        assert len(result.losses.unique()) == NUM_STEPS
