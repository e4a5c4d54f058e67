"""Functions that ranks run: a fit with reads and saves within `averaged()` at one place, and what they should get."""

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_overlap import EmbeddingDeltas, ExponentialMovingAverage

from ..support.cases import Model, make_batch
from ..support.fits import make_strategy, make_trainer
from .averaging import Evaluations, case_of

CASE = case_of("table_wise row_wise data_parallel", optimizer=(torch.optim.SGD, {"lr": 0.5}))
NUM_STEPS, DECAY = 8, 0.6
FIRST_TAUGHT = 4
AT = 5  # the step after which everything is read and saved within `averaged()`
HOOKS = (
    *("on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end"),
)
# What is asked for, from outside to inside: averages, or the trained weights; the last one counts.
NESTED = ("a", "aa", "ta", "at", "t", "")


@dataclass(frozen=True)
class Draw:
    """One fit."""

    saved_as: str
    is_async: bool
    hook: str
    is_first: bool  # whether the reading callback stands before the averaging one
    nested: str
    pipeline: str = "fused_sparse_dist"

    @property
    def served(self) -> bool:
        """Whether a save has the averages as weights."""
        return self.nested.endswith("a")

    @property
    def reads_averages(self) -> bool:
        """Whether a read gets the averages: an evaluation has them until its hooks at the end."""
        in_evaluation = self.hook.startswith("on_validation") and self.hook != "on_validation_end"
        return self.served or (not self.nested and in_evaluation)


@dataclass
class Found:
    """What one fit has given to its readers, on this rank: whole tables by their names."""

    read: dict[str, Tensor] = field(default_factory=dict)
    chunks: dict[str, Tensor] = field(default_factory=dict)
    copied: dict[str, Tensor] = field(default_factory=dict)  # of the dense part
    trained: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by step, the trained tables
    bridge: str = ""  # where "last" leads to after the save
    in_the_end: dict[str, Tensor] = field(default_factory=dict)


def tables_of(trainer: Trainer) -> dict[str, Tensor]:
    return {spec.name: trainer.strategy.table(spec.name).clone() for spec in CASE.tables}


