"""State of the optimizers of `configure_optimizers`, by parameter name.

By position, as `torch.optim` numbers parameters, the state would go to the wrong one: which tables an optimizer owns,
and in which order, depends on the sharding plan and on the rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from .table_state import Piece, dense_kernel_tables, empty_like, local_parts, split_like, table_weights

State = dict[str, Any]


def by_name(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: nn.Module) -> State:
    """Return an optimizer's state with parameter names in the place of positions.

    Args:
        optimizer: The optimizer; TorchRec's keyed ones too.
        state: Its `state_dict()`; empty where another rank has it.
        model: The module with the parameters' names.
    """
    names = _Names(model)
    if isinstance(optimizer, KeyedOptimizer):
        return _keyed_by_name(optimizer, names)
    if "param_groups" not in state:
        return dict(state)
    position_of: dict[int, str | None] = {}
    groups = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        named = names.of(group["params"], index)
        position_of.update(zip(saved["params"], named, strict=True))
        groups.append({**saved, "params": [name for name in named if name is not None]})
    states = {position_of[key]: value for key, value in state["state"].items() if position_of.get(key) is not None}
    return {**state, "state": states, "param_groups": groups}


def add_by_name(
    state: State, optimizer: torch.optim.Optimizer, more: Mapping[Tensor, Mapping[str, Tensor]], model: nn.Module
) -> None:
    """Add further kinds of state to what `by_name` returned, in place.

    Args:
        state: Receives them, under the parameters' names.
        optimizer: The optimizer that `state` is of.
        more: Parameter -> kind -> tensor of any shape; parameters of other optimizers are passed over.
        model: The module with the parameters' names.
    """
    names = _Names(model)
    for index, group in enumerate(optimizer.param_groups):
        for parameter, name in zip(group["params"], names.of(group["params"], index), strict=True):
            if name is not None and parameter in more:
                state["state"][name] = {**state["state"].get(name, {}), **more[parameter]}


def load_by_name(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Load saved state into an optimizer.

    Args:
        optimizer: Receives the state, on the devices of its parameters.
        saved: What `by_name` returned, or a `state_dict()` of `torch.optim`, with positions for names.
        model: The module with the parameters' names.

    Returns:
        Names of the tables that the optimizer owns and that have no saved state, or the other way around.

    Raises:
        RuntimeError: The optimizer has other parameters than the saved one, tables apart.
    """
    if not _is_by_name(saved):
        optimizer.load_state_dict(dict(saved))
        return []
    names = _Names(model)
    groups = optimizer.param_groups
    if len(groups) != len(saved["param_groups"]):
        raise RuntimeError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this run's "
            f"{type(optimizer).__name__} has {len(groups)} (combined_optimizer adds one for each fused learning rate): "
            "load with the configure_optimizers that the checkpoint was saved with."
        )
    named = [names.of(group["params"], index) for index, group in enumerate(groups)]
    moved = _compare(optimizer, named, saved, table_weights(model))
    if isinstance(optimizer, KeyedOptimizer):
        for group, group_names, saved_group in zip(groups, named, saved["param_groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
            for parameter, name in zip(group["params"], group_names, strict=True):
                if name in saved["state"]:
                    optimizer.state[parameter] = _moved(saved["state"][name], parameter)
        return moved
    states: dict[int, Any] = {}
    new_groups: list[dict[str, Any]] = []
    for group_names, saved_group in zip(named, saved["param_groups"], strict=True):
        first = sum(len(group["params"]) for group in new_groups)
        positions = list(range(first, first + len(group_names)))
        new_groups.append({**saved_group, "params": positions})
        at = zip(positions, group_names, strict=True)
        states.update({position: saved["state"][name] for position, name in at if name in saved["state"]})
    optimizer.load_state_dict({**saved, "state": states, "param_groups": new_groups})
    return moved


def warn_of_moved_states(tables: set[str]) -> None:
    """Warn of tables whose optimizer state starts anew, or has nowhere to go."""
    if tables:
        warnings.warn(
            f"{', '.join(sorted(tables))}: trained by the dense optimizer now and not when the checkpoint was "
            "saved, or the other way around; its state of these tables starts anew, or is not used.",
            UserWarning,
            stacklevel=2,
        )


def table_key(index: int, name: str, kind: str) -> str:
    """Return the name under which one kind of state of one parameter is saved; `split_table_key` takes it apart.

    Args:
        index: Number of the optimizer among those of `configure_optimizers`.
        name: Name of the parameter, any string.
        kind: Kind of state, `exp_avg` for example.
    """
    return f"{index}/{name}/{kind.replace('%', '%25').replace('/', '%2F')}"


def split_table_key(key: str) -> tuple[int, str, str]:
    """Return index, name and kind of a `table_key`; names may have slashes of their own."""
    index, _, rest = key.partition("/")
    name, _, kind = rest.rpartition("/")
    return int(index), name, kind.replace("%2F", "/").replace("%25", "%")


def take_table_states(states: list[State], model: nn.Module) -> dict[str, Piece]:
    """Move the state of tables that are sharded with a dense kernel out of `by_name` states.

    Args:
        states: What `by_name` returned for each optimizer; changed in place.
        model: The sharded module.

    Returns:
        The pieces, under the names of `table_key`.
    """
    weights = dense_kernel_tables(model)
    pieces: dict[str, Piece] = {}
    for index, state in enumerate(states):
        for name in [name for name in state.get("state", {}) if name in weights]:
            for kind, value in state["state"].pop(name).items():
                key = table_key(index, name, kind)
                if not isinstance(value, Tensor):
                    value = torch.tensor(value)
                pieces[key] = value if value.dim() == 0 else split_like(weights[name], value)
    return pieces


def empty_table_states(saved: Mapping[str, tuple[torch.Size, torch.dtype]], model: nn.Module) -> dict[str, Piece]:
    """Return pieces to load saved state of dense-kernel tables into, for the tables that this rank has a part of."""
    weights = {name: weight for name, weight in dense_kernel_tables(model).items() if weight.local_shards()}
    pieces: dict[str, Piece] = {}
    for key, (size, dtype) in saved.items():
        weight = weights.get(split_table_key(key)[1])
        if weight is not None:
            pieces[key] = torch.zeros(size, dtype=dtype) if len(size) == 0 else empty_like(weight, dtype)
    return pieces


def put_table_states(pieces: Mapping[str, Piece], states: list[State]) -> None:
    """Put loaded pieces back into `by_name` states."""
    for key, piece in pieces.items():
        index, name, kind = split_table_key(key)
        parts = [part for _, part in local_parts(piece)]
        value = torch.cat(parts) if isinstance(piece, ShardedTensor) else parts[0]
        states[index]["state"].setdefault(name, {})[kind] = value


class _Names:
    """Names of a module's parameters, by identity."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def of(self, parameters: Iterable[Any], group: int) -> list[str | None]:
        """Return a name for each parameter: None for fused tables, the position for those that the model lacks."""
        return [
            None if isinstance(parameter, ShardedTensor) else self._names.get(id(parameter), f"{group}:{position}")
            for position, parameter in enumerate(parameters)
        ]


def _keyed_by_name(optimizer: KeyedOptimizer, names: _Names) -> State:
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        named = names.of(group["params"], index)
        groups.append({**group, "params": [name for name in named if name is not None]})
        for parameter, name in zip(group["params"], named, strict=True):
            if name is not None and optimizer.state.get(parameter):
                state[name] = dict(optimizer.state[parameter])
    return {"state": state, "param_groups": groups}


def _moved(state: Mapping[str, Any], parameter: Tensor) -> State:
    return {
        kind: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
        for kind, value in state.items()
    }


def _is_by_name(saved: Mapping[str, Any]) -> bool:
    groups = saved.get("param_groups", [])
    return all(isinstance(name, str) for group in groups for name in group["params"])


def _compare(optimizer: Any, named: list[list[str | None]], saved: Mapping[str, Any], tables: set[str]) -> list[str]:
    mine = {name for group in named for name in group if name is not None}
    theirs = {name for group in saved["param_groups"] for name in group["params"]}
    other = (mine ^ theirs) - tables
    if other:
        raise RuntimeError(
            f"{type(optimizer).__name__} has other parameters than the one that was saved: {sorted(other)[:5]}. Load "
            "with the module and the configure_optimizers that the checkpoint was saved with."
        )
    return sorted(mine ^ theirs)
