"""No scheduler of a combined optimizer gives fused tables the dense part's rate without a word."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from lightning_overlap import combined_optimizer
from lightning_overlap.tables.combined_optimizer import DenseAndFused
from lightning_overlap.tables.scheduler_checks import check_schedulers

from ..sparse.update_rates import Scheduled
from ..support.cases import TABLE_WISE, Batches
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks

DENSE, FUSED = 0.001, (0.5, 2.0)
KEEPS = "keeps the ratio of the groups"
WARNS = r"takes all groups of combined_optimizer to (eta_min|min_lr)=1e-05, fused tables as well"
ERROR = r"\w+ with .* would give fused tables the rate of the dense part"


class OneRate(lr_scheduler.LRScheduler):
    """A user's own: the same rate for all groups, from the first step on."""

    def get_lr(self) -> list[Any]:
        return [0.01 * (self.last_epoch + 1)] * len(self.base_lrs)


def cycle(optimizer: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=3, cycle_momentum=False)


SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "LambdaLR": (KEEPS, lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.3 * step)),
    "LambdaLR of one number": (KEEPS, lambda o: lr_scheduler.LambdaLR(o, lambda _: 1e-3)),
    "MultiplicativeLR": (KEEPS, lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9)),
    "StepLR": (KEEPS, lambda o: lr_scheduler.StepLR(o, 3)),
    "MultiStepLR": (KEEPS, lambda o: lr_scheduler.MultiStepLR(o, [2, 5])),
    "ConstantLR": (KEEPS, lambda o: lr_scheduler.ConstantLR(o, 0.2, 4)),
    "LinearLR": (KEEPS, lambda o: lr_scheduler.LinearLR(o)),
    "ExponentialLR": (KEEPS, lambda o: lr_scheduler.ExponentialLR(o, 0.7)),
    "PolynomialLR": (KEEPS, lambda o: lr_scheduler.PolynomialLR(o, 10)),
    "CosineAnnealingLR": (KEEPS, lambda o: lr_scheduler.CosineAnnealingLR(o, 8)),
    "CosineAnnealingLR, eta_min": (WARNS, lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-5)),
    "CosineAnnealingWarmRestarts": (KEEPS, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4)),
    "CosineAnnealingWarmRestarts, eta_min": (
        WARNS,
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=1e-5),
    ),
    "ReduceLROnPlateau": (KEEPS, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0)),
    "ReduceLROnPlateau, min_lr": (WARNS, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=1e-5)),
    "ReduceLROnPlateau, list": (
        KEEPS,
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[1e-5, 0.005, 0.02]),
    ),
    "OneCycleLR": (ERROR, lambda o: lr_scheduler.OneCycleLR(o, 2e-3, 20)),
    "OneCycleLR, list": (KEEPS, lambda o: lr_scheduler.OneCycleLR(o, [0.002, 1.0, 4.0], 20)),
    "CyclicLR": (ERROR, cycle),
    "CyclicLR, base_lr": (ERROR, lambda o: lr_scheduler.CyclicLR(o, 1e-4, [0.001, 0.5, 2.0], cycle_momentum=False)),
    "CyclicLR, lists": (
        KEEPS,
        lambda o: lr_scheduler.CyclicLR(o, [1e-4, 0.05, 0.2], [0.001, 0.5, 2.0], step_size_up=3, cycle_momentum=False),
    ),
    "SequentialLR": (
        KEEPS,
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.8)], [3]),
    ),
    "SequentialLR, later": (ERROR, lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), cycle(o)], [3])),
    "ChainedScheduler": (
        KEEPS,
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.8)]),
    ),
    "ChainedScheduler, inner": (ERROR, lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), cycle(o)])),
    "SWALR": (ERROR, lambda o: SWALR(o, 0.05)),
    "SWALR, list": (KEEPS, lambda o: SWALR(o, [0.001, 0.5, 2.0])),  # type: ignore[arg-type]
    "OneRate": (ERROR, OneRate),
}


