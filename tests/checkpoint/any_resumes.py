"""Fits that are stopped and resumed at drawn places, and what they did hook by hook. Functions that a rank runs."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ..support.cases import ROWWISE_ADAGRAD, Batch, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .checkpoints import zeroed
from .resumes import Rows, Stateful, make_loader

CASE = ROWWISE_ADAGRAD
BATCH_SIZE = 4
PLACES = ("epoch_start", "batch_start", "step", "batch_end", "val_start", "val_step", "val_end", "epoch_end")
LOADERS = ("own-sized", "own-unsized", "sized-0", "sampler")
SCHEDULERS = ("epochs", "steps", "plateau_of_training", "plateau_of_validation", "plateau_of_steps")


@dataclass(frozen=True)
class Stop:
    place: str
    nth: int  # time that a run comes there
    by_error: bool = False  # saved while the error is handled that ends the run; else in the hook itself


@dataclass(frozen=True)
class Drawn:
    stops: tuple[Stop, ...]
    pipeline: str = "fused_sparse_dist"
    loader: str = "own-sized"
    num_batches: int = 4
    epochs: int = 3
    max_steps: int = -1
    limit: int | None = None
    accumulate: int = 1
    val_interval: int | float = 1.0
    val_every_n_epochs: int | None = 1
    scheduler: str = "epochs"
    frequency: int = 1  # steps or epochs from one step of the scheduler to the next
    reload: int = 0  # epochs from one set of loaders to the next; each has batches of its own
    doubles: bool = False  # `accumulate` holds from the second epoch on
    format: str = "full"
    none: int = -1  # index of a batch that is None, with a loader of the kind "own"
    resets: bool = False  # the state of the tables' optimizer is written at the end of each epoch
    foreign: bool = False  # the checkpoints have only what Lightning writes, as those of another strategy

    @property
    def kwargs(self) -> dict[str, Any]:
        return {
            "max_epochs": self.epochs,
            "max_steps": self.max_steps,
            "limit_train_batches": self.limit,
            "accumulate_grad_batches": 1 if self.doubles else self.accumulate,
            "reload_dataloaders_every_n_epochs": self.reload,
            "val_check_interval": self.val_interval,
            "check_val_every_n_epoch": self.val_every_n_epochs,
            "num_sanity_val_steps": 0,
        }


class Stopped(Exception):
    """Ends a run whose checkpoint is, or will be, saved."""


class Watch(Callback):
    """Writes down every hook with the loops' counters, and ends the run at one of them."""

    def __init__(self, stop: Stop | None, path: str) -> None:
        self.stop, self.path = stop, path
        self.left = 0 if stop is None else stop.nth
        self.seen: list[tuple[Any, ...]] = []

    def note(self, trainer: Trainer, place: str, *what: Any) -> None:
        loops: Any = copy.deepcopy(trainer.fit_loop.state_dict())
        counters = {name: state for name, state in loops.items() if not name.endswith("state_dict")}
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        metrics = {}
        if place in ("val_end", "epoch_end"):
            metrics = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seen.append((place, trainer.current_epoch, trainer.global_step, stepped, *what, rates, metrics, counters))
        if self.stop is not None and place == self.stop.place:
            self.left -= 1
            # No checkpoint has the gradients of an accumulation that is under way.
            if self.left <= 0 and (place in ("epoch_start", "epoch_end") or not self._accumulates(trainer, place)):
                if not self.stop.by_error:
                    trainer.save_checkpoint(self.path)
                raise Stopped

    def _accumulates(self, trainer: Trainer, place: str) -> bool:
        loop = trainer.fit_loop.epoch_loop
        if place in ("batch_start", "step"):
            return bool((loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches)
        return loop._should_accumulate()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, Stopped) and self.stop is not None and self.stop.by_error:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer, "epoch_start")

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if module.drawn.resets:
            for states in module.ebc.fused_optimizer.state.values():
                for shard in [shard for state in states.values() for shard in getattr(state, "local_shards", list)()]:
                    shard.tensor.mul_(0.5)
        self.note(trainer, "epoch_end")

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        self.note(trainer, "batch_start", batch_idx, batch.inputs["sparse"][1])

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if module.drawn.format.startswith("incremental") and self.stop is not None and not batch_idx:
            trainer.save_checkpoint(f"{self.path}.early")  # so that the one to resume from has changed rows only
        self.note(trainer, "batch_end", batch_idx, None if batch is None else outputs["loss"].item())

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer, "val_start")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.note(trainer, "val_end")


class Logs(Model):
    def __init__(self, drawn: Drawn, watch: Watch) -> None:
        super().__init__(CASE)
        self.drawn, self.watch = drawn, watch

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.watch.note(self.trainer, "step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        shared: dict[str, Any] = {"on_epoch": True, "sync_dist": self.trainer.world_size > 1}
        self.log("loss", loss, on_step=True, batch_size=1 + batch_idx, **shared)
        self.log("largest", loss, on_step=False, reduce_fx="max", **shared)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.watch.note(self.trainer, "val_step", batch_idx)
        super().validation_step(batch, batch_idx)
        self.log("val", self.validated, batch_size=BATCH_SIZE, sync_dist=self.trainer.world_size > 1)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        name, schedulers = self.drawn.scheduler, torch.optim.lr_scheduler
        if not name.startswith("plateau"):
            config = {"scheduler": schedulers.StepLR(optimizer, 2, 0.7), "interval": name.removesuffix("s")}
        else:
            interval = "step" if name == "plateau_of_steps" else "epoch"
            monitor = {"plateau_of_training": "loss", "plateau_of_steps": "loss"}.get(name, "val")
            scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.8, patience=0, threshold=0.2)
            config = {"scheduler": scheduler, "interval": interval, "monitor": monitor, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "frequency": self.drawn.frequency}}


