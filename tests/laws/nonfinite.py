"""Fits with losses that are not finite on one rank, and the loops that leave these batches out. Ranks run these."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.plugin.nonfinite import NonfiniteLosses

from ..sparse import update_rates
from ..support import cases, reference
from ..support.cases import NUM_STEPS, Batch, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Delayed, Result, collect
from ..support.windows import Window, train_windows, windows_of
from ..tables import supported_modules
from ..tables.replicas import strategy_of
from ..tables.supported_modules import Outcome

LOSSES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "zero": 0.0}
KINDS = ("nan", "inf", "-inf", "input", "weights")
"""What is not finite: the loss alone, the dense input, or the weights of the ids."""


@dataclass(frozen=True)
class Bad:
    """Batches whose loss is not finite on one rank."""

    batches: frozenset[int]
    rank: int = 0
    kind: str = "nan"


class Poisoned(Model):
    """Trains on losses of which some are not finite; notes 0 in their place."""

    bad: Bad

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch.inputs["sparse"][1] not in self.bad.batches:
            return super().training_step(batch, batch_idx)
        self.losses.append(torch.zeros(()))
        here = self.bad.rank == dist.get_rank()
        if here and self.bad.kind == "input":
            batch = dataclasses.replace(batch, dense=torch.full_like(batch.dense, torch.nan))
        loss = self(batch)
        return loss * LOSSES[self.bad.kind] if here and self.bad.kind in LOSSES else loss


class ByHand(cases.ByHand, Poisoned):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=bool(batch_idx % 2))
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Scheduled(Poisoned, update_rates.Scheduled):
    """One scheduler for the dense optimizer and the fused tables."""


class Gated(Poisoned):
    """Has a dense weight whose gradient is not zero in the first batches, and zeros from then on."""

    set_to_none = True  # whether the optimizer zeroes gradients by None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.gate = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (self.gate * (batch_idx < 2)).exp().mean()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=self.set_to_none)


class Data(cases.Batches):
    bad: Bad
    leaves_out = False  # whether there are no such batches

    def batches(self) -> Iterator[Batch]:
        rank = self.trainer.global_rank
        for index in range(self.num_batches):
            batch = make_batch(self.case, index, rank)
            if index in self.bad.batches and self.leaves_out:
                continue
            if self.bad.kind == "weights" and rank == self.bad.rank and index in self.bad.batches:
                batch.inputs["sparse"][0].weights().fill_(torch.nan)
            yield batch

    def train_dataloader(self) -> DataLoader:
        return DataLoader(list(self.batches()), batch_size=None)


def fit(
    case: Case,
    pipeline: str,
    bad: Bad,
    *,
    k: int = 1,
    by_hand: bool = False,
    known_late: bool = False,
    nonfinite: Any = "skip",
    leaves_out: bool = False,
    replicated: Sequence[str] = (),
    scheduled: bool = False,
    device_type: str = "cpu",
) -> tuple[Result, int, str]:
    """Train; return what came out, the number of backwards that trained nothing, and the error, if any."""
    model, data = (ByHand if by_hand else Scheduled if scheduled else Poisoned)(case), Data(case)
    model.bad = data.bad = bad
    data.leaves_out = leaves_out
    if replicated:
        strategy = strategy_of(case, pipeline, replicated, nonfinite=nonfinite)
    else:
        options = {"nonfinite": nonfinite, "quantized_comms": case.comms}
        strategy = make_strategy(model, pipeline, device_type, **options)
    trainer = make_trainer(strategy, device_type, **({} if by_hand else {"accumulate_grad_batches": k}))
    error = ""
    with knowing_late() if known_late else nullcontext():
        try:
            trainer.fit(model, datamodule=data)
        except RuntimeError as err:
            error = str(err)
    return collect(model, trainer.optimizers[0], model.losses), strategy.num_nonfinite, error


class _Labelled(supported_modules.Batches):
    """Batches of which some have labels that are not finite on rank 1, or lack these batches."""

    bad: frozenset[int]
    leaves_out: bool

    def loader_of(self, indices: range) -> DataLoader:
        batches = super().loader_of(indices).dataset
        for index in self.bad if self.trainer.global_rank == 1 else ():
            batches[index].labels.fill_(torch.nan)
        kept = [one for index, one in enumerate(batches) if index not in self.bad or not self.leaves_out]
        return DataLoader(kept, batch_size=None, generator=torch.Generator())


@supported_modules.dense_kernels_without_pooling()
def fit_kind(name: str, pipeline: str, bad: frozenset[int], *, leaves_out: bool, known_late: bool) -> Outcome:
    """Train a module of TorchRec's of some kind; return the losses that are finite, and all state."""
    module = supported_modules.KindModel(name)
    data = _Labelled(module.case)
    data.bad, data.leaves_out = bad, leaves_out
    plan = supported_modules.make_plan(module)
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding=plan, nonfinite="skip"), limit_val_batches=0)
    with knowing_late() if known_late else nullcontext():
        trainer.fit(module, datamodule=data)
    trained = [loss for index, loss in enumerate(module.losses) if leaves_out or index not in bad]
    return Outcome(torch.stack(trained), supported_modules.collect(module, trainer.optimizers[0]))


