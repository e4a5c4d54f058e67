"""State of the optimizers of `configure_optimizers`, by parameter name.

`torch.optim` numbers parameters by position, but the tables that an optimizer owns, and their order, depend on the
sharding plan and the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from ..tables import optimizer_name
from ..text import some
from .table_state import Piece, dense_kernel_tables, local_parts, map_shards, split_like, table_weights

State = dict[str, Any]

Sized: TypeAlias = tuple[object, Tensor | None]
"""Name or number of a parameter, and a tensor of its shape; None if it has no state."""


def by_name(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    model: nn.Module,
    more: Mapping[Tensor, Mapping[str, Tensor]],
) -> State:
    """Return an optimizer's `state_dict()` with the model's parameter names instead of positions.

    Args:
        optimizer: The optimizer.
        state: Its `state_dict()`; on ranks without it empty, and then the result is empty.
        model: The model with its parameters.
        more: Parameter -> further kinds of state, tensors of any shape.
    """
    if isinstance(optimizer, KeyedOptimizer):  # its state_dict lacks the parameter groups
        state = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    if "param_groups" not in state:
        return dict(state)
    name_of: dict[Any, str] = {}
    further: dict[str, Mapping[str, Tensor]] = {}
    groups, saved_groups = [], state["param_groups"]
    for names, group, own in zip(names_of(optimizer, model), saved_groups, optimizer.param_groups, strict=True):
        name_of.update(zip(group["params"], names, strict=True))
        groups.append({**group, "params": names})
        further |= {name: more[weight] for name, weight in zip(names, own["params"], strict=True) if weight in more}
    states = {name_of[key]: value for key, value in state["state"].items() if key in name_of}
    states |= {name: {**states.get(name, {}), **kinds} for name, kinds in further.items()}
    return {**state, "state": states, "param_groups": groups}


def load_by_name(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], model: nn.Module) -> set[str]:
    """Load a result of `by_name`, or a `state_dict()` of `torch.optim`, into an optimizer.

    Returns:
        Names of the tables that only the optimizer or only the saved state has.

    Raises:
        RuntimeError: The saved optimizer has other dense parameters.
    """
    if not is_by_name(saved):
        optimizer.load_state_dict(dict(saved))
        return set()
    groups, named = optimizer.param_groups, names_of(optimizer, model)
    if len(groups) != len(saved["param_groups"]):
        raise RuntimeError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this run's "
            f"{optimizer_name(optimizer)} has {len(groups)} (combined_optimizer adds one for each fused learning "
            "rate): load with the configure_optimizers that the checkpoint was saved with."
            f"{both_sides(saved, optimizer, named)}"
        )
    moved = set(itertools.chain(*named)) ^ {name for group in saved["param_groups"] for name in group["params"]}
    other = moved - table_weights(model)
    if other:
        raise RuntimeError(
            f"the saved optimizer and this run's {optimizer_name(optimizer)} have different parameters: "
            f"{sorted(other)[:5]}. Load with the module and configure_optimizers that the checkpoint was saved with."
        )
    if isinstance(optimizer, KeyedOptimizer):  # its load_state_dict requires existing state
        for names, group, saved_group in zip(named, groups, saved["param_groups"], strict=True):
            group.update({**saved_group, "params": group["params"]})
            for name, parameter in zip(names, group["params"], strict=True):
                if name in saved["state"]:
                    optimizer.state[parameter] = {
                        kind: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                        for kind, value in saved["state"][name].items()
                    }
        return moved
    positions = itertools.count()
    new_groups = [
        {**saved_group, "params": list(itertools.islice(positions, len(names)))}
        for names, saved_group in zip(named, saved["param_groups"], strict=True)
    ]
    every_name = enumerate(itertools.chain(*named))
    states = {position: saved["state"][name] for position, name in every_name if name in saved["state"]}
    optimizer.load_state_dict({**saved, "state": states, "param_groups": new_groups})
    return moved


def shapes(parameters: Iterable[Sized]) -> str:
    """Return the parameters of a group with their shapes, for a message that shows why two groups do not match."""
    shown = [f"{name} {'without state' if value is None else tuple(value.shape)}" for name, value in parameters]
    return some(shown, 30) or "no parameters (a learning rate of fused tables)"


def both_sides(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, named: list[list[str]]) -> str:
    """Return a line for each parameter group, for a message that shows why a saved optimizer does not match.

    Args:
        saved: A `state_dict()` of `torch.optim`, or a result of `by_name`.
        optimizer: This run's optimizer.
        named: The parameters' names of its first groups.
    """
    theirs: list[list[Sized]] = [
        [(key, next(iter(shaped(saved["state"].get(key, {})).values()), None)) for key in group["params"]]
        for group in saved["param_groups"]
    ]
    mine: list[list[Sized]] = [
        list(zip(names, group["params"], strict=True))
        for names, group in zip(named, optimizer.param_groups, strict=False)
    ]
    sides = (("saved", theirs), ("this run's", mine))
    return "".join(
        f"\n  {whose} group {index}: {shapes(group)}" for whose, groups in sides for index, group in enumerate(groups)
    )


def shaped(state: State) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that have its shape or a part of it, by kind."""
    return {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim()}


