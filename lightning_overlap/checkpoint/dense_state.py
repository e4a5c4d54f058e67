"""State of the optimizers of `configure_optimizers`, by parameter name: positions depend on the plan and the rank."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from ..tables import local_part, optimizer_name
from ..text import some
from .table_state import Piece, dense_kernel_tables, local_parts, split_like, table_weights

State = dict[str, Any]


def by_name(optimizer: Optimizer, state: Mapping[str, Any], model: nn.Module) -> State:
    """Return an optimizer's `state_dict()`, `state`, by parameter names."""
    if isinstance(optimizer, KeyedOptimizer):  # its state_dict lacks the parameter groups
        state = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    if "param_groups" not in state:
        return dict(state)
    groups, states = [], {}
    for names, group in zip(names_of(optimizer, model), state["param_groups"], strict=True):
        groups.append({**group, "params": names})
        for name, key in zip(names, group["params"], strict=True):
            if key in state["state"]:
                states[name] = state["state"][key]
    return {**state, "state": states, "param_groups": groups}


def load_by_name(optimizer: Optimizer, saved: Mapping[str, Any], model: nn.Module) -> set[str]:
    """Load a result of `by_name`, or a `state_dict()`; return the names of the tables that only one of the two has.

    Raises a RuntimeError for other dense parameters.
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
    position_of = {name: position for position, name in enumerate(itertools.chain(*named))}
    new_groups = [
        {**group, "params": [position_of[name] for name in names]}
        for names, group in zip(named, saved["param_groups"], strict=True)
    ]
    states = {position: saved["state"][name] for name, position in position_of.items() if name in saved["state"]}
    optimizer.load_state_dict({**saved, "state": states, "param_groups": new_groups})
    return moved


def shapes(parameters: Iterable[tuple[object, Tensor | None]]) -> str:
    """Return names or numbers of parameters with the shapes of their tensors, for a message; None: without state."""
    shown = [f"{name} {'without state' if value is None else tuple(value.shape)}" for name, value in parameters]
    return some(shown, 30) or "no parameters (a learning rate of fused tables)"


def both_sides(saved: Mapping[str, Any], optimizer: Optimizer, named: list[list[str]]) -> str:
    """Return a line, for a message, for each group of a saved `state_dict()` and of an optimizer (`named`)."""
    lines = [
        f"\n  saved group {index}: "
        + shapes((key, next(iter(shaped(saved["state"].get(key, {})).values()), None)) for key in group["params"])
        for index, group in enumerate(saved["param_groups"])
    ]
    lines += [
        f"\n  this run's group {index}: {shapes(zip(names, group['params'], strict=True))}"
        for index, (names, group) in enumerate(zip(named, optimizer.param_groups, strict=False))
    ]
    return "".join(lines)


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
    """Move the state of this rank's shards (or `are_whole` tables) of dense-kernel tables out of `by_name` states."""
    weights = dense_kernel_tables(model)
    pieces: dict[str, Piece] = {}
    for index, state in enumerate(states):
        for name in [name for name in state.get("state", {}) if name in weights]:
            for kind, value in state["state"].pop(name).items():
                if value is not None:
                    value = local_part(torch.as_tensor(value))
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
            # The update count of Adam is one number.
            stacked = torch.cat([torch.zeros_like(s.tensor, dtype=dtype) for s in weight.local_shards()])
            pieces[key] = split_like(weight, stacked) if len(size) else torch.zeros(size, dtype=dtype)
    return pieces


def put_table_states(pieces: Mapping[str, Piece], states: list[State]) -> None:
    """Write loaded pieces into `by_name` states, in place; sharded pieces as this rank's concatenated shards."""
    for key, piece in pieces.items():
        index, name, kind = split_table_key(key)
        parts = [part for _, part in local_parts(piece)]
        value = torch.cat(parts) if isinstance(piece, ShardedTensor) else parts[0]
        states[index]["state"].setdefault(name, {})[kind] = value


def names_of(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the parameters' names by group; for parameters that the model lacks, "group:position"."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), f"{index}:{position}") for position, parameter in enumerate(group["params"])]
        for index, group in enumerate(optimizer.param_groups)
    ]


def is_by_name(state: Mapping[str, Any]) -> bool:
    """Return whether a state is a result of `by_name` and not a `state_dict()` of `torch.optim`."""
    return all(isinstance(name, str) for group in state.get("param_groups", []) for name in group["params"])
