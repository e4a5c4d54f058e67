"""Fits with `pipeline="auto"`, on a clock that says what each mode takes. Functions that ranks run."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_overlap import Stage, StreamName
from lightning_overlap.profiling import HostTimestamps
from lightning_overlap.runtime import Streams
from lightning_overlap.tuning import Arm, Auto, tuner

from ..checkpoint.resumes import SaveSteps
from ..laws.accumulated import MODELS, Data
from ..support.cases import Case, Model
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

NUM_STEPS = 36  # enough for some blocks after all modes have been tried
QUICK = Auto(warm_up=1, settle=1, block=2, rounds=2)
"""Chooses after 1 + 2 x 5 x 3 batches; without `split_backward`, which one rank does not try on a CPU, after 25."""


@dataclass
class Fit:
    result: Result
    modes: list[str] = field(default_factory=list)  # of each batch
    state: dict[str, Any] = field(default_factory=dict)  # that would be in a checkpoint at the end
    log: str = ""  # what was said of it, the first line of a fit first


class Seen(Callback):
    def __init__(self) -> None:
        self.modes: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert strategy._fit.walker.schedule is strategy.schedule, "what trains is what the strategy says"
        self.modes.append(strategy.schedule.name)


def train(
    case: Case,
    ms: Mapping[str, tuple[float, ...]],
    *,
    num_steps: int = NUM_STEPS,
    auto: Any = QUICK,
    model: str = "plain",
    options: Mapping[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    path: str | None = None,
    stateful: bool = False,
    nones: tuple[int, ...] = (),
    **kwargs: Any,
) -> Fit:
    """Train; `ms` is what a batch takes in each mode, by rank."""
    rank = dist.get_rank()
    module: Model = MODELS[model](case)
    strategy = make_strategy(module, auto, **(options or {}))
    tuned = strategy._tuner
    assert tuned is not None

    class Clock(HostTimestamps):
        now = 0.0

        def mark(self) -> float:
            return self.now

    def step() -> None:
        arm = tuned.arm
        of_ranks = ms.get(f"{arm.mode}/{arm.stream}", ms[strategy.schedule.name])
        clock.now += of_ranks[rank % len(of_ranks)]
        count()

    clock, count = Clock(), tuned.step

    seen, data = Seen(), Data(case, num_steps, stateful=stateful, nones=nones)
    trainer = make_trainer(strategy, callbacks=[seen, *callbacks], num_sanity_val_steps=0, **kwargs)
    records: list[str] = []
    with (
        warnings.catch_warnings(action="ignore"),
        mock.patch.object(logging.getLogger("lightning.pytorch.lightning_overlap"), "info", records.append),
        mock.patch.object(tuner, "timestamps_of", return_value=clock),
        mock.patch.object(tuned, "step", step),
        mock.patch.object(tuner.TimedSource, "fetch", lambda source, *args: source._source.fetch(*args)),  # in no time
    ):
        trainer.fit(module, datamodule=data, ckpt_path=path)
    result = collect(module, trainer.optimizers[0], module.losses or [torch.zeros(())])
    said = [text if text.startswith("pipeline") else text.splitlines()[0] for text in records if "auto" in text]
    return Fit(result, seen.modes, tuned.state_dict(), "\n".join(said))


def save_and_go_on(case: Case, ms: Mapping[str, tuple[float, ...]], stop: int, folder: str) -> tuple[Fit, Fit]:
    whole = train(case, ms, callbacks=(SaveSteps(folder, (stop,)),), stateful=True)
    return whole, train(case, ms, path=f"{folder}/step={stop}.ckpt", stateful=True)


def train_on_streams(case: Case, ms: Mapping[str, tuple[float, ...]], **kwargs: Any) -> tuple[Fit, list[str]]:
    """Train as if there were streams; return where lookups were moved to, each time with none ahead of its batch."""
    moves: list[str] = []
    running: list[Any] = []

    class Running(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            running.append(trainer.strategy)

    def move(streams: Streams, stream: StreamName) -> None:
        if running:
            ahead = running[0]._fit.walker.batches.ahead()
            assert len(ahead) > 1, "there are batches in flight"
            assert not any(Stage.EMBEDDING_LOOKUP in batch.issued for batch in ahead)
        moves.append(str(stream))

    with (
        mock.patch.object(tuner, "CudaStreams", Streams),
        mock.patch.object(Streams, "move_lookups", move, create=True),
    ):
        return train(case, ms, callbacks=(Running(),), **kwargs), moves


def train_again(case: Case, choice: str | None) -> list[list[str]]:
    """Return the modes of three fits with one Trainer that may have chosen: two of one module, one of another."""
    module: Model = MODELS["plain"](case)
    strategy, seen, modes = make_strategy(module, QUICK), Seen(), []
    if choice is not None:
        assert strategy._tuner is not None
        strategy._tuner.has_chosen = True
        strategy._tuner._walk(Arm(choice, "data_dist"))
    trainer = make_trainer(strategy, callbacks=[seen])
    for epochs, fitted in ((1, module), (2, module), (3, MODELS["plain"](case))):
        trainer.fit_loop.max_epochs = epochs
        seen.modes.clear()
        trainer.fit(fitted, datamodule=Data(case, 8))
        modes.append([*seen.modes])
    return modes
