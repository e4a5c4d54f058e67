"""Fits of the modules of `callers`, and plain loops over them. Functions that ranks run."""

import datetime
import functools
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
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_overlap import OverlapEmbeddingStrategy, Schedule

from ..support.cases import dense_optimizer, make_batch, make_plan
from ..support.fits import make_trainer, mode_and_options
from ..support.ranks import Ranks
from ..support.reference import Result, collect
from . import caller_inputs
from .callers import MODELS, NUM_STEPS
from .variants import Variant

WORDS = ("not overlapped", "release_features", "has id")  # in messages that tests ask for


@dataclass
class Outcome:
    result: Result
    early: int  # lookups whose early embeddings were used
    messages: list[str]


def train(model: str, pipeline: str | Schedule, options: Any = None, **trainer_kwargs: Any) -> Outcome:
    """Train a module under the strategy, whose further arguments are `options`."""
    cls, case = MODELS[model]
    module = cls(case)
    data = Variant(case, model, NUM_STEPS)
    raises = pytest.raises(ValueError, match="the user's own error") if "raises" in model else None
    plan = make_plan(case, module, dist.get_world_size())
    return fit(module, plan, data, pipeline, options, raises, **{"limit_val_batches": 0, **trainer_kwargs})


def fit(
    module: Any,
    plan: ShardingPlan,
    data: LightningDataModule,
    pipeline: str | Schedule,
    options: Any = None,
    raises: Any = None,
    **trainer_kwargs: Any,
) -> Outcome:
    early = 0

    def observe(kind: str, stage: Any, batch: int) -> None:
        nonlocal early
        early += kind == "wait" and str(stage) == "embedding_lookup"

    mode, others = mode_and_options(pipeline, options or {})
    timeout = datetime.timedelta(seconds=30)
    trainer = make_trainer(
        OverlapEmbeddingStrategy(mode, sharding=plan, observer=observe, timeout=timeout, **others), **trainer_kwargs
    )
    with warnings.catch_warnings(record=True, action="always") as caught, raises or nullcontext():
        trainer.fit(module, datamodule=data)
    messages = [text for one in caught if any(word in (text := str(one.message)) for word in WORDS)]
    return Outcome(collect(module, trainer.optimizers[0], module.losses), early, messages)


class _Whole(nn.Module):
    """Calls training_step as the forward, as DistributedDataParallel wants it."""

    def __init__(self, module: Any) -> None:
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
    module, make, rank = cls(case), getattr(caller_inputs, model, make_batch), dist.get_rank()
    plan = make_plan(case, module, dist.get_world_size())
    return loop(module, plan, lambda index: make(case, index, rank), NUM_STEPS)


def loop(module: Any, plan: ShardingPlan, make: Callable[[int], Any], num_steps: int) -> Result:
    weights = {
        name: {key: value.clone() for key, value in module.get_submodule(name).state_dict().items()}
        for name in plan.plan
    }
    dmp = DistributedModelParallel(
        _Whole(module),
        env=ShardingEnv.from_process_group(_group_of_tables()),
        device=torch.device("cpu"),
        plan=replace(plan, plan={f"module.{name}": of_module for name, of_module in plan.plan.items()}),
        init_data_parallel=False,
    )
    for name, state in weights.items():
        module.get_submodule(name).load_state_dict(state)
    dense = [weight for name, weight in module.named_parameters() if name.startswith(("bottom.", "top."))]
    optimizer = dense_optimizer(module)
    for index in range(num_steps):
        module.on_train_batch_start(None, index)
        optimizer.zero_grad()
        dmp(make(index), index).backward()
        for weight in dense:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        optimizer.step()
        module.on_train_batch_end(None, None, index)
    return collect(module, optimizer, module.losses)


def same_as_in(ranks: Ranks, model: str, pipeline: str | Schedule, other: str, **kwargs: Any) -> list[Outcome]:
    """Train in two modes: equal bit for bit. Return the outcomes in the first."""
    expected, actual = ranks.run_once(train, model, other, **kwargs), ranks.run(train, model, pipeline, **kwargs)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.result.differences(theirs.result) == []
    return actual


def fails(model: str, pipeline: str, **options: Any) -> str:
    try:
        train(model, pipeline, options)
    except RuntimeError as err:
        return "\n".join([str(err), *getattr(err, "__notes__", [])])
    return "no error"
