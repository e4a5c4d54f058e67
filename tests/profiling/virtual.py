"""All-to-alls of a virtual latency under a virtual clock, which work and waits move: what a schedule hides."""

import copy
import gc
import weakref
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_overlap import Schedule, Stage
from lightning_overlap.distributed.wrapped_work import WrappedWork, wrap_collectives
from lightning_overlap.schedules.stages import WeightOwner
from lightning_overlap.tables.supported_modules import owners_of, sharded_modules

from ..support.cases import Batch, Batches, Case, Model
from ..support.fits import make_strategy, make_trainer

ALL_TO_ALL_MS = 40
COMPUTE_MS = 50
LOOKUP_MS = 10
TIMED_LOOKUPS = {
    WeightOwner.DENSE_OPTIMIZER: "data-parallel lookup",
    WeightOwner.FUSED_BACKWARD: "model-parallel lookup",
}
_IN_STAGE = {
    Stage.INPUT_SPLITS_DIST: ("splits",),
    Stage.INPUT_DATA_DIST: ("ids",),
    Stage.EMBEDDING_LOOKUP: ("embeddings",),
    Stage.DENSE_FORWARD: ("splits", "lengths", "ids", "embeddings"),
}


class VirtualClock:
    def __init__(self) -> None:
        self.now_ms = 0
        self.log: list[str] = []
        self.steps_ms: list[int] = []
        self._stage = Stage.DENSE_FORWARD
        self._batch = 0
        self._issued_in_stage = 0
        self._began_in_backward = False

    def now_s(self) -> float:
        return self.now_ms / 1e3

    def observe(self, kind: str, stage: Stage, batch: int) -> None:
        """Remember which stage issues the collectives to come."""
        if kind == "issue":
            self._stage, self._batch, self._issued_in_stage = stage, batch, 0
            self._began_in_backward = _in_backward()

    def advance(self, what: str, duration_ms: int = COMPUTE_MS) -> None:
        self.log.append(what)
        self.now_ms += duration_ms

    def issue(self) -> str:
        if self._stage is Stage.BACKWARD or (_in_backward() and not self._began_in_backward):
            name = "gradients"
        else:
            names = _IN_STAGE[self._stage]
            name = f"{names[self._issued_in_stage % len(names)]} {self._batch}"
            self._issued_in_stage += 1
        self.log.append(f"> {name}")
        return name


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _VirtualWork(WrappedWork):
    def __init__(self, work: dist.Work, clock: VirtualClock) -> None:
        super().__init__(work)
        self._clock = clock
        self._name = clock.issue()
        self._over_ms = clock.now_ms + ALL_TO_ALL_MS
        self._told: list[Any] = []

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, callback: Any) -> None:
        """Be the future too: what is to be told when the collective ends."""
        self._told.append(callback)

    def is_completed(self) -> bool:
        return self._clock.now_ms >= self._over_ms

    def wait(self, timeout: Any = None) -> bool:
        exposed_ms = max(0, self._over_ms - self._clock.now_ms)
        self._clock.log.append(f"< {self._name}" + (f" exposed {exposed_ms}" if exposed_ms else ""))
        self._clock.now_ms += exposed_ms
        now_ms, self._clock.now_ms = self._clock.now_ms, self._over_ms
        for callback in self._told:  # as if told at that time
            callback(self)
        self._told, self._clock.now_ms = [], now_ms
        return super().wait()


def virtual_latency(clock: VirtualClock) -> AbstractContextManager[None]:
    return wrap_collectives(lambda name, call, issue: _VirtualWork(issue(), clock), ["all_to_all_single"])


class ClockedModel(Model):
    """Spends virtual time in the dense forward, in the backward before the gradients travel, and in the step."""

    clock: VirtualClock
    timed_lookups: WeightOwner | None = None
    splits = False  # whether half of the backward's time belongs to weight gradients

    def on_train_start(self) -> None:
        if self.splits:
            self.top[0].weight.register_hook(lambda grad: self.clock.advance("weights", COMPUTE_MS // 2))
        for module in sharded_modules(self).values():
            for lookup, owner in zip(module._lookups, owners_of(module), strict=True):
                if owner is self.timed_lookups:
                    lookup.forward = self._timed(lookup.forward, TIMED_LOOKUPS[owner])

    def _timed(self, forward: Any, name: str) -> Any:
        def look_up(*args: Any) -> Any:
            self.clock.advance(name, LOOKUP_MS)
            return forward(*args)

        return look_up

    def dense(self, batch: Batch, embeddings: Any) -> Tensor:
        loss = super().dense(batch, embeddings)
        self.clock.advance("forward")
        first_half_ms = COMPUTE_MS // 2 if self.splits else COMPUTE_MS
        loss.register_hook(lambda grad: self.clock.advance("backward", first_half_ms))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.log.append(f"-- {batch_idx} --")
        self.clock.steps_ms.append(self.clock.now_ms)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.clock.advance("step"))
        return optimizer


def run(
    case: Case,
    pipeline: str | Schedule,
    num_steps: int = 8,
    clock: VirtualClock | None = None,
    timed_lookups: WeightOwner | None = None,
    **kwargs: Any,
) -> tuple[list[str], list[int]]:
    """Train; return the log of one steady step, and the virtual milliseconds of every step."""
    clock = clock or VirtualClock()
    model = ClockedModel(case)
    model.clock, model.timed_lookups = clock, timed_lookups
    strategy = make_strategy(model, pipeline, observer=clock.observe)
    model.splits = strategy.schedule.splits_backward
    with virtual_latency(clock):
        make_trainer(strategy, **kwargs).fit(model, datamodule=Batches(case, num_steps))
    steady = num_steps // 2
    log = clock.log[clock.log.index(f"-- {steady} --") + 1 : clock.log.index(f"-- {steady + 1} --")]
    return log, [late - early for early, late in pairwise(clock.steps_ms)]


def batches_alive(case: Case, pipeline: str, num_steps: int = 12) -> int:
    """Train without the garbage collector; return how many batches were alive at most as a step began."""
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Counts(Model):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch = copy.copy(batch)  # the data loader's own stay
            alive.append(weakref.ref(batch))
            return batch

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            nonlocal most
            most = max(most, sum(one() is not None for one in alive))

    model = Counts(case)
    gc.disable()
    try:
        make_trainer(make_strategy(model, pipeline)).fit(model, datamodule=Batches(case, num_steps))
    finally:
        gc.enable()
    return most