def table_key(index: int, name: str, kind: str) -> str:
    """Return the name of a piece, from the index of the optimizer, the parameter and the kind of state."""
    return f"{index}/{name}/{kind.replace('%', '%25').replace('/', '%2F')}"


def split_table_key(key: str) -> tuple[int, str, str]:
    """Return index, name and kind of a `table_key`; names may contain slashes."""
    index, _, rest = key.partition("/")
    name, _, kind = rest.rpartition("/")
    return int(index), name, kind.replace("%2F", "/").replace("%25", "%")


def take_table_states(states: list[State], model: nn.Module, *, are_whole: bool = False) -> dict[str, Piece]:
    """Move the state of dense-kernel tables out of `by_name` states, in place.

    Args:
        states: A result of `by_name` for each optimizer.
        model: The sharded model.
        are_whole: Whether the states are of unsharded tables; otherwise of this rank's shards.

    Returns:
        Pieces by `table_key`.
    """
    weights = dense_kernel_tables(model)
    pieces: dict[str, Piece] = {}
    for index, state in enumerate(states):
        for name in [name for name in state.get("state", {}) if name in weights]:
            for kind, value in state["state"].pop(name).items():
                if value is not None:
                    value = torch.as_tensor(value)
                    stays = are_whole or value.dim() == 0
                    pieces[table_key(index, name, kind)] = value if stays else split_like(weights[name], value)
    return pieces


def empty_table_states(saved: Mapping[str, tuple[torch.Size, torch.dtype]], model: nn.Module) -> dict[str, Piece]:
    """Return zero pieces for the saved state (`table_key` -> shape and dtype) of this rank's dense-kernel tables."""
    weights = {name: weight for name, weight in dense_kernel_tables(model).items() if weight.local_shards()}
    pieces: dict[str, Piece] = {}
    for key, (size, dtype) in saved.items():
        weight = weights.get(split_table_key(key)[1])
        if weight is not None:
            empty = partial(torch.zeros_like, dtype=dtype)
            pieces[key] = map_shards(weight, empty) if len(size) else torch.zeros(size, dtype=dtype)
    return pieces


def put_table_states(pieces: Mapping[str, Piece], states: list[State]) -> None:
    """Write loaded pieces into `by_name` states, in place; sharded pieces as this rank's concatenated shards."""
    for key, piece in pieces.items():
        index, name, kind = split_table_key(key)
        parts = [part for _, part in local_parts(piece)]
        value = torch.cat(parts) if isinstance(piece, ShardedTensor) else parts[0]
        states[index]["state"].setdefault(name, {})[kind] = value


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the parameters' names by group; for parameters that the model lacks, "group:position"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), f"{index}:{position}") for position, parameter in enumerate(group["params"])]
        for index, group in enumerate(optimizer.param_groups)
    ]


def is_by_name(state: Mapping[str, Any]) -> bool:
    """Return whether a state is a result of `by_name` and not a `state_dict()` of `torch.optim`."""
    return all(isinstance(name, str) for group in state.get("param_groups", []) for name in group["params"])