def combined() -> DenseAndFused:
    dense = torch.optim.SGD([torch.zeros(1)], DENSE, 0.9)
    return DenseAndFused(dense, {rate: [] for rate in FUSED}, {0.5: ["user_table"], 2.0: ["ad_table", "item_table"]})


def rates(optimizer: DenseAndFused) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_every_scheduler_of_torch_has_a_case() -> None:
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
    known = {kind.__name__ for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)}
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_keeps_the_ratio_or_says_so(name: str) -> None:
    outcome, make = SCHEDULERS[name]
    optimizer = combined()
    scheduler = make(optimizer)
    if outcome is ERROR:
        with pytest.raises(ValueError, match=ERROR):
            check_schedulers([scheduler])
        return
    if outcome is WARNS:
        with pytest.warns(UserWarning, match=WARNS):
            check_schedulers([scheduler])
    else:
        check_schedulers([scheduler])
    for _ in range(12):
        optimizer.set_fused_rates()  # without a second warning
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        if outcome is KEEPS:
            of_dense, *of_tables = rates(optimizer)
            assert of_tables == pytest.approx([of_dense * rate / DENSE for rate in FUSED], rel=1e-6)


def test_the_error_shows_groups_and_the_list_to_write() -> None:
    optimizer = combined()
    for make, arguments in (
        (SCHEDULERS["OneCycleLR"][1], "max_lr=[0.002, 1.0, 4.0]"),
        (cycle, "base_lr=[0.0001, 0.05, 0.2], max_lr=[0.001, 0.5, 2.0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(arguments)) as caught:
            check_schedulers([make(optimizer)])
        groups = "dense lr=0.001, fused (user_table) lr=0.5, fused (ad_table, item_table) lr=2"
        assert f"groups: {groups}" in str(caught.value)
    optimizer = combined()  # the list, as it stands in the message, is accepted
    check_schedulers([lr_scheduler.OneCycleLR(optimizer, [0.002, 1.0, 4.0], 20)])
    assert rates(optimizer) == pytest.approx([0.002 / 25, 1.0 / 25, 4.0 / 25])


def test_equal_rates_are_no_error() -> None:
    optimizer = DenseAndFused(torch.optim.SGD([torch.zeros(1)], 0.5, 0.9), {0.5: []})
    check_schedulers([lr_scheduler.OneCycleLR(optimizer, 2.0, 20)])
    without = DenseAndFused(torch.optim.SGD([torch.zeros(1)], 0.5, 0.9), {})  # as under DDPStrategy
    check_schedulers([lr_scheduler.OneCycleLR(without, 2.0, 20)])


def test_one_rate_for_all_that_is_set_by_hand_is_warned_of_once() -> None:
    optimizer = combined()
    optimizer.set_fused_rates()
    for group in optimizer.param_groups:
        group["lr"] = 0.04
    with pytest.warns(UserWarning, match="lr=2, now at 0.04, 0.04, 0.04") as caught:
        optimizer.set_fused_rates()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    optimizer.set_fused_rates()
    assert len(caught) == 1


def fit(name: str) -> tuple[str, list[float]]:
    """Fit with a scheduler; return the error and this rank's losses."""

    class Own(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = combined_optimizer(self, self.make_dense_optimizer())
            scheduler = lr_scheduler.OneCycleLR(optimizer, {"one": 0.4, "list": [0.4, 4.0]}[name], total_steps=20)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    model, error = Own(TABLE_WISE), ""
    try:
        make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, 3))
    except ValueError as err:
        error = str(err)
    return error, [loss.item() for loss in model.losses]


def test_a_fit_stops_before_its_first_step(two_ranks: Ranks) -> None:
    for error, losses in two_ranks.run(fit, "one"):
        assert "OneCycleLR with max_lr=0.4 would give fused tables the rate of the dense part" in error
        assert "max_lr=[0.4, 4.0]" in error
        assert "fused (t0, t1, t2) lr=2" in error
        assert losses == []
    for error, losses in two_ranks.run(fit, "list"):
        assert error == ""
        assert len(losses) == 3
