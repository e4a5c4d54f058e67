"""Runs whose embeddings and gradients are sent in fewer bits. Functions that ranks run."""

import contextlib
import io
import warnings
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

from lightning_overlap import OverlapEmbeddingStrategy, OverlapMonitor
from lightning_overlap.tables import quantized_comms as overflow

from ..support.cases import TABLE_WISE, Batches, Case, Model, TableSpec, make_plan
from ..support.fits import make_strategy, make_trainer


def fp16(backward_loss_scale: float | None) -> QCommsConfig:
    return QCommsConfig(CommType.FP16, CommType.FP16, backward_loss_scale=backward_loss_scale)


LOUD_STEP = 3


class Loud(Model):
    """In one step the gradients of rank 1's embeddings are so many times as large."""

    factor = 1.0

    def _pool(self, rows: Any, table: TableSpec, feature: str) -> Tensor:
        pooled = super()._pool(rows, table, feature)
        if len(self.losses) == LOUD_STEP and self.global_rank == 1:
            pooled.register_hook(lambda gradient: gradient * self.factor)
        return pooled


@dataclass
class Said:
    """What was said of gradients on one rank."""

    messages: list[str]
    while_training: int  # how many of them before the last step


def said(pipeline: str, comms: Any, factor: float = 1.0, num_steps: int = 12, ask_every: int = 64) -> Said:
    """Train with loud gradients, of which next to nothing reaches the tables."""
    case = replace(TABLE_WISE, optimizer=(torch.optim.SGD, {"lr": 1e-12}))
    model = Loud(case)
    model.factor = factor
    counts: list[int] = []

    class Counts(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(len(messages()))

    def messages() -> list[str]:
        return [str(one.message) for one in caught if "quantized_comms" in str(one.message)]

    strategy = make_strategy(model, pipeline, quantized_comms=comms)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(overflow, "ASK_EVERY", ask_every):
        warnings.simplefilter("always")
        make_trainer(strategy, callbacks=[Counts()]).fit(model, datamodule=Batches(case, num_steps))
    return Said(messages(), counts[-1])


def fit_again(case: Case, first: Any, second: Any) -> str:
    model = Model(case)
    plan = make_plan(case, model, dist.get_world_size())
    for comms in (first, second):
        strategy = OverlapEmbeddingStrategy(sharding=plan, quantized_comms=comms)
        try:
            make_trainer(strategy).fit(model, datamodule=Batches(case, 3))
        except ValueError as err:
            return str(err)
    return ""


def bytes_sent(case: Case, pipeline: str, comms: Any) -> tuple[dict[str, tuple[float, float]], str]:
    """Return what a monitor counts in a step, sent and saved by stage, and what it prints."""
    model, monitor, printed = Model(case), OverlapMonitor(every_n_steps=4, audit=False), io.StringIO()
    strategy = make_strategy(model, pipeline, quantized_comms=comms)
    with contextlib.redirect_stdout(printed):
        make_trainer(strategy, callbacks=[monitor]).fit(model, datamodule=Batches(case, 10))
    traffic = monitor.accounts[0].traffic
    return {str(stage): (one.sent, one.saved) for stage, one in traffic.items()}, printed.getvalue()


def losses_of(case: Case, comms: Any) -> Tensor:
    model = Model(case)
    strategy = make_strategy(model, quantized_comms=comms)
    make_trainer(strategy).fit(model, datamodule=Batches(case))
    return torch.stack(model.losses)
