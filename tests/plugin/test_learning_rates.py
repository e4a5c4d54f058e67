"""Learning rates that differ between ranks are an error on all ranks, before they train a whole epoch."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_overlap import MODES, combined_optimizer
from lightning_overlap.plugin.learning_rates import LearningRates

from ..support.cases import MIXED, TABLE_WISE, Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.pairs import in_turn
from ..support.ranks import Ranks

NUM_STEPS = 12


class Data(Batches):
    def val_dataloader(self) -> DataLoader:
        return self.loader_of(range(2))


class Plateau(Model):
    """Lowers its rates by a metric that rank 1 sees grow and rank 0 sees fall, unless it is reduced."""

    sync_dist = False
    every: ClassVar[dict[str, Any]] = {}  # of the scheduler's config

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, super().configure_optimizers())
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", **self.every}}

    def on_validation_epoch_end(self) -> None:
        value = float(len(self.losses)) * (1 if self.global_rank else -1)
        self.log("val_loss", torch.tensor(value), sync_dist=self.sync_dist)


class Reduced(Plateau):
    sync_dist = True


class InTheMiddle(Plateau):
    every: ClassVar[dict[str, Any]] = {"interval": "step", "frequency": 4}


class ByHand(Model):
    """A rate that depends on the rank, of the dense part alone, from step 4 on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        [group] = self.trainer.optimizers[0].param_groups
        group["lr"] = 0.2 / (1 + (self.global_rank if batch_idx >= 4 else 0))


class Rounds(Model):
    """The rates of hosts that round a cosine otherwise."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        [group] = self.trainer.optimizers[0].param_groups
        group["lr"] = 0.2 * (1 + self.global_rank * 2**-50)


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class UnsizedData(Data):
    def train_dataloader(self) -> DataLoader:
        made = [make_batch(self.case, index, self.trainer.global_rank) for index in range(self.num_batches)]
        return DataLoader(Unsized(made), batch_size=None)


CASES = {"table_wise": TABLE_WISE, "mixed": MIXED}
MODELS = {"plateau": Plateau, "reduced": Reduced, "in the middle": InTheMiddle, "by hand": ByHand, "rounds": Rounds}


def fit(name: str, pipeline: str, case: Case, data: type[Data] = Data, **options: Any) -> tuple[str, int]:
    """Fit for three epochs; return the error and the number of trained batches."""
    model, error = MODELS[name](case), ""
    trainer = make_trainer(make_strategy(model, pipeline), max_epochs=3, num_sanity_val_steps=0, **options)
    try:
        trainer.fit(model, datamodule=data(case, NUM_STEPS))
    except RuntimeError as err:
        error = str(err)
    return error, len(model.losses)


@pytest.mark.parametrize(("pipeline", "case"), in_turn(MODES, ["table_wise", "mixed"]))
def test_a_metric_that_was_not_reduced_is_named(two_ranks: Ranks, pipeline: str, case: str) -> None:
    """At the end of an epoch, before any step at the rates that differ."""
    for error, num in two_ranks.run(fit, "plateau", pipeline, CASES[case], limit_train_batches=4):
        assert "the learning rates differ between ranks: rank 0 has [" in error
        assert "ReduceLROnPlateau monitors 'val_loss', which each rank has computed from its own data" in error
        assert "self.log('val_loss', ..., sync_dist=True)" in error
        assert num == 8


@pytest.mark.parametrize("pipeline", MODES)
@pytest.mark.parametrize("data", [Data, UnsizedData])
def test_the_ranks_stop_within_a_few_steps(two_ranks: Ranks, pipeline: str, data: type[Data]) -> None:
    mode = MODES[pipeline]
    options: dict[str, Any] = {"val_check_interval": 4}
    for error, num in two_ranks.run(fit, "in the middle", pipeline, TABLE_WISE, data, **options):
        assert "the learning rates differ between ranks" in error
        assert 8 <= num <= 8 + mode.depth + 1  # the second validation is the first that is worse
    for error, num in two_ranks.run(fit, "by hand", pipeline, TABLE_WISE, data):
        assert re.search(r"rank 0 has \[0\.2\], rank 1 has \[0\.1\]", error)
        assert "reduce what they depend on" in error
        assert 4 <= num <= 4 + mode.depth + 1


@pytest.mark.parametrize("name", ["reduced", "rounds"])
def test_rates_that_are_alike_are_no_error(two_ranks: Ranks, name: str) -> None:
    for pipeline in ("base", "fused_sparse_dist"):
        assert two_ranks.run(fit, name, pipeline, TABLE_WISE) == [("", 3 * NUM_STEPS)] * 2


def test_constant_rates_are_digested_once() -> None:
    gathered: list[Any] = []
    trainer: Any = type("Trainer", (), {"lr_scheduler_configs": []})()
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.5)
    trainer.optimizers = [optimizer]
    gather: Callable[[Any], list[Any]] = lambda rates: gathered.append(rates) or [rates]  # noqa: E731
    rates = LearningRates(trainer, gather)
    first = rates.now()
    assert rates.now() is first
    optimizer.param_groups[0]["lr"] = 0.25
    assert rates.now().digest != first.digest
    optimizer.param_groups[0]["lr"] = 0.5
    assert rates.now().digest == first.digest
    assert gathered == []
