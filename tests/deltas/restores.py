"""Functions that ranks run: trainings that send their rows, and trainings that begin from what was sent."""

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_overlap import EmbeddingDeltas
from lightning_overlap.checkpoint import ITERATION, fused_state
from lightning_overlap.deltas import DiskStore, StoreError
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.tables import ShardedStateNames, kernel_shards

from ..plugin.strategies import logged
from ..support.cases import Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from .delta_fits import Windows, shards_of


class Small(Batches):
    make = staticmethod(partial(make_batch, batch_size=4))


@dataclass
class State:
    """What a rank's module has: shards of tables, their states for each column, and the dense part."""

    tables: Windows
    states: Windows
    dense: dict[str, Tensor]
    counts: dict[str, Tensor]  # numbers of updates of the fused tables


def state_of(module: LightningModule) -> State:
    states: Windows = {}
    for kernel in kernel_shards(module):
        for shard, of_shard in zip(kernel.shards, kernel.states(), strict=True):
            for kind, values in of_shard.items():
                wide = values.reshape(len(values), -1).expand(-1, shard.weight.shape[1])
                states[f"{shard.name}/{kind}", shard.first_row, shard.first_column] = wide.clone()
    inside = ShardedStateNames(module)
    dense = {name: value.clone() for name, value in module.state_dict().items() if name not in inside}
    counts = {key.weight: value for key, value in fused_state(module).items() if key.kind == ITERATION}
    dense = {name: value for name, value in dense.items() if "embedding" not in name}
    return State(shards_of(module), states, dense, counts)


@dataclass
class Seen(Callback):
    """The state after each step of a fit, and before the first; the losses; what the log said of deltas."""

    by_step: dict[int, State] = field(default_factory=dict)
    first: Any = None
    last: Any = None  # after the fit
    losses: list[Tensor] = field(default_factory=list)
    counts: tuple[int, int, int] = (0, 0, 0)  # epoch, global step and number of batches before the first step
    words: str = ""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.first = state_of(module)
        num_batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.counts = trainer.current_epoch, trainer.global_step, num_batches

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.by_step[trainer.fit_loop.epoch_loop.total_batch_idx + 1] = state_of(module)


def train(
    case: Case,
    pipeline: str = "fused_sparse_dist",
    *,
    send_to: Any = None,
    every_n_steps: int = 1,
    num_steps: int = 6,
    deltas: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    save: str | None = None,
    **kwargs: Any,
) -> Seen:
    """Train, from a checkpoint or what was sent to an address; save a checkpoint in the end."""
    module, seen = Model(case), Seen()
    senders = [] if send_to is None else [EmbeddingDeltas(send_to, every_n_steps, **(deltas or {}))]
    trainer = make_trainer(make_strategy(module, pipeline), callbacks=[*callbacks, *senders, seen], **kwargs)
    with logged(LOGGER) as words:
        trainer.fit(module, datamodule=Small(case, num_steps), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    seen.losses, seen.words = module.losses, "\n".join(line for line in words if "begins from" in line)
    seen.last = state_of(module)
    return seen


def error_of(*args: Any, **kwargs: Any) -> str:
    """Return what a training raises, with its notes."""
    try:
        train(*args, **kwargs)
    except Exception as err:
        return "\n".join([f"{type(err).__name__}: {err}", *getattr(err, "__notes__", ())])
    return ""


def error_where_rank_1_cannot_read(*args: Any, **kwargs: Any) -> str:
    def read(self: DiskStore, name: str) -> bytes:
        raise StoreError("this host has no such disk")

    patch = mock.patch.object(DiskStore, "read", read) if dist.get_rank() == 1 else nullcontext()
    with patch:
        return error_of(*args, **kwargs)


def error_and_words(case: Case, ckpt_path: str) -> tuple[str, str]:
    """Return what a training raises, with all of its causes, and what Lightning logs."""
    module = Model(case)
    trainer = make_trainer(make_strategy(module))
    with logged("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero") as words:
        try:
            trainer.fit(module, datamodule=Small(case), ckpt_path=ckpt_path)
        except Exception:
            return traceback.format_exc(), "\n".join(words)
    return "", ""


class Evaluated(Small):
    def val_dataloader(self) -> Any:
        return self.loader_of(range(2))


def validate(case: Case, ckpt_path: str) -> State:
    module = Model(case)
    trainer = make_trainer(make_strategy(module))
    trainer.validate(module, datamodule=Evaluated(case), ckpt_path=ckpt_path)
    return state_of(module)