@dataclass
class _WithNone(Stateful):
    none: int

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield None if self.position - 1 == self.none else batch


class _WithNoneSized(_WithNone):
    def __len__(self) -> int:
        return self.num


class Data(LightningDataModule):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    @property
    def day(self) -> int:
        """Number of the loaders' data; it depends on the epoch where new loaders are made by a schedule."""
        return self.trainer.current_epoch if self.drawn.reload else 0

    def train_dataloader(self) -> Any:
        source = (CASE, self.drawn.num_batches, self.trainer.global_rank + 100 * self.day)
        if self.drawn.none >= 0:
            with_none = _WithNone if self.drawn.loader == "own-unsized" else _WithNoneSized
            return with_none(*source, self.drawn.none)
        if self.drawn.loader != "sampler":
            return make_loader(self.drawn.loader, *source)
        rows = Rows(*source)
        sampler = DistributedSampler(rows, 1, 0, shuffle=True)  # a rank's own rows
        return StatefulDataLoader(rows, 1, sampler=sampler, collate_fn=itemgetter(0))

    def val_dataloader(self) -> Any:
        first = 1000 + 100 * self.day
        batches = [make_batch(CASE, first + index, self.trainer.global_rank, BATCH_SIZE) for index in range(2)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def _run(drawn: Drawn, stop: Stop | None, path: str, resume: str | None) -> tuple[list[Any], Result | None]:
    torch.manual_seed(3)
    watch = Watch(stop, path)
    model = Logs(drawn, watch)
    saved_as, *how = drawn.format.split(", ")
    most = 0 if "renewed" in how else 10
    options = {"checkpoint_format": saved_as, "async_checkpoint": "asynchronous" in how, "most_increments": most}
    strategy = make_strategy(model, drawn.pipeline, **options)
    doubling: list[Callback] = []
    if drawn.doubles:
        doubling.append(GradientAccumulationScheduler({0: 1, 1: drawn.accumulate}))
    trainer = make_trainer(strategy, callbacks=[*doubling, watch], **drawn.kwargs)
    if resume is not None:
        zeroed(model)
    with warnings.catch_warnings(action="ignore"):
        try:
            trainer.fit(model, datamodule=Data(drawn), ckpt_path=resume)
        except Stopped:
            return watch.seen, None
    return watch.seen, dataclasses.replace(collect(model, trainer.optimizers[0], [torch.zeros(())]))


_ANEW = {"epoch_start": "epoch_start", "batch_start": "batch_start", "step": "batch_start"}
_ANEW |= {"val_start": "val_start", "val_step": "val_start"}


def done_of(log: Sequence[Any], stop: Stop) -> list[Any]:
    """Return what a resumed run does not do again: what was under way at the stop begins anew."""
    kept = list(log)
    if (begin := _ANEW.get(stop.place)) is not None:
        while kept.pop()[0] != begin:
            pass
    return kept


def compare(drawn: Drawn, folder: str) -> list[str]:
    """Return where a run with stops differs from one without; each run but the first resumes from the one before."""
    whole, expected = _run(drawn, None, "", None)
    log: list[Any] = []
    resume, result = None, None
    for number, stop in enumerate((*drawn.stops, None)):
        path = str(Path(folder) / f"{number}.ckpt")
        part, result = _run(drawn, stop, path, resume)
        if result is not None or stop is None:
            log += part
            break
        log += done_of(part, stop)
        resume = path
        if drawn.foreign:
            _without_place(path)
    assert expected is not None
    if result is None:
        return ["the last run was stopped"]
    if drawn.foreign:
        log, whole = ([(*one[:6], {}) for one in hooks if one[0] == "batch_start"] for hooks in (log, whole))
    found = [_difference(mine, theirs) for mine, theirs in zip(log, whole, strict=False) if mine != theirs][:2]
    if len(log) != len(whole):
        found.append(f"{len(log)} hooks in the place of {len(whole)}")
    return found + result.differences(expected)


def _without_place(path: str) -> None:
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["loops"]["fit_loop"]["state_dict"]
    for name in ("lightning_overlap_place", "lightning_overlap_metrics"):
        assert name in checkpoint | state
        checkpoint.pop(name, None)
        state.pop(name, None)
    torch.save(checkpoint, path)


def _difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    if mine[:-1] != theirs[:-1]:
        return f"{mine[:-1]} in the place of {theirs[:-1]}"
    names = [name for name in mine[-1] if mine[-1][name] != theirs[-1].get(name)]
    return f"{mine[:4]}: " + ", ".join(f"{name} {mine[-1][name]} in the place of {theirs[-1][name]}" for name in names)
