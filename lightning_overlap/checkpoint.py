"""Checkpoints of sharded tables: a folder above one rank (every rank writes its shards), a plain file on one.

Lightning's default would pickle rank 0's shards alone, without a word about the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.types import ShardedTensor

from .sparse import sharded_modules

METADATA_NAME = "meta.pt"
"""The file that marks a checkpoint folder and holds what is not sharded: loops, callbacks, dense optimizers."""

_FUSED = "fused_optimizer"


def fused_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of all fused optimizers by name; the values are the kernels' own memory, sharded."""
    return {
        f"{name}.{parameter}.{kind}": value
        for name, sharded in sharded_modules(module).items()
        for parameter, states in sharded.fused_optimizer.state_dict()["state"].items()
        for kind, value in states.items()
    }


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint of `save_folder`."""
    return (path / METADATA_NAME).is_file()


def save_folder(
    checkpoint: dict[str, Any], path: Path, module: nn.Module, *, is_rank_zero: bool, barrier: Callable[[], None]
) -> None:
    """Write a checkpoint folder. It takes its name only when it is whole, so a crash leaves the old one.

    Args:
        checkpoint: What Lightning gathered; its `state_dict` is written sharded, the rest by rank 0.
        path: The folder, the same on every rank.
        module: The sharded module.
        is_rank_zero: Whether this rank writes `meta.pt`.
        barrier: Waits for all ranks.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    if is_rank_zero:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
    barrier()
    state = _state(checkpoint.pop("state_dict"), module)
    save(state, checkpoint_id=unfinished)
    if is_rank_zero:
        torch.save(checkpoint, unfinished / METADATA_NAME)
        _remove(path)
        unfinished.rename(path)
    barrier()


def load_folder(path: Path, module: nn.Module, *, weights_only: bool) -> dict[str, Any]:
    """Read a checkpoint folder into a sharded module, in place; return the rest of the checkpoint."""
    # Tensors of both state dicts are the module's own memory: loading into them is loading the module.
    load(_state(module.state_dict(), module), checkpoint_id=path)
    rest: dict[str, Any] = torch.load(path / METADATA_NAME, map_location="cpu", weights_only=weights_only)
    return rest


def whole(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a checkpoint with whole tables in the place of one rank's shards, and the fused state added."""
    state_dict = {name: _whole(value) for name, value in checkpoint["state_dict"].items()}
    fused = {name: _whole(value) for name, value in fused_state(module).items()}
    return {**checkpoint, "state_dict": state_dict, _FUSED: fused}


def load_whole(checkpoint: Mapping[str, Any], module: nn.Module) -> None:
    """Copy the fused state of a `whole` checkpoint into the kernels. Checkpoints without it change nothing."""
    saved = checkpoint.get(_FUSED, {})
    for name, value in fused_state(module).items():
        if name not in saved:
            continue
        if not isinstance(value, ShardedTensor):
            value.copy_(saved[name])
            continue
        for shard in value.local_shards():
            shard.tensor.copy_(saved[name][_window(shard.metadata)])


def _state(state_dict: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    fused = fused_state(module)
    return {"model": state_dict, _FUSED: fused} if fused else {"model": state_dict}


def _whole(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    tensor = torch.empty(value.size(), dtype=value.dtype)
    for shard in value.local_shards():
        tensor[_window(shard.metadata)] = shard.tensor.detach().to(tensor)
    return tensor


def _window(metadata: Any) -> tuple[slice, ...]:
    bounds = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in bounds)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
