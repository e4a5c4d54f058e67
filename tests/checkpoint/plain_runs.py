"""Checkpoints of runs without the strategy, and runs that go on from them. Functions that ranks run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import lr_scheduler
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer

from ..support.cases import ADAGRAD, Batches, Case, Model, make_batch
from ..support.fits import make_trainer
from .checkpoints import parts_of, zeroed

EPOCH = 6
CASE: Case = ADAGRAD
Optimizer = tuple[str, dict[str, Any]]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 4),
}


@dataclass
class GoneOn:
    losses: list[Tensor]
    whole: dict[str, Any]  # this rank's parts of tables and of their state: (window, values)
    dense: dict[str, Tensor]
    said: list[str]
    rates: list[float]


class Plain(Model):
    """Trains its tables with the optimizer of the dense part, but for those that a strategy trains in backward."""

    def __init__(
        self, optimizer: Optimizer = ("SGD", {"lr": 0.1}), groups: str = "one", schedule: str = "", case: Case = CASE
    ) -> None:
        super().__init__(case, fused_optimizer=False)
        self.optimizer, self.groups, self.schedule = optimizer, groups, schedule

    def configure_optimizers(self) -> Any:
        name, kwargs = self.optimizer
        named = dict(in_backward_optimizer_filter(self.named_parameters()))
        tables = [weight for key, weight in named.items() if key.startswith("ebc.")]
        dense = [weight for key, weight in named.items() if not key.startswith("ebc.")]
        groups: list[Any] = [*tables, *dense]
        if self.groups == "tables last":
            groups = [*dense, *tables]
        elif self.groups == "two":
            groups = [{"params": dense}, *([{"params": tables, "lr": 0.5}] if tables else [])]
        elif self.groups == "other order":
            groups = [*dense[::-1], *tables]
        optimizer = combined_optimizer(self, getattr(torch.optim, name)(groups, **kwargs))
        if not self.schedule:
            return optimizer
        return [optimizer], [SCHEDULES[self.schedule](optimizer)]


def train_plain(path: str, optimizer: Optimizer, groups: str = "one", schedule: str = "", case: Case = CASE) -> Any:
    """Train two epochs under DDPStrategy; save after the first. Return losses, weights and states of the second."""
    model = Plain(optimizer, groups, schedule, case)
    for epochs in (1, 2):
        trainer = make_trainer(DDPStrategy(), max_epochs=epochs)
        trainer.fit(model, datamodule=Batches(case, EPOCH), ckpt_path=path if epochs == 2 else None)
        if epochs == 1:
            trainer.save_checkpoint(path)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return model.losses[EPOCH:], weights


def go_on(
    path: str,
    optimizer: Optimizer,
    fused: tuple[Any, dict[str, Any]] | None,
    groups: str = "one",
    sharding: Any = "table_wise",
    epochs: int = 2,
    schedule: str = "",
    replicated: Any = False,
    case: Case = CASE,
) -> Any:
    model: Any = zeroed(Plain(optimizer, groups, schedule, case))
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=fused, replicate_tables=replicated)
    trainer = make_trainer(strategy, max_epochs=epochs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, datamodule=Batches(case, EPOCH), ckpt_path=path)
        except (RuntimeError, ValueError) as err:
            return f"{type(err).__name__}: {err}"
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    dense = {n: w.detach().clone() for n, w in model.named_parameters() if not n.startswith("ebc.")}
    parts = {} if replicated else parts_of(model, trainer)  # which looks for shards
    return GoneOn(model.losses, parts, dense, [str(each.message) for each in said], rates)


def evaluate(path: str) -> list[tuple[Tensor, Tensor]]:
    plain = Plain()
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    expected = plain(make_batch(CASE, 0, dist.get_rank())).detach()
    answers = []
    for function in ("validate", "test"):
        model = Plain()
        model.test_step = model.validation_step  # type: ignore[attr-defined]
        data = Batches(CASE, 1)
        data.val_dataloader = data.test_dataloader = data.train_dataloader  # type: ignore[method-assign]
        strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 1}))
        getattr(make_trainer(strategy), function)(model, datamodule=data, ckpt_path=path, verbose=False)
        answers.append((model.validated, expected))
    return answers
