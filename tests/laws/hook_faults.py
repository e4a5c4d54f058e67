"""Fits in which a hook of the user raises on one rank while a checkpoint is written. Functions that ranks run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy

from ..checkpoint.checkpoints import Evaluated, EvaluatedBatches
from ..support.cases import ROWWISE_ADAGRAD
from ..support.fits import QUIET
from .faults import InjectedError

NUM_BATCHES = 6
TIMEOUT_S = 40.0  # of the process group
OFTEN = (  # hooks that a fit calls for each batch, as those with "batch" in their name
    *("training_step", "on_before_backward", "backward", "on_after_backward", "on_before_zero_grad"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "on_save_checkpoint", "state_dict"),
)
HOOKS = (
    *(("module", hook) for hook in (*OFTEN[:-1], "setup", "configure_optimizers", "validation_step", "on_train_end")),
    *(("module", f"on_{part}_{end}") for part in ("fit", "train", "train_epoch") for end in ("start", "end")),
    *(("module", hook) for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")),
    *(("data", hook) for hook in ("setup", "train_dataloader", "val_dataloader", "state_dict", "teardown")),
    *(
        (owner, f"on_{kind}_{end}")
        for owner in ("module", "callback")
        for kind in ("train_batch", "validation_batch", "validation", "validation_epoch")
        for end in ("start", "end")
    ),
    *(("callback", hook) for hook in ("setup", "state_dict", "on_save_checkpoint", "teardown")),
)


class Ended(NamedTuple):
    """How a fit ended on a rank."""

    said: str  # the error
    notes: list[str]
    seconds: float


def fail_in_hook(
    folder: str, port: int, hook: tuple[str, str], rank: int, pipeline: str, options: dict[str, Any]
) -> Ended:
    """Fit, saving after each step, and end as a process does whose error nobody catches."""
    if dist.is_initialized():  # the strategy makes the default group, and knows its connections
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)

    class Module(Evaluated):
        pass

    class Data(EvaluatedBatches):
        pass

    class OfUser(Callback):
        pass

    owner = {"module": Module, "data": Data, "callback": OfUser}[hook[0]]
    _raise_in(owner, hook[1], rank)
    return _fit(Module, Data, OfUser, pipeline, options, TIMEOUT_S, folder)


def save_alone(folder: str, port: int, rank: int, pipeline: str) -> Ended:
    """Fit; one rank alone saves in a hook. End as a process does."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)

    class OfUser(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank == rank:
                trainer.save_checkpoint(f"{folder}/alone.ckpt")

    return _fit(Evaluated, EvaluatedBatches, OfUser, pipeline, {}, 6.0, folder)


def _fit(
    module: type, data: type, of_user: type, pipeline: str, options: dict[str, Any], timeout_s: float, folder: str
) -> Ended:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    strategy = OverlapEmbeddingStrategy(
        pipeline, sharding="table_wise", timeout=timedelta(seconds=timeout_s), calm_libraries=True, **options
    )
    arguments = {**QUIET, "enable_checkpointing": True, "val_check_interval": 3, "num_sanity_val_steps": 0}
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, callbacks=[of_user(), saver], **arguments
    )
    began = time.monotonic()
    try:
        trainer.fit(module(ROWWISE_ADAGRAD), datamodule=data(ROWWISE_ADAGRAD, NUM_BATCHES))
    except (InjectedError, RuntimeError, OSError) as err:
        seconds = time.monotonic() - began
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(err), err, err.__traceback__)
        return Ended(f"{type(err).__name__}: {err}", getattr(err, "__notes__", []), seconds)
    return Ended("nothing", [], time.monotonic() - began)


def _raise_in(owner: type, name: str, rank: int) -> None:
    """Let a hook raise on one rank, in the middle of the fit if it is called often: a training hook in step 5 of 6."""
    hook, at_call, num_calls = getattr(owner, name), 5 if "batch" in name or name in OFTEN else 1, 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call and dist.get_rank() == rank:
            raise InjectedError(name)
        return hook(*args, **kwargs)

    setattr(owner, name, faulty)
