"""The reference: plain DistributedModelParallel in hand-written loops. Imports nothing of the package under test."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardedModule, ShardedTensor, ShardingEnv

from .cases import NUM_STEPS, Case, Model, dense_optimizer, make_batch, make_plan
from .ranks import Ranks


@dataclass
class Result:
    losses: Tensor
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]
    fused_state: dict[str, Tensor]
    dense_state: dict[str, Tensor]

    def differences(self, other: Result) -> list[str]:
        pairs = zip_longest(self.losses.tolist(), other.losses.tolist())
        found = [f"losses from step {step}" for step, (mine, theirs) in enumerate(pairs) if mine != theirs][:1]
        for part in ("tables", "dense", "fused_state", "dense_state"):
            mine, theirs = getattr(self, part), getattr(other, part)
            if mine.keys() != theirs.keys():
                found.append(f"{part}: {sorted(mine)} against {sorted(theirs)}")
                continue
            found += [f"{part} {key}" for key in mine if not torch.equal(mine[key], theirs[key])]
        return found


Factor = Callable[[int], float]  # step -> what the learning rates are multiplied by
AfterStep = Callable[[int, Model], None]  # called with the step's index and the module
Seen = Callable[[int], int]
"""Batch -> how many updates the lookup of its fused tables sees: those of all batches before that one."""


def unchanged(step: int) -> float:
    return 1.0


def train(case: Case, **options: Any) -> Result:
    """The plain loop: the module's own forward looks up what it is given."""
    return train_delayed(case, None, **options)


def on_ranks(ranks: Ranks, case: Case, staleness: int = 0, **options: Any) -> list[Result]:
    if staleness:
        return ranks.run_once(train_delayed, case, Delayed(staleness), **options)
    return ranks.run_once(train, case, **options)


def differences(actual: list[Any], expected: list[Any]) -> list[list[str]]:
    return [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)]


@dataclass(frozen=True)
class Delayed:
    staleness: int
    fresh: tuple[int, ...] = (0,)  # nothing was looked up ahead for these: the first of an epoch, or of a resumed run

    def __call__(self, batch: int) -> int:
        return max(batch - self.staleness, *(start for start in (0, *self.fresh) if start <= batch))


@dataclass(frozen=True)
class Switching:
    staleness: int
    start: int
    end: int

    def __call__(self, batch: int) -> int:
        if batch < self.start or batch >= self.end + self.staleness:  # the last ones were looked up before the end
            return batch
        return max(self.start, batch - self.staleness)


def train_delayed(
    case: Case,
    seen: Seen | None = Delayed(1),
    *,
    num_steps: int = NUM_STEPS,
    device_type: str = "cpu",
    after_step: AfterStep | None = None,
    factor: Factor = unchanged,
    untrained: Collection[int] = (),
) -> Result:
    """The same with delayed updates: tables of the fused backward are looked up `seen(N)` updates into training.

    Batches in `untrained` have a forward and no backward: their update changes nothing.

    Data-parallel tables, in collections of their own, are looked up after the dense optimizer's step.
    """
    split = case if seen is None else split_data_parallel(case)
    rank, dmp, module, optimizer, device = set_up(split, device_type)
    early = [name for name in sorted(split.collections) if not name.endswith("_dp")]
    late = [name for name in sorted(split.collections) if name.endswith("_dp")]
    batches = [to_device(make_batch(case, index, rank), device) for index in range(num_steps)]
    embeddings: dict[int, dict[str, Any]] = {}
    to_look_up = {} if seen is None else {index: seen(index) for index in range(num_steps)}

    def look_up(num_updates: int) -> None:
        for index in [index for index, num in to_look_up.items() if num == num_updates]:
            set_fused_rates(dmp, factor(index))  # kernels take the rate of an update with its lookup
            embeddings[index] = {name: module.embeddings(name, batches[index]) for name in early}

    losses = []
    for index in range(num_steps):
        look_up(index)
        set_fused_rates(dmp, factor(index))
        optimizer.zero_grad()
        if seen is None:
            loss = dmp(batches[index])
        else:
            own = {name: module.embeddings(name, batches[index]) for name in late}
            loss = dmp(batches[index], embeddings.pop(index) | own)
        losses.append(loss.detach())
        if index in untrained:
            continue
        loss.backward()
        set_rates(optimizer, factor(index))
        optimizer.step()
        if after_step is not None:
            after_step(index, module)
    return collect(module, optimizer, losses)


def split_data_parallel(case: Case) -> Case:
    """Return a case whose data-parallel tables, which the dense optimizer writes, are in collections of their own."""
    tables = (
        dataclasses.replace(table, collection=f"{table.collection}_dp") if table.sharding == "data_parallel" else table
        for table in case.tables
    )
    return dataclasses.replace(case, tables=tuple(tables))


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("first_lr", group["lr"]) * factor


def set_fused_rates(dmp: DistributedModelParallel, factor: float) -> None:
    set_rates(dmp.fused_optimizer, factor)
    dmp.fused_optimizer.zero_grad()


def collect(module: Model, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Result:
    tables, fused_state, dense = {}, {}, {}
    sharded = {name: child for name, child in module.named_modules() if isinstance(child, ShardedModule)}
    for child in sharded.values():
        for key, value in child.state_dict().items():
            tables.update(local(key.split(".")[-2], value))
        for key, states in child.fused_optimizer.state_dict()["state"].items():
            for kind, value in states.items():
                fused_state.update(local(f"{key.split('.')[-2]} {kind.split('.')[-1]}", value))
    dense_names = {}
    for name, parameter in module.named_parameters():
        inside = any(name.startswith(f"{outer}.") for outer in sharded)
        if not inside:
            dense[name] = parameter.detach().cpu().clone()
        dense_names[id(parameter)] = name.split(".")[-2] if inside else name
    dense_state = {
        f"{dense_names[id(parameter)]} {kind}": value.detach().cpu().clone()
        for parameter, states in optimizer.state.items()
        for kind, value in states.items()
        if isinstance(value, Tensor)
    }
    return Result(torch.stack(losses).cpu(), tables, dense, fused_state, dense_state)


def set_up(
    case: Case, device_type: str, wrapper: DataParallelWrapper | None = None
) -> tuple[int, DistributedModelParallel, Model, torch.optim.Optimizer, torch.device]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    module = Model(case)
    weights = {name: getattr(module, name).state_dict() for name in case.collections}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan, sharders = make_plan(case, module, world_size, device_type), _sharders(case, device)
    dmp = DistributedModelParallel(module, env, device, plan, sharders, data_parallel_wrapper=wrapper)
    for name, state in weights.items():
        getattr(module, name).load_state_dict(state)
    return rank, dmp, module, dense_optimizer(module), device


def _sharders(case: Case, device: torch.device) -> list[Any] | None:
    if case.comms is None:
        return None
    codecs = get_qcomm_codecs_registry(QCommsConfig(*map(CommType, case.comms)), device=device)
    kinds = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    return [kind(qcomm_codecs_registry=codecs) for kind in kinds]


def local(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, ShardedTensor):
        return {
            f"{name} {shard.metadata.shard_offsets}": shard.tensor.detach().cpu().clone()
            for shard in value.local_shards()
        }
    if isinstance(value, DTensor):
        value = value.tolocal()
    return {name: value.detach().cpu().clone()} if isinstance(value, Tensor) else {}


def to_device(batch: Any, device: torch.device) -> Any:
    kjt, index = batch.inputs["sparse"]
    inputs = {"sparse": (kjt.to(device), index)}
    return dataclasses.replace(batch, dense=batch.dense.to(device), inputs=inputs, labels=batch.labels.to(device))