@contextmanager
def asking(average: ExponentialMovingAverage, nested: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in nested:
            stack.enter_context({"a": average.averaged, "t": average.trained_weights}[one]())
        yield


class ReadsAll(Callback):
    """Reads and saves all at one place, and saves checkpoints of the training before and after it."""

    def __init__(self, draw: Draw, folder: str, average: ExponentialMovingAverage) -> None:
        self.draw, self.folder, self.average, self.found = draw, folder, average, Found()
        setattr(self, draw.hook, self._read)

    def _read(self, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != AT or self.found.read or trainer.sanity_checking:
            return
        with asking(self.average, self.draw.nested):
            self.found.read = tables_of(trainer)
            chunks = {spec.name: trainer.strategy.table_chunks(spec.name, num_rows=50) for spec in CASE.tables}
            self.found.chunks = {name: torch.cat([rows for _, rows in one]) for name, one in chunks.items()}
            self.found.copied = copy.deepcopy(dict(module.top.state_dict()))
            trainer.save_checkpoint(f"{self.folder}/read.ckpt")
        with average_chunks_refused():
            chunks_of_both(trainer, self.average)


class SavesTraining(Callback):
    """Saves the training behind all other callbacks, and keeps what it has to have."""

    def __init__(self, reader: ReadsAll) -> None:
        self.reader = reader

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        found, step = self.reader.found, trainer.global_step
        if step not in (3, AT, AT + 1, AT + 2):
            return
        found.trained[step] = tables_of(trainer)
        if step != AT:
            found.bridge = os.path.realpath(f"{self.reader.folder}/last.new.ckpt")
            trainer.save_checkpoint(f"{self.reader.folder}/step={step}.ckpt")


@contextmanager
def average_chunks_refused() -> Iterator[None]:
    with pytest.raises(RuntimeError, match="averages or trained ones: its rows would be of both"):
        yield


def chunks_of_both(trainer: Trainer, average: ExponentialMovingAverage) -> None:
    chunks = trainer.strategy.table_chunks("t0", num_rows=50)
    with average.averaged():
        next(chunks)
    with average.trained_weights():
        list(chunks)


def fit(draw: Draw, folder: str) -> Found:
    """Train one epoch with a validation after step `AT`, and read within it or beside it."""
    average = ExponentialMovingAverage(DECAY, tables=True)
    reader = ReadsAll(draw, folder, average)
    model = Model(CASE)
    deltas = EmbeddingDeltas(f"{folder}/deltas", every_n_steps=2)
    last = ModelCheckpoint(folder, save_last=True, every_n_train_steps=3, save_top_k=1)
    order: list[Callback] = [reader, average] if draw.is_first else [average, reader]
    options = {"checkpoint_format": draw.saved_as, "async_checkpoint": draw.is_async}
    num_steps = AT if draw.hook == "on_train_epoch_end" else NUM_STEPS
    trainer = make_trainer(
        make_strategy(model, draw.pipeline, **options),
        callbacks=[*order, deltas, SavesTraining(reader), last],
        enable_checkpointing=True,
        val_check_interval=AT,
        num_sanity_val_steps=0,
        max_epochs=2 if num_steps == AT else 1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Evaluations(CASE, num_steps))
    reader.found.in_the_end = tables_of(trainer)
    return reader.found


def fit_all(draws: list[Draw], folder: str) -> list[Found]:
    return [fit(draw, str(Path(folder) / str(number))) for number, draw in enumerate(draws)]


def history(num_ranks: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Train the plain module in this process on the batches of all ranks; weights and averages after each step."""
    module = Model(CASE)
    optimizer, averages, found = module.configure_optimizers(), {}, []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [module(make_batch(CASE, index, rank)) for rank in range(num_ranks)]
        (torch.stack(losses).sum() / num_ranks).backward()
        optimizer.step()
        weights = {name: weight.detach().double() for name, weight in module.state_dict().items()}
        for name, weight in weights.items():
            before = averages.get(name, weight)
            averages[name] = before + (1 - DECAY) * (weight - before)
        found.append((weights, dict(averages)))
    return found


class Teaches(Model):
    """Looks up and runs the averages in each training step from `FIRST_TAUGHT` on, for a second loss.

    Later than in the first: a second call in a step ends the early lookups, and the first averages are the weights.
    """

    average: ExponentialMovingAverage | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < FIRST_TAUGHT:
            return super().training_step(batch, batch_idx)
        if batch_idx % 2:
            return super().training_step(batch, batch_idx) + 0.1 * self.teacher(batch)
        teacher = self.teacher(batch)
        return super().training_step(batch, batch_idx) + 0.1 * teacher

    def teacher(self, batch: Any) -> Tensor:
        assert self.average is not None
        with torch.no_grad(), self.average.averaged():
            self.losses.append(self(batch).clone())
        return self.losses[-1]


def teach(pipeline: str) -> Tensor:
    """Return the losses of a student and of its teacher, whose weights are the averages."""
    model = Teaches(CASE)
    model.average = ExponentialMovingAverage(DECAY, tables=True)
    trainer = make_trainer(make_strategy(model, pipeline), callbacks=[model.average])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Evaluations(CASE, NUM_STEPS))
    return torch.stack(model.losses)


def losses_of_a_plain_teacher(rank: int, num_ranks: int) -> Tensor:
    plain, module, losses = history(num_ranks), Model(CASE), []
    start = {name: weight.double() for name, weight in module.state_dict().items()}
    for index in range(NUM_STEPS):
        weights, averages = plain[index - 1] if index else (start, start)
        found = {}
        for what, state in (("student", weights), ("teacher", averages)):
            module.load_state_dict(state)
            with torch.no_grad():
                found[what] = module(make_batch(CASE, index, rank))
        if index < FIRST_TAUGHT:
            losses += [found["student"]]
        else:
            losses += [found["student"], found["teacher"]] if index % 2 else [found["teacher"], found["student"]]
    return torch.stack(losses)


class LooksUpWithGradients(Model):
    average: ExponentialMovingAverage

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.average.averaged():
            return super().training_step(batch, batch_idx)


class Enters(Callback):
    """Enters `averaged()` in the middle of a fit, and does not leave it; then loads a checkpoint, or fails."""

    def __init__(self, average: ExponentialMovingAverage, what: str, folder: str) -> None:
        self.average, self.what, self.folder, self.entered = average, what, folder, ExitStack()
        self.trained: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.trained = tables_of(trainer)
        if batch_idx != 3 or self.what == "lookup":
            return
        if self.what == "load":
            trainer.save_checkpoint(f"{self.folder}/a.ckpt")
        self.entered.enter_context(self.average.averaged())
        if self.what == "load":
            trainer.strategy.load_checkpoint(f"{self.folder}/a.ckpt")
        if self.what == "fail":
            raise ZeroDivisionError


def refused(what: str, folder: str, is_first: bool) -> tuple[str, dict[str, Tensor]]:
    """Return the error, and the trained tables."""
    model, average = (LooksUpWithGradients if what == "lookup" else Model)(CASE), ExponentialMovingAverage(DECAY)
    model.average = average
    enters = Enters(average, what, folder)
    order: list[Callback] = [enters, OnExceptionCheckpoint(folder, "failed")]
    order = [*order, average] if is_first else [average, *order]
    strategy = make_strategy(model, checkpoint_format="sharded")
    trainer = make_trainer(strategy, callbacks=order, enable_checkpointing=True)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        trainer.fit(model, datamodule=Evaluations(CASE, NUM_STEPS))
    return str(caught.value), enters.trained
