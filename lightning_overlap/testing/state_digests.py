"""The state after training, as digests that compare bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

from ..tables import sharded_modules, table_modules


def digests(module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return a digest of the bits of every weight and optimizer state that this rank holds, by name."""
    return {name: _digest(tensor) for name, tensor in _states(module, optimizers)}


def _states(module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    sharded = sharded_modules(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for what, tensors in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if not is_in(name, sharded):
                yield f"{what} {name}", tensor
    for outer, child in sharded.items():
        for name, value in child.state_dict().items():
            yield from _locals(f"table {outer}.{name}", value)
    for outer, child in table_modules(module).items():
        for name, state in child.fused_optimizer.state_dict()["state"].items():
            for kind, value in state.items():
                yield from _locals(f"fused optimizer state {outer}.{name} {kind}", value)
    for optimizer in optimizers:
        for weight, kinds in optimizer.state.items():
            for kind, value in kinds.items():
                if isinstance(value, Tensor):
                    yield f"optimizer state {names.get(id(weight), 'of a weight')} {kind}", value


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight belongs to one of these modules, by its name."""
    return any(name.startswith(f"{outer}.") for outer in modules)


def _locals(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield f"{name} at {tuple(shard.metadata.shard_offsets)}", shard.tensor
    elif isinstance(value, DTensor):
        yield name, value.to_local()
    elif isinstance(value, Tensor):
        yield name, value


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
