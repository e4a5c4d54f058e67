"""Optimizer state of a checkpoint from a run without this strategy, in the form that runs with it have.

Such a run (`DDPStrategy`, one device) had whole tables, often owned by the optimizer of the dense part, and numbered
the parameters by position. The names come back from the order of the checkpoint's weights, checked by the states'
shapes. The state of tables goes to the dense optimizer where that owns them now, else to their fused optimizer where
that has the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import gather_objects
from .dense_state import State, _Names, table_key
from .sharded_folder import FUSED, TABLE_OPTIMIZERS
from .table_state import (
    _KERNEL_KINDS,
    ITERATION,
    _kernels,
    _split_row_wise,
    dense_kernel_tables,
    fused_state,
    table_weights,
)

_SOURCES: Mapping[str, Mapping[str, str]] = {
    "EXACT_SGD": {},
    "EXACT_ADAGRAD": {"momentum1": "sum"},
    "EXACT_ROWWISE_ADAGRAD": {"momentum1": "sum"},
    "ADAM": {"momentum1": "exp_avg", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "PARTIAL_ROWWISE_ADAM": {"momentum1": "exp_avg", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
}
"""FBGEMM's optimizer -> kind of its state -> the kind that `torch.optim`'s optimizer of this name has for it."""

_WEIGHTS_ALONE = (
    "Give configure_optimizers the dense parameters in the order of then, or go on from the weights alone: "
    "module.load_state_dict(torch.load(PATH, weights_only=True)['state_dict']), and fit without ckpt_path."
)


def take_plain_state(
    checkpoint: dict[str, Any],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    model: nn.Module,
    group: dist.ProcessGroup | None,
) -> dict[str, list[str]]:
    """Give the optimizer state of a checkpoint names, and its tables' state the form of fused optimizers, in place.

    Does nothing to checkpoints that runs with the strategy have saved. All ranks call this.

    Args:
        checkpoint: What was read: `state_dict`, `optimizer_states`, `lr_schedulers`.
        optimizers: Those of this run.
        schedulers: Learning-rate schedulers of this run; they may have more groups than the saved ones.
        model: The sharded module.
        group: A gloo group of all ranks; None on one rank.

    Returns:
        What is not used: the kinds of state, and the fused optimizer that has no place for them -> names of tables.

    Raises:
        RuntimeError: The parameters that the saved optimizers had cannot be told.
    """
    states = checkpoint.get("optimizer_states") or []
    if not any(isinstance(key, int) for state in states for key in _positions(state)):
        return {}
    if len(states) != len(optimizers):
        raise _unknown(f"it has the state of {len(states)} optimizers, this run has {len(optimizers)}")
    owned = {name for optimizer in optimizers for names in _names(optimizer, model) for name in names}
    weights = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    free = [name for name in weights if name in table_weights(model) - owned]
    of_fused: dict[str, State] = {}
    named = []
    for optimizer, state in zip(optimizers, states, strict=True):
        kept, matched = _match(optimizer, state, weights, free, model)
        named.append(_by_name(optimizer, state, kept, matched, model))
        for names, saved in matched:
            of_fused |= {name: values for name, values in zip(names, saved, strict=True) if name in free}
        for scheduler, lists in zip(schedulers, checkpoint.get("lr_schedulers", []), strict=False):
            if getattr(scheduler, "optimizer", None) is optimizer:
                _fit_lists(lists, scheduler.state_dict(), kept, len(state["param_groups"]))
    checkpoint["optimizer_states"] = named
    checkpoint[TABLE_OPTIMIZERS] = _take_dense_kernels(named, model)
    checkpoint[FUSED], unused = _as_fused(of_fused, model, group)
    return unused


def describe_unused(unused: Mapping[str, Sequence[str]]) -> str:
    """Return what a user reads of state that has no place."""
    lines = [f"{', '.join(sorted(tables))}: {what}" for what, tables in unused.items()]
    return (
        "the checkpoint is of a run without this strategy, and not all of its optimizer state has a place here. "
        f"{'; '.join(lines)}. The weights are loaded, the optimizer state of these tables starts anew. To go on with "
        "the optimizer that they had, give the strategy the fused form of it (on a CPU there are SGD, Adagrad and "
        "RowWiseAdagrad), or sharding='data_parallel' and no fused_optimizer: configure_optimizers then trains them."
    )


def _positions(state: Mapping[str, Any]) -> list[Any]:
    return [key for group in state.get("param_groups", []) for key in group["params"]]


def _unknown(why: str) -> RuntimeError:
    return RuntimeError(
        "the checkpoint is of a run without this strategy, whose optimizers number their parameters, and they cannot "
        f"be matched to those of this run: {why}. {_WEIGHTS_ALONE}"
    )


# -- which parameters the saved optimizer had -------------------------------------------------------------------

_Matched = list[tuple[list[str], list[State]]]
"""For each saved parameter group, the names of its parameters and their states."""


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of the dense parameters of each group; a fused group of `combined_optimizer` is left out."""
    names = _Names(model)
    num_dense = len(optimizer.param_groups) - len(getattr(optimizer, "fused_groups", []))
    groups = [names.of(group["params"], index) for index, group in enumerate(optimizer.param_groups[:num_dense])]
    return [[name for name in group if name is not None] for group in groups]


