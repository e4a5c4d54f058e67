"""Schedulers of a combined optimizer: refuse those that would give fused tables the dense part's rates."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from ..distributed import warn_on_rank_zero
from .combined_optimizer import DenseAndFused

_SCALE = (
    *(lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR, lr_scheduler.StepLR, lr_scheduler.MultiStepLR),
    *(lr_scheduler.ConstantLR, lr_scheduler.LinearLR, lr_scheduler.ExponentialLR, lr_scheduler.PolynomialLR),
    *(lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.ReduceLROnPlateau),
    *(lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler),
)
"""Schedulers that scale the rate that each group has; the last two do as their schedulers do."""


def check_schedulers(schedulers: Iterable[Any]) -> None:
    """Raise a ValueError if a scheduler of a combined optimizer sets one rate for groups with different rates.

    Torch's OneCycleLR, CyclicLR and SWALR make one number the rate of every group, and so of the tables. Which rates
    belong together only the user knows: the error shows the list to begin with. A scheduler of another class is judged
    by the rates that it has set when it was made. A lowest rate (`eta_min`, `min_lr`) is only warned of.
    """
    for scheduler in schedulers:
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, DenseAndFused) and optimizer.fused_groups:
            for each in _with_inner(scheduler):
                _check(each, optimizer)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it holds, as SequentialLR and ChainedScheduler do."""
    yield scheduler
    for value in getattr(scheduler, "__dict__", {}).values():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, lr_scheduler.LRScheduler):
                yield from _with_inner(one)


def _check(scheduler: Any, optimizer: DenseAndFused) -> None:
    set_rates: dict[str, list[float]] = {}
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        set_rates = {"max_lr": _of_groups(optimizer, "max_lr")}
    elif isinstance(scheduler, lr_scheduler.CyclicLR):
        set_rates = {"base_lr": _floats(scheduler.base_lrs), "max_lr": _floats(scheduler.max_lrs)}
    elif isinstance(scheduler, SWALR):
        set_rates = {"swa_lr": _of_groups(optimizer, "swa_lr")}
    elif not isinstance(scheduler, _SCALE):
        set_rates = {"lr": _of_groups(optimizer, "lr")}
    overwritten = {name: rates for name, rates in set_rates.items() if optimizer.is_overwritten(rates)}
    if overwritten:
        raise ValueError(_refusal(type(scheduler).__name__, overwritten, optimizer))
    _warn_of_lowest_rate(scheduler, optimizer)


def _refusal(scheduler: str, overwritten: dict[str, list[float]], optimizer: DenseAndFused) -> str:
    shown = " and ".join(f"{name}={rates[0]:g}" for name, rates in overwritten.items())
    lists = ", ".join(f"{name}={_in_ratio(rates, optimizer)}" for name, rates in overwritten.items())
    return (
        f"{scheduler} with {shown} would give fused tables the rate of the dense part: it sets one rate for all groups "
        f"of combined_optimizer.\n  groups: {optimizer.described()}\n"
        f"Give {scheduler} a list with a rate for each group; in the ratio of their own rates it is\n"
        f"  {lists}\n"
        "If tables are to have the dense part's rate, give their fused optimizer that rate as its lr."
    )


def _warn_of_lowest_rate(scheduler: Any, optimizer: DenseAndFused) -> None:
    """Warn of a lowest rate for all groups: the ratio of their rates ends there."""
    if isinstance(scheduler, (lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts)):
        name, lowest = "eta_min", [float(scheduler.eta_min)] * len(optimizer.param_groups)
        way = "With eta_min=0, or a LambdaLR with a function for each group, each group keeps its share."
    elif isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        name, lowest = "min_lr", _floats(scheduler.min_lrs)
        way = f"In the ratio of their own rates it is min_lr={_in_ratio(lowest, optimizer)}."
    else:
        return
    if optimizer.is_overwritten(lowest):
        optimizer.has_warned = True
        warn_on_rank_zero(
            f"{type(scheduler).__name__} takes all groups of combined_optimizer to {name}={lowest[0]:g}, fused tables "
            f"as well, though they begin at different rates ({optimizer.described()}). {way}"
        )


def _in_ratio(rates: list[float], optimizer: DenseAndFused) -> list[float]:
    """Return a rate for each group: that of the first one, times the ratio of the groups' own rates."""
    first = next((rate for rate in optimizer.first_rates if rate), 1.0)
    return [float(f"{rates[0] * own / first:.6g}") for own in optimizer.first_rates]


def _of_groups(optimizer: DenseAndFused, name: str) -> list[float]:
    return _floats([group[name] for group in optimizer.param_groups if name in group])


def _floats(rates: Iterable[float | torch.Tensor]) -> list[float]:
    return [float(rate) for rate in rates]