def fit_without_tables(bad: frozenset[int], *, leaves_out: bool) -> list[Tensor]:
    """Train a module without tables; return its weights."""
    module, rank = BoringModel(), dist.get_rank()
    torch.manual_seed(3)
    batches = torch.randn(8, 2, 4, 32)[:, rank]
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    batches[sorted(bad) if rank == 1 else []] = torch.inf
    kept = [batch for index, batch in enumerate(batches) if index not in bad or not leaves_out]
    trainer = make_trainer(OverlapEmbeddingStrategy(nonfinite="skip"), limit_val_batches=0)
    trainer.fit(module, DataLoader(kept, batch_size=None))
    assert trainer.strategy.num_nonfinite == (0 if leaves_out else len(bad))
    return [parameter.detach().clone() for parameter in module.parameters()]


def knowing_late() -> Any:
    """Within this context the host knows only after a backward whether its loss was finite, as on CUDA."""
    make = NonfiniteLosses.__init__

    def late(self: NonfiniteLosses, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._knows_late = True

    return mock.patch.object(NonfiniteLosses, "__init__", late)


def fit_gated(kind: str, *, set_to_none: bool, known_late: bool) -> Result:
    """Accumulate two batches a step; the loss of the fourth is not finite, or 0. Return what came out."""
    model = Gated(dataclasses.replace(cases.TABLE_WISE, dense=(torch.optim.Adam, {"lr": 0.02})))
    data = Data(model.case, 8)
    model.bad = data.bad = Bad(frozenset({3}), kind=kind)
    model.set_to_none = set_to_none
    trainer = make_trainer(make_strategy(model, nonfinite="skip"), accumulate_grad_batches=2)
    with knowing_late() if known_late else nullcontext():
        trainer.fit(model, datamodule=data)
    assert trainer.strategy.num_nonfinite == (kind != "zero")
    return collect(model, trainer.optimizers[0], model.losses)


def left_out(
    case: Case, pipeline: str, bad: Bad, *, k: int = 1, num_steps: int = NUM_STEPS, scheduled: bool = False
) -> Result:
    """The plain loop in which these batches train nothing."""
    staleness = MODES[pipeline].staleness
    if staleness:
        assert k == 1
        found = reference.train_delayed(case, Delayed(staleness), untrained=bad.batches, num_steps=num_steps)
        losses = list(found.losses)
    else:
        kept = {
            step: Window(batches, k)
            for step, window in enumerate(windows_of(num_steps, k))
            if (batches := tuple(one for one in window.batches if one not in bad.batches))
        }
        rates = [update_rates.factor(step) if scheduled else 1.0 for step in kept]
        found = train_windows(case, list(kept.values()), factor=rates.__getitem__)
        trained = iter(found.losses)
        losses = [torch.zeros(()) if step in bad.batches else next(trained) for step in range(num_steps)]
    for step in bad.batches:
        losses[step] = torch.zeros(())
    return dataclasses.replace(found, losses=torch.stack(losses))


def messages(bad: Bad) -> list[str]:
    """Return what a fit logs about losses that are not finite."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # that of its parent lets errors through alone
    try:
        fit(cases.TABLE_WISE, "fused_sparse_dist", bad)
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    return [text for text in found if "not finite" in text]
