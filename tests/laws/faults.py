"""Faults by (place, batch, rank) and fits that meet them. Functions that ranks run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset
from torchrec.distributed.types import ShardedModule

from ..support.cases import MIXED, Batch, Batches, Case, Model, dense_optimizer, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

NUM_BATCHES = 6
VALIDATION = 100  # index of the first validation batch


class InjectedError(Exception):
    """Nobody else raises this one."""


@dataclass
class Fault:
    place: str  # "issue embedding_lookup" and the like (what an observer is told), or one of `Faulty`'s hooks
    batch: int
    ranks: Sequence[int] = (0, 1)
    signum: int | None = None  # the signal that the rank gets; None: an error is raised there
    group: bool = False  # the whole process group gets the signal, as a terminal sends it
    happened: bool = False

    def after(self, place: str, batch: int) -> None:
        if self.happened or (place, batch) != (self.place, self.batch) or int(os.environ["RANK"]) not in self.ranks:
            return
        self.happened = True
        if self.signum is None:
            raise InjectedError(str(self))
        os.kill(0 if self.group else os.getpid(), self.signum)

    def observe(self, kind: str, stage: Any, batch: int) -> None:
        self.after(f"{kind} {stage}", batch)

    def __str__(self) -> str:
        return f"{self.place} of batch {self.batch}"


NOWHERE = Fault("nowhere", 0)
DATA = (
    *(Fault("__iter__", 0), Fault("__getitem__", 0), Fault("__getitem__", 4)),
    *(Fault("on_before_batch_transfer", 4), Fault("transfer_batch_to_device", 0), Fault("on_after_batch_transfer", 5)),
)
WORKER = (Fault("worker", 0),)  # a loader's process, which dies
HOOKS = (
    *(Fault("on_train_batch_start", 3), Fault("training_step", 0), Fault("training_step", 3)),
    *(Fault("on_after_backward", 3), Fault("optimizer.step", 2), Fault("callback", 3), Fault("callback", 5)),
    *(Fault("validation_step", VALIDATION), Fault("configure_optimizers", 0)),
)


def index_of(batch: Batch) -> int:
    return int(batch.inputs["sparse"][1])


def _fails_at(place: str) -> Callable[..., Batch]:
    def hook(self: Faulty, batch: Batch, *args: Any) -> Batch:
        self.fault.after(place, index_of(batch))
        return batch

    return hook


class Faulty(Model):
    def __init__(self, case: Case, fault: Fault) -> None:
        super().__init__(case)
        self.fault = fault

    on_before_batch_transfer = _fails_at("on_before_batch_transfer")
    transfer_batch_to_device = _fails_at("transfer_batch_to_device")
    on_after_batch_transfer = _fails_at("on_after_batch_transfer")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.fault.after("on_train_batch_start", batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fault.after("training_step", batch_idx)
        return loss

    def on_after_backward(self) -> None:
        self.fault.after("on_after_backward", self.trainer.fit_loop.epoch_loop.batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.fault.after("validation_step", index_of(batch))
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fault.after("configure_optimizers", 0)
        optimizer = dense_optimizer(self)
        optimizer.register_step_post_hook(lambda *_: self.fault.after("optimizer.step", self.trainer.global_step))
        return optimizer


class FaultyCallback(Callback):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.fault.after("callback", trainer.fit_loop.epoch_loop.batch_idx)


class _FaultyDataset(Dataset):
    def __init__(self, case: Case, fault: Fault, indices: range, rank: int) -> None:
        self.case, self.fault, self.indices, self.rank = case, fault, indices, rank

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Batch:
        index = self.indices[place]
        self.fault.after("__getitem__", index)
        if self.fault.place == "worker" and self.fault.batch == index:
            os._exit(3)  # as if the kernel had killed it for its memory
        return make_batch(self.case, index, self.rank)


class _FaultyLoader(DataLoader):
    def __iter__(self) -> Iterator[Batch]:
        self.dataset.fault.after("__iter__", 0)
        return super().__iter__()


class FaultyBatches(Batches):
    def __init__(self, case: Case, fault: Fault) -> None:
        super().__init__(case, NUM_BATCHES)
        self.fault = fault

    def train_dataloader(self) -> DataLoader:
        dataset = _FaultyDataset(self.case, self.fault, range(self.num_batches), self.trainer.global_rank)
        num_workers = int(self.fault.place == "worker")
        return _FaultyLoader(dataset, batch_size=None, num_workers=num_workers)

    def val_dataloader(self) -> DataLoader:
        indices = range(VALIDATION, VALIDATION + 2)
        return DataLoader(_FaultyDataset(self.case, self.fault, indices, self.trainer.global_rank), batch_size=None)


def places(pipeline: str) -> list[tuple[str, int]]:
    """Return where a fit comes by, in order."""
    seen: list[tuple[str, int]] = []
    model = Faulty(MIXED, NOWHERE)
    trainer = _trainer(pipeline, model, lambda kind, stage, batch: seen.append((f"{kind} {stage}", batch)))
    trainer.fit(model, datamodule=FaultyBatches(MIXED, NOWHERE))
    return list(dict.fromkeys(seen))


def fail_and_fit(pipeline: str, faults: Sequence[Fault]) -> tuple[list[tuple[str, list[str]]], Result]:
    """Meet faults one after the other, then fit with the trainer and the strategy of the last one.

    Return for each fault what the user reads and what was left of the strategy's doing; and what the last fit gave.
    """
    reports = []
    for fault in faults:
        before = _surroundings()
        model = Faulty(MIXED, fault)
        trainer = _trainer(pipeline, model, fault.observe, callbacks=[FaultyCallback(fault)])
        try:
            trainer.fit(model, datamodule=FaultyBatches(MIXED, fault))
            said = "nothing"
        except (InjectedError, RuntimeError) as err:
            said = f"{type(err).__name__}: {err}" + (f" hid {err.__context__!r}" if err.__context__ else "")
        reports.append((said, left(trainer, model, before)))
    model = Model(MIXED)
    trainer.fit(model, datamodule=Batches(MIXED, NUM_BATCHES))
    return reports, collect(model, trainer.optimizers[0], model.losses)


def left(trainer: Trainer, model: Model, before: dict[str, Any]) -> list[str]:
    """Name everything that is not as it was before the fit."""
    found = [name for name, value in _surroundings().items() if value != before[name]]
    for name, module in model.named_modules():
        # Lightning itself leaves a bound method of the class on the LightningModule.
        if vars(module).get("forward", module.forward) != type(module).forward.__get__(module):
            found.append(f"{name}.forward")
        if isinstance(module, ShardedModule):
            found += [f"{name}: {lookup}" for lookup in module._lookups if not isinstance(lookup, torch.nn.Module)]
            dists = [getattr(dist, "_dist", None) for dist in module._input_dists]
            found += [f"{name}: {dist}" for dist in dists if dist is not None and "forward" in vars(dist)]
    for live in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        if not type(live).__module__.startswith("lightning.") or "overlap" in str(type(live).__mro__):
            found.append(type(live).__name__)
    changed = {"_sigterm_notifier_fn": trainer._signal_connector, "_slurm_sigusr_handler_fn": trainer._signal_connector}
    changed |= {"resume_start": trainer._checkpoint_connector}
    return found + [name for name, owner in changed.items() if name in vars(owner)]


def _surroundings() -> dict[str, Any]:
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return {
        "signal handlers": {signum: signal.getsignal(signum) for signum in catchable},
        "threads": {thread for thread in threading.enumerate() if thread.name != "QueueFeederThread"},
        "children": set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }


def _trainer(pipeline: str, model: Model, observer: Any, **kwargs: Any) -> Trainer:
    strategy = make_strategy(model, pipeline, observer=observer)
    return make_trainer(strategy, val_check_interval=4, num_sanity_val_steps=0, **kwargs)