def _match(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    free: Sequence[str],
    model: nn.Module,
) -> tuple[list[int], _Matched]:
    """Return which saved groups this run's dense groups are, in their order, and what each saved group has."""
    mine = _names(optimizer, model)
    tables = table_weights(model)
    saved = state["param_groups"]
    sizes = [len(group["params"]) for group in saved]
    found: dict[tuple[Any, ...], tuple[list[int], _Matched]] = {}
    for kept in itertools.combinations(range(len(saved)), len(mine)):
        of_run = {index: mine[kept.index(index)] if index in kept else [] for index in range(len(saved))}
        more = [index for index in range(len(saved)) if sizes[index] > len(of_run[index])]
        fewer = [index for index in range(len(saved)) if sizes[index] < len(of_run[index])]
        if fewer or len(more) > 1 or (more and sizes[more[0]] != len(of_run[more[0]]) + len(free)):
            continue
        choices = [_orders(of_run[i], free if i in more else [], tables, list(weights)) for i in range(len(saved))]
        for orders in itertools.product(*choices):
            states = [[state["state"].get(key, {}) for key in group["params"]] for group in saved]
            matched = list(zip(orders, states, strict=True))
            if all(_fit(names, values, weights, tables) for names, values in matched):
                where = {
                    n: id(s) for names, values in matched for n, s in zip(names, values, strict=True) if _tensors(s)
                }
                found[(kept, *sorted(where.items()))] = (list(kept), matched)
    if len(found) != 1:
        of_tables = f" and {len(free)} tables that are trained in backward" if free else ""
        raise _unknown(
            f"it has parameter groups of {sizes} parameters, {type(optimizer).__name__} of this run has groups of "
            f"{[len(names) for names in mine]}{of_tables}, and {'several orders' if found else 'no order'} of them "
            f"{'fit' if found else 'fits'} the sizes and shapes"
        )
    return next(iter(found.values()))


def _orders(mine: list[str], free: Sequence[str], tables: set[str], weights: list[str]) -> list[list[str]]:
    """Return the orders in which a saved group may have had its parameters: the module's, or tables first or last."""
    dense = [name for name in mine if name not in tables]
    of_tables = sorted({*(name for name in mine if name in tables), *free}, key=weights.index)
    if not of_tables:
        return [mine]
    if not dense:
        return [of_tables]
    orders = [[*of_tables, *dense], [*dense, *of_tables]]
    if dense == sorted(dense, key=weights.index):
        orders.insert(0, sorted([*dense, *of_tables], key=weights.index))
    return [order for index, order in enumerate(orders) if order not in orders[:index]]


def _fit(names: Sequence[str], states: Sequence[State], weights: Mapping[str, Any], tables: set[str]) -> bool:
    if not any(name in tables for name in names):
        return True
    return all(
        value.shape == weights[name].shape
        for name, state in zip(names, states, strict=True)
        for value in _tensors(state).values()
    )


