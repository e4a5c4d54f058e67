"""Fits of the modules of `callers`, and plain loops over them. Functions that ranks run."""

import datetime
import functools
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from lightning_overlap import OverlapEmbeddingStrategy, Schedule

from ..support.cases import Case, Model, make_plan
from ..support.cases import dense_optimizer as dense_optimizer_of
from ..support.fits import make_trainer, mode_and_options
from ..support.reference import Result, collect
from . import caller_inputs
from .callers import MODELS, NUM_STEPS


class Data(LightningDataModule):
    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> DataLoader:
        return DataLoader([self.make(index) for index in range(NUM_STEPS)], batch_size=None)


@dataclass
class Outcome:
    result: Result
    early: int
    messages: list[str]
    num_threads: int


def _batches(model: str, case: Case) -> Callable[[int], Any]:
    """Those that the function of `caller_inputs` with the model's name makes, if there is one."""
    make, rank = getattr(caller_inputs, model, caller_inputs.fresh), dist.get_rank()
    return lambda index: make(case, index, rank)


def train(
    model: str, pipeline: str | Schedule, options: dict[str, Any] | None = None, **trainer_kwargs: Any
) -> Outcome:
    """Train a module under the strategy, whose further arguments are `options`."""
    cls, case = MODELS[model]
    module = cls(case)
    early = 0

    def observe(kind: str, stage: Any, batch: int) -> None:
        nonlocal early
        early += kind == "wait" and str(stage) == "embedding_lookup"

    mode, others = mode_and_options(pipeline, options or {})
    strategy = OverlapEmbeddingStrategy(
        pipeline=mode,
        sharding=make_plan(case, module, dist.get_world_size()),
        observer=observe,
        timeout=datetime.timedelta(seconds=30),
        **others,
    )
    trainer = make_trainer(strategy, **trainer_kwargs)
    raises = pytest.raises(ValueError, match="the user's own error") if "raises" in model else nullcontext()
    with warnings.catch_warnings(record=True) as caught, raises:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(_batches(model, case)))
    messages = [str(warning.message) for warning in caught if "not overlapped" in str(warning.message)]
    num_threads = sum(thread.name == "early_lookup_mismatches" for thread in threading.enumerate())
    return Outcome(collect(module, trainer.optimizers[0], module.losses), early, messages, num_threads)


class _Whole(nn.Module):
    """Calls training_step as the forward, as DistributedDataParallel wants it."""

    def __init__(self, module: Model) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return self.module.training_step(*args)


@functools.cache
def _group_of_tables() -> dist.ProcessGroup:
    """Apart from that of dense gradients; one for all loops: a thread of each looks for work 100 times a second."""
    group: dist.ProcessGroup = dist.new_group()
    return group


def by_hand(model: str) -> Result:
    """Train a module by plain DistributedModelParallel in a loop, automatic optimization only."""
    cls, case = MODELS[model]
    module = cls(case)
    weights = {name: dict(getattr(module, name).state_dict()) for name in case.collections}
    weights = {name: {key: value.clone() for key, value in state.items()} for name, state in weights.items()}
    plan = make_plan(case, module, dist.get_world_size())
    whole = _Whole(module)
    plan = replace(plan, plan={f"module.{name}": of_module for name, of_module in plan.plan.items()})
    dmp = DistributedModelParallel(
        whole,
        env=ShardingEnv.from_process_group(_group_of_tables()),
        device=torch.device("cpu"),
        plan=plan,
        init_data_parallel=False,
    )
    for name, state in weights.items():
        getattr(module, name).load_state_dict(state)
    dense = [*module.bottom.parameters(), *module.top.parameters()]
    optimizer = dense_optimizer_of(module)
    make = _batches(model, case)
    losses = []
    for index in range(NUM_STEPS):
        module.on_train_batch_start(None, index)
        optimizer.zero_grad()
        loss = dmp(make(index), index)
        loss.backward()
        for weight in dense:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.detach().clone())
        module.on_train_batch_end(None, None, index)
    return collect(module, optimizer, losses)


def fails(model: str, pipeline: str, **options: Any) -> str:
    try:
        train(model, pipeline, options)
    except RuntimeError as err:
        return "\n".join([str(err), *getattr(err, "__notes__", [])])
    return "no error"
