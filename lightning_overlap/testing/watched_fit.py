"""One fit of a user's module under the strategy, watched: what it trained, looked up, sent and left in place."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from ..plugin import OverlapEmbeddingStrategy
from ..profiling import HostSync, record_host_syncs
from ..schedules import Stage, WeightOwner
from ..sparse import EarlyEmbeddings, SparsePipeline
from ..tables import owners_of, sharded_modules
from .checked_streams import CheckedStreams
from .delayed_lookups import DelayedLookups, Delays, fused_weights
from .local_group import ThisGroup
from .state_digests import digests
from .stream_tracing import Operators
from .unsharded import Answers, Changes

ModuleFactory = Callable[[], LightningModule]
Data = LightningDataModule | Sequence[Any]

NUM_WATCHED_STEPS = 3
"""In how many steps, in the middle of a run, host syncs are counted."""

_SAID_ELSEWHERE = ("The lookup of .* is not overlapped", "You defined a `validation_step` but have no")
"""Warnings: the report says the first; there is no validation in these fits."""


@dataclass
class Watched:
    """What one rank saw of a fit."""

    losses: list[Tensor] = field(default_factory=list)
    states: dict[int, dict[str, str]] = field(default_factory=dict)
    """Step -> name of a weight or of its optimizer's state -> digest of its bits."""
    batches: list[int] = field(default_factory=list)
    """Indices of the trained batches, in order."""
    updates: list[int] = field(default_factory=list)
    """The batches that a backward was for, in order."""
    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Batch -> the batches whose backward was over when its lookup was issued."""
    early: dict[int, dict[str, bool]] = field(default_factory=dict)
    """Batch -> module -> whether all its calls got the embeddings of an early lookup."""
    plain_reasons: dict[str, str] = field(default_factory=dict)
    owners: dict[str, frozenset[WeightOwner]] = field(default_factory=dict)
    syncs: list[HostSync] = field(default_factory=list)
    collectives: list[tuple[int, str, str]] = field(default_factory=list)
    """(batch, operator, group) of each collective that the main thread issued, in order."""
    left: list[str] = field(default_factory=list)
    """What was not put back at the end."""
    automatic: bool = True
    most_in_flight: int = 0
    """Batches fetched and not done with, at most."""
    depth: int = 0
    """Of the schedules that were walked."""

    def modules_early_in(self, batch: int) -> frozenset[str]:
        """Return the modules that answered with early embeddings for a batch."""
        return frozenset(name for name, early in self.early.get(batch, {}).items() if early)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all fits of a check have in common.

    Args:
        make_module: Makes the untrained module; called once a fit.
        batches: This rank's batches, as its loader gives them.
        datamodule: Whose transfer hooks apply, if any.
        accelerator: As `Trainer` takes it.
        seed: Set before each fit.
        trainer_options: More arguments of `Trainer`.
        strategy_options: More arguments of the strategy, except `pipeline`.
    """

    make_module: ModuleFactory
    batches: Sequence[Any]
    datamodule: LightningDataModule | None
    accelerator: str
    seed: int
    trainer_options: Mapping[str, Any]
    strategy_options: Mapping[str, Any]


def fit(
    setting: Setting,
    pipeline: Any,
    *,
    delays: Delays | None = None,
    every_state: bool = True,
    syncs: bool = False,
    races: bool = False,
    answers: Answers | None = None,
) -> Watched:
    """Train a new module from the seed, and watch.

    Args:
        setting: What the fits of a check have in common.
        pipeline: A mode's name or a schedule.
        delays: Of lookups in the modules' own forward: needs a mode in which there are no others.
        every_state: Digest the state after every step, not only after the last.
        syncs: Count host syncs in the middle.
        races: Follow every operator's memory over the streams. On one rank.
        answers: Takes every answer of the sharded modules. Validation is then part of the fit, where there is one.

    Raises:
        RaceError: With `races`: an operator uses what nothing ordered.
    """
    watched = Watched()
    seed_all(setting.seed)
    module = setting.make_module()
    seed_all(setting.seed + dist.get_rank())
    watch = _Watch(watched, len(setting.batches), every_state=every_state, syncs=syncs)
    delay = DelayedLookups(delays) if delays is not None else None
    strategy = _WatchedStrategy(watch, delay, races, answers, pipeline=pipeline, **setting.strategy_options)
    watch.num_in_flight = lambda: strategy.num_in_flight
    watched.depth = strategy._schedules.depth
    first = [] if strategy.checked is None else [_FollowsMemory(strategy.checked)]
    last = [each for each in (delay, answers) if each is not None]
    if answers is not None:
        answers.updates, answers.seen = watched.updates, watched.seen
    callbacks = [*first, *setting.trainer_options.get("callbacks", ()), watch, *last]
    trainer = make_trainer(setting, strategy, callbacks)
    before = _patchable(trainer, module)
    loader = _Replay(setting.batches)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for text in _SAID_ELSEWHERE:
            warnings.filterwarnings("ignore", message=text)
        stack.enter_context(Operators(watch.ran))
        validates = answers is not None and type(module).validation_step is not LightningModule.validation_step
        _fit_on(trainer, module, setting, loader, _Replay(setting.batches[:2]) if validates else None)
    after = _patchable(trainer, module)
    watched.left = [f"{name}: {after[name]}" for name in after if after[name] != before.get(name)]
    if strategy.num_in_flight:
        watched.left.append(f"{strategy.num_in_flight} batches in flight")
    watched.automatic = module.automatic_optimization
    return watched