def _tensors(state: State) -> dict[str, Tensor]:
    """Return what of a parameter's state has the parameter's shape."""
    return {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim()}


# -- into the form of runs with the strategy --------------------------------------------------------------------


def _by_name(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    kept: Sequence[int],
    matched: _Matched,
    model: nn.Module,
) -> State:
    """Return the state as `dense_state.by_name` would, for the parameters that the optimizer has in this run."""
    mine = _names(optimizer, model)
    groups = [
        {**{key: value for key, value in state["param_groups"][index].items() if key != "param_names"}, "params": names}
        for index, names in zip(kept, mine, strict=True)
    ]
    groups += [{**group, "params": []} for group in getattr(optimizer, "fused_groups", [])]
    owned = {name for names in mine for name in names}
    found = {name: values for names, saved in matched for name, values in zip(names, saved, strict=True)}
    states = {name: dict(values) for name, values in found.items() if name in owned and values}
    return {**state, "state": states, "param_groups": groups}


def _fit_lists(saved: State, current: Mapping[str, Any], kept: Sequence[int], num_saved: int) -> None:
    """Let a scheduler's lists with an entry for each group have those of this run's groups, in place."""
    for key, value in saved.items():
        here = current.get(key)
        if isinstance(value, list) and isinstance(here, list) and len(value) == num_saved:
            saved[key] = [value[index] for index in kept] + here[len(kept) :]


def _take_dense_kernels(named: Sequence[State], model: nn.Module) -> dict[str, Tensor]:
    """Move the state of tables that a dense optimizer trains in shards out of named states, whole."""
    taken: dict[str, Tensor] = {}
    tables = dense_kernel_tables(model)
    for index, state in enumerate(named):
        for name in [name for name in state["state"] if name in tables]:
            for kind, value in state["state"].pop(name).items():
                if value is not None:
                    taken[table_key(index, name, kind)] = torch.as_tensor(value)
    return taken


def _as_fused(
    states: Mapping[str, State], model: nn.Module, group: dist.ProcessGroup | None
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the states of tables as those of the fused optimizers that have them now, and what has no place there."""
    mine = fused_state(model)
    numbers = {key: value for key, value in mine.items() if key.rpartition(".")[2] in _KERNEL_KINDS}
    kernels = {name: kernel.optimizer.name for name, _, kernel in _kernels(model)}
    own = (mine.keys() - numbers.keys(), numbers, kernels)
    everyone = [own] if group is None else gather_objects(own, group)
    keys = {key for theirs, _, _ in everyone for key in theirs}
    numbers = {key: value for _, theirs, _ in everyone for key, value in theirs.items()}
    optimizer_of = {name: optimizer for _, _, theirs in everyone for name, optimizer in theirs.items()}
    taken: dict[str, Tensor] = {}
    unused: dict[str, list[str]] = {}
    for name, state in states.items():
        sources = _SOURCES.get(optimizer_of.get(name, ""))
        there = _tensors(state)
        wanted = sorted(key for key in keys if key.startswith(f"{name}."))
        source_of = {key: (sources or {}).get(_split_row_wise(key)[0].rpartition(".")[2]) for key in wanted}
        used = {source for source in source_of.values() if source is not None}
        if sources is None or not set(source_of.values()) <= there.keys() or there.keys() - used:
            if there:
                kinds, now = (
                    ", ".join(sorted(there)),
                    optimizer_of.get(name, "no fused optimizer").removeprefix("EXACT_"),
                )
                unused.setdefault(f"saved with {kinds}, which {now} of this run does not take", []).append(name)
            continue
        for key, source in source_of.items():
            columns = _split_row_wise(key)[1]
            value = there[str(source)]
            # Row-wise optimizers keep the mean over the columns: of sums and running means it is the same, to rounding.
            taken[key] = value if columns is None else value[:, columns[0] : columns[0] + columns[1]].mean(1)
        taken |= {f"{name}.{kind}": numbers[f"{name}.{kind}"] for kind in _KERNEL_KINDS}
        taken[f"{name}.{ITERATION}"] = torch.tensor(
            [int(state.get("step", 0))], dtype=numbers[f"{name}.{ITERATION}"].dtype
        )
    return taken, unused
