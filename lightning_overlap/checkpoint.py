"""Checkpoints of sharded tables: a folder above one rank (every rank writes its shards), a plain file on one.

Lightning's default would pickle rank 0's shards alone, without a word about the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.types import ShardedTensor, ShardingType

from .sharded import sharded_modules

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


def check_can_save(
    path: Any, storage_options: Any, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Refuse what a folder would lose.

    Raises:
        ValueError: A remote path, storage options, or a dense optimizer with state for shards of a table.
    """
    if "://" in str(path) or storage_options is not None:
        raise ValueError(
            f"a checkpoint of sharded tables is a local folder, got {path!r}"
            f"{'' if storage_options is None else ' with storage_options'}. Save to a folder that all ranks share."
        )
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, sharded in sharded_modules(module).items():
        kinds = {table: parameter.sharding_type for table, parameter in sharded.module_sharding_plan.items()}
        for parameter_name, parameter in sharded.named_parameters():
            table = parameter_name.split(".")[-2]
            if id(parameter) in owned and kinds.get(table) != ShardingType.DATA_PARALLEL.value:
                raise ValueError(
                    f"{name}.{table} is sharded with a dense kernel: each rank's optimizer has state of its own "
                    "shards, which a checkpoint cannot hold yet. Give it a fused kernel, or shard it data-parallel."
                )


def save_folder(
    checkpoint: dict[str, Any],
    path: Path,
    module: nn.Module,
    *,
    is_rank_zero: bool,
    broadcast: Callable[[Any], Any],
) -> None:
    """Write a checkpoint folder. It takes its name only when it is whole, so a crash leaves the old one.

    Args:
        checkpoint: What Lightning gathered; its `state_dict` is written sharded, the rest by rank 0.
        path: The folder, the same on every rank.
        module: The sharded module.
        is_rank_zero: Whether this rank writes `meta.pt`.
        broadcast: Returns rank 0's value on every rank.

    Raises:
        OSError: Rank 0 could not write; raised on every rank.
    """
    unfinished, old = (path.with_name(f"{path.name}.{what}") for what in ("unfinished", "old"))

    def on_rank_zero(action: Callable[[], None]) -> None:
        """Run something on rank 0; an error reaches all ranks, which would else wait for it."""
        error = None
        if is_rank_zero:
            try:
                action()
            except OSError as err:
                error = f"{type(err).__name__}: {err}"
        error = broadcast(error)
        if error is not None:
            raise OSError(f"could not write the checkpoint {path}: {error}")

    def begin() -> None:
        _remove(unfinished)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        torch.save(checkpoint, unfinished / METADATA_NAME)
        _remove(old)
        if path.exists():
            path.rename(old)
        unfinished.rename(path)
        _remove(old)

    on_rank_zero(begin)
    save(_state(checkpoint.pop("state_dict"), module), checkpoint_id=unfinished)
    on_rank_zero(finish)


def load_folder(path: Path, module: nn.Module, *, weights_only: bool, strict: bool = True) -> dict[str, Any]:
    """Read a checkpoint folder into a sharded module, in place.

    Returns:
        The checkpoint as Lightning knows it; `state_dict` is the module's own.

    Raises:
        RuntimeError: The folder lacks something (unless `strict` is False), or is of another sharding plan whose
            fused state has other shapes.
    """
    # Tensors of both state dicts are the module's own memory: loading into them is loading the module.
    state_dict = module.state_dict()
    try:
        load(
            _state(state_dict, module),
            checkpoint_id=path,
            planner=DefaultLoadPlanner(allow_partial_load=not strict),
        )
    except CheckpointException as err:
        raise RuntimeError(
            f"could not load {path} into this model. Was it saved from other tables, or under a sharding plan that "
            "gives the fused optimizer's state other shapes (row-wise state, column-wise sharding)?"
        ) from err
    rest: dict[str, Any] = torch.load(path / METADATA_NAME, map_location="cpu", weights_only=weights_only)
    return {**rest, "state_dict": state_dict}


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
        if saved[name].shape != value.size():
            raise RuntimeError(
                f"the fused state {name} was saved with shape {tuple(saved[name].shape)}, this sharding plan has "
                f"{tuple(value.size())}: load it under the plan that it was saved under."
            )
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