def fit_unsharded(setting: Setting, module: LightningModule) -> Changes:
    """Train a module as it is, on this rank alone, on its batches; return what that changed.

    Callbacks of the user's own stay out: some ask for the strategy.
    """
    changes = Changes()
    seed_all(setting.seed + dist.get_rank())
    device = torch.device("cpu") if setting.accelerator == "cpu" else torch.device("cuda", torch.cuda.current_device())
    options = {**_QUIET, **setting.trainer_options, "limit_val_batches": 0, "callbacks": [changes]}
    trainer = Trainer(accelerator=setting.accelerator, devices=1, strategy=SingleDeviceStrategy(device), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fits in the mode say what there is to say
        _fit_on(trainer, module, setting, _Replay(setting.batches), None)
    return changes


def _fit_on(trainer: Trainer, module: LightningModule, setting: Setting, loader: Any, val_loader: Any) -> None:
    if setting.datamodule is None:
        trainer.fit(module, train_dataloaders=loader, val_dataloaders=val_loader)
        return
    with mock.patch.object(setting.datamodule, "train_dataloader", return_value=loader):
        trainer.fit(module, datamodule=setting.datamodule)


_QUIET: dict[str, Any] = {
    **{"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "use_distributed_sampler": False},
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}


def make_trainer(setting: Setting, strategy: Any, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a quiet Trainer over the ranks of the process group."""
    world_size = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    options = {**_QUIET, **setting.trainer_options, "callbacks": list(callbacks), "plugins": [ThisGroup(per_node)]}
    return Trainer(
        accelerator=setting.accelerator,
        devices=per_node,
        num_nodes=world_size // per_node,
        strategy=strategy,
        **options,
    )


class _Replay:
    """Gives copies of the same batches to every fit: a training step may change its batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(copy.deepcopy, self._batches)


class _Closes(Callback):
    """Owns contexts that end with the fit."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()


class _Watch(_Closes):
    """Notes in `watched` what a fit does: its losses, states, early lookups and host syncs."""

    reads_tables = False  # in its hook after the backward

    def __init__(self, watched: Watched, num_steps: int, *, every_state: bool, syncs: bool) -> None:
        super().__init__()
        self.watched = watched
        self._num_steps = num_steps
        self._every_state = every_state
        self._first = max(1, num_steps // 2) if syncs else num_steps
        self.batch = -1
        self.num_in_flight: Callable[[], int] = int

    def observe(self, kind: str, stage: Stage, batch: int) -> None:
        """Take an event of the executor."""
        self.watched.most_in_flight = max(self.watched.most_in_flight, self.num_in_flight())
        if (kind, stage) == ("issue", Stage.EMBEDDING_LOOKUP):
            self.watched.seen.setdefault(batch, tuple(self.watched.updates))

    def served(self, name: str, early: bool) -> None:
        """Take the answer to a call of a sharded module in a training step."""
        modules = self.watched.early.setdefault(self.batch, {})
        modules[name] = modules.get(name, True) and early

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Take a collective of this thread, of which autograd's backward on a CPU is part."""
        if func.namespace == "c10d":
            group = next((_group_name(arg) for arg in args if isinstance(arg, torch.ScriptObject)), "")
            self.watched.collectives.append((self.batch, func.overloadpacket.__name__, group))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = sharded_modules(pl_module)
        self.watched.owners = {name: frozenset(owners_of(module)) for name, module in modules.items()}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first + NUM_WATCHED_STEPS:
            self._open.close()
        if batch_idx == self._first:
            self.watched.syncs = self._open.enter_context(record_host_syncs())
        self.batch = batch_idx
        self.watched.batches.append(batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watched.updates.append(self.batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.watched.losses.append(loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(()))
        if self._every_state or batch_idx == self._num_steps - 1:
            strategy = trainer.strategy
            assert isinstance(strategy, OverlapEmbeddingStrategy)
            with strategy.saving():  # kernels count lookups: without those that are ahead
                self.watched.states[batch_idx] = digests(pl_module, trainer.optimizers)


class _FollowsMemory(_Closes):
    """Lets checked streams see all operators of the training."""

    def __init__(self, streams: CheckedStreams) -> None:
        super().__init__()
        self._streams = streams

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = {name: weight.detach() for name, weight in pl_module.named_parameters()}
        for name, module in sharded_modules(pl_module).items():
            weights |= {f"a table of {name} {at}": weight for at, weight in enumerate(fused_weights(module))}
        self._open.enter_context(self._streams.watching(weights))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3 == 2:
            assert isinstance(trainer.strategy, OverlapEmbeddingStrategy)
            trainer.strategy.update_tables()  # as before an evaluation or a save: no update is left
        self._streams.read_weights(f"a callback after the step of batch {batch_idx}")


class _WatchedStrategy(OverlapEmbeddingStrategy):
    """Tells a watch who was served early, keeps the answers, and delays the lookups of a reference."""

    def __init__(
        self, watch: _Watch, delay: DelayedLookups | None, races: bool, answers: Answers | None, **kwargs: Any
    ) -> None:
        super().__init__(observer=watch.observe, **kwargs)
        self._watch = watch
        self._delay = delay
        self._answers = answers
        self.checked = CheckedStreams(self._lookup_stream) if races else None
        if self.checked is not None:
            self._streams, self._observer = self.checked, self.checked.observe

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.checked is not None:
            self.checked.take(batch)
        return batch

    def _make_pipeline(self, schedule: Any, step: str) -> SparsePipeline:
        pipeline = super()._make_pipeline(schedule, step)
        serve, watch, delay, answers = pipeline.answers.answer, self._watch, self._delay, self._answers

        def call(pipelined: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _copied((args, kwargs)) if answers is not None else None
            around = contextlib.nullcontext() if delay is None else delay.around(pipelined.name, pipelined.module)
            with around:
                embeddings = serve(pipelined, args, kwargs)
            if step == "training_step":
                watch.served(pipelined.name, isinstance(embeddings, EarlyEmbeddings))
                if pipelined.unpipelined_reason is not None:
                    watch.watched.plain_reasons[pipelined.name] = pipelined.unpipelined_reason
            if answers is not None:
                answers.answered(pipelined.name, step, given, embeddings, early=isinstance(embeddings, EarlyEmbeddings))
            return embeddings

        if step == "training_step" or answers is not None:
            pipeline.answers.answer = call  # type: ignore[method-assign]
        return pipeline


def _copied(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return a copy of a call's arguments, or None: a tensor that a graph leads to has no copy."""
    try:
        return copy.deepcopy(given)
    except RuntimeError:
        return None


def _group_name(group: Any) -> str:
    made = dist.ProcessGroup.unbox(group)
    return f"{made.group_desc} {made.group_name}"  # names are alike on all ranks, descriptions may be of several


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _patchable(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Return what a run puts something in the place of, each with a text of what stands there."""
    loops = {
        "fit loop": trainer.fit_loop,
        "epoch loop": trainer.fit_loop.epoch_loop,
        "validation loop of fit": trainer.fit_loop.epoch_loop.val_loop,
        "validation loop": trainer.validate_loop,
        "test loop": trainer.test_loop,
        "prediction loop": trainer.predict_loop,
    }
    found = {name: type(live).__qualname__ for name, live in loops.items()}
    found |= {signum.name: repr(signal.getsignal(signum)) for signum in (signal.SIGTERM, signal.SIGINT)}
    for name, child in module.named_modules():
        forward = vars(child).get("forward")
        # Lightning redirects the root's for a step, and puts it back as an attribute.
        if forward is not None and getattr(forward, "__func__", None) is not type(child).forward:
            found[f"the forward of {name or 'the module'!r}"] = type(forward).__qualname__
    return found
