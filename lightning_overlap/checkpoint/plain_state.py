"""Convert optimizer state of a run without this strategy, which numbered its parameters in the weights' order."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed import Group, gather_objects, warn_on_rank_zero
from ..tables import fused_only_tables, keep_dense, optimizer_name
from .dense_state import State, both_sides, is_by_name, names_of, shaped, shapes, take_table_states
from .parts import ENTRIES, FUSED, TABLE_OPTIMIZERS
from .table_state import ITERATION, KERNEL_KINDS, StateKey, fused_kernels, fused_state, table_weights

_SOURCES: Mapping[str, Mapping[str, str]] = {
    "EXACT_SGD": {},
    "EXACT_ADAGRAD": {"momentum1": "sum"},
    "EXACT_ROWWISE_ADAGRAD": {"momentum1": "sum"},
    "ADAM": {"momentum1": "exp_avg", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "PARTIAL_ROWWISE_ADAM": {"momentum1": "exp_avg", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
}
"""FBGEMM's optimizer -> kind of its state -> the corresponding kind in `torch.optim`."""

_ADAGRAD = "torch.optim.Adagrad"
_FUSED_CLASSES = {("sum",): _ADAGRAD, ("exp_avg", "exp_avg_sq"): "torch.optim.Adam"}  # by kinds of saved state

_Unused: TypeAlias = tuple[tuple[str, ...], str]
"""Kinds of saved state that a fused optimizer of this run cannot use, and its name."""


def take_plain_state(
    checkpoint: State, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], model: nn.Module, group: Group
) -> set[str]:
    """Convert a checkpoint's optimizer state in place, and return the names of tables whose state is not used.

    A table's state goes to the dense optimizer if that trains it now, else to its fused optimizer if that has the same
    kinds. All ranks call this. Raises a RuntimeError if the saved parameters cannot be identified.
    """
    states = checkpoint.get("optimizer_states") or []
    if all(map(is_by_name, states)):
        return set()
    if len(states) != len(optimizers):
        raise _unknown(f"it has the state of {len(states)} optimizers, this run has {len(optimizers)}")
    tables = table_weights(model)
    weights = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    mine = [names_of(optimizer, model) for optimizer in optimizers]
    owned = {name for groups in mine for names in groups for name in names}
    free = [name for name in weights if name in tables - owned]
    of_fused: dict[str, State] = {}
    named: list[State] = []
    for optimizer, groups, state in zip(optimizers, mine, states, strict=True):
        saved_groups, fused_groups = state["param_groups"], getattr(optimizer, "fused_groups", [])
        groups = groups[: len(groups) - len(fused_groups)]  # `combined_optimizer` adds its own at the end
        kept, found = _match(optimizer, groups, state, weights, free, tables)
        new_groups = [{**saved_groups[at], "params": names} for at, names in zip(kept, groups, strict=True)]
        for new_group in new_groups:
            new_group.pop("param_names", None)
        factor = schedule_factor([saved_groups[at] for at in kept])
        for fused in fused_groups:
            # `LinearLR` and others multiply the last rate: from this run's first rate they never reach the right rate.
            is_scheduled = factor is not None and "initial_lr" in fused
            new_groups.append({**fused, "params": []} | ({"lr": fused["initial_lr"] * factor} if is_scheduled else {}))
        of_run = {name: values for name, values in found.items() if name in owned and values}
        named.append({**state, "state": of_run, "param_groups": new_groups})
        of_fused |= {name: values for name, values in found.items() if name in free}
        for scheduler, saved in zip(schedulers, checkpoint.get("lr_schedulers", []), strict=False):
            if getattr(scheduler, "optimizer", None) is optimizer:
                for key, here in scheduler.state_dict().items():  # lists have an entry for each group
                    there = saved.get(key)
                    if isinstance(there, list) and isinstance(here, list) and len(there) == len(saved_groups):
                        saved[key] = [there[at] for at in kept] + here[len(kept) :]
    checkpoint["optimizer_states"] = named
    checkpoint[ENTRIES[TABLE_OPTIMIZERS]] = take_table_states(named, model, are_whole=True)
    checkpoint[ENTRIES[FUSED]], unused = _as_fused(of_fused, model, group)
    if unused:
        lines = [
            f"{', '.join(sorted(names))}: saved with {', '.join(kinds)}, which this run's {now} cannot use"
            for (kinds, now), names in unused.items()
        ]
        warn_on_rank_zero(
            "the checkpoint is of a run without this strategy, and this run cannot use all of its optimizer state: "
            f"{'; '.join(lines)}. The weights are loaded, the optimizer state of these tables is reset. "
            f"{_how_to_keep(unused, fused_only_tables(model))}"
        )
    return {name for names in unused.values() for name in names}


def schedule_factor(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the factor by which a schedule has multiplied the rates of all these groups; None if they differ."""
    rates = [(group["lr"], group["initial_lr"]) for group in groups if group.get("initial_lr")]
    if not rates or len(rates) < len(groups):
        return None
    factors = [float(rate) / float(initial) for rate, initial in rates]
    return factors[0] if all(math.isclose(factor, factors[0], rel_tol=1e-6) for factor in factors) else None


def _how_to_keep(unused: Mapping[_Unused, Collection[str]], fused_only: Collection[str]) -> str:
    fused_class = {kinds: _FUSED_CLASSES[kinds] for kinds, _ in unused if kinds in _FUSED_CLASSES}
    ways = [
        f"To keep {', '.join(kinds)}: fused_optimizer=({name}, {{'lr': ...}}){', on CUDA only' * (name != _ADAGRAD)}."
        for kinds, name in fused_class.items()
    ]
    ways.append(keep_dense(sorted(set().union(*unused.values())), fused_only))
    if any(fused_class.get(kinds) != _ADAGRAD and {*names} & {*fused_only} for (kinds, _), names in unused.items()):
        ways.append(
            "For these tables nothing keeps the state on a CPU: this run trains them on from their weights. If Adam "
            "trained them, give RowWiseAdagrad about ten times its rate."
        )
    return " ".join(ways)


def _unknown(why: str, groups: str = "") -> RuntimeError:
    return RuntimeError(
        "the checkpoint is of a run without this strategy, whose optimizers number their parameters, and these numbers "
        f"cannot be matched with this run's parameters: {why}. Pass the dense parameters to the optimizer in the saved "
        "run's order, or load only the weights, with "
        "module.load_state_dict(torch.load(PATH, weights_only=True)['state_dict']), and fit without ckpt_path, from "
        f"step 0.{groups}"
    )


def _match(
    optimizer: Optimizer,
    mine: list[list[str]],
    state: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    free: list[str],
    tables: set[str],
) -> tuple[list[int], dict[str, State]]:
    """Return for each of this run's groups (`mine`) the index of the saved group, and parameter name -> saved state."""
    # No dense optimizer of this run trains the `free` tables: one saved group had all of them, or none had any.
    saved = [[state["state"].get(key, {}) for key in group["params"]] for group in state["param_groups"]]
    has_own_group = len(saved) == len(mine) + 1
    fitting: dict[Any, tuple[list[int], dict[str, State]]] = {}
    for place in (None, *range(len(saved) if free else 0)):
        of_run = mine if place is None or not has_own_group else [*mine[:place], [], *mine[place:]]
        more = [free if index == place else [] for index in range(len(of_run))]
        if [len(states) for states in saved] != [len(a) + len(b) for a, b in zip(of_run, more, strict=True)]:
            continue
        kept = [index for index in range(len(saved)) if index != place or not has_own_group]
        choices = [_orders(*names, tables, list(weights)) for names in zip(of_run, more, strict=True)]
        for orders in itertools.product(*choices):
            matched = list(zip(orders, saved, strict=True))
            if all(_fits(names, states, weights, tables) for names, states in matched):
                found = {name: s for names, states in matched for name, s in zip(names, states, strict=True)}
                where = sorted((name, id(one)) for name, one in found.items() if shaped(one))
                fitting[tuple(kept), tuple(where)] = kept, found
    if len(fitting) != 1:
        of_tables = f" and {len(free)} fused tables" if free else ""
        fits = "several orders of them fit" if fitting else "no order of them fits"
        fused = f"\n  this run's fused tables: {shapes((name, weights[name]) for name in free)}" if free else ""
        raise _unknown(
            f"it has parameter groups of {[len(states) for states in saved]} parameters, this run's "
            f"{optimizer_name(optimizer)} has groups of {[len(names) for names in mine]}{of_tables}, and "
            f"{fits} the sizes and shapes",
            f"{both_sides(state, optimizer, mine)}{fused}",
        )
    return next(iter(fitting.values()))


def _orders(mine: list[str], free: list[str], tables: set[str], weights: list[str]) -> list[list[str]]:
    """Return possible orders of parameters in a saved group: the module's order, or tables first or last."""
    dense = [name for name in mine if name not in tables]
    of_tables = sorted({*mine, *free} & tables, key=weights.index)
    if not of_tables:
        return [mine]
    orders = [[*of_tables, *dense], [*dense, *of_tables]]
    if dense == sorted(dense, key=weights.index):
        orders.insert(0, sorted([*dense, *of_tables], key=weights.index))
    return [order for index, order in enumerate(orders) if order not in orders[:index]]


def _fits(names: Sequence[str], states: Sequence[State], weights: Mapping[str, Any], tables: set[str]) -> bool:
    shapes_match = (
        value.shape == weights[name].shape
        for name, state in zip(names, states, strict=True)
        for value in shaped(state).values()
    )
    return tables.isdisjoint(names) or all(shapes_match)


def _as_fused(
    states: Mapping[str, State], model: nn.Module, group: Group
) -> tuple[dict[str, Tensor], dict[_Unused, list[str]]]:
    """Convert states of unsharded tables into fused state by name of the piece; all ranks call this."""
    kernels = {name: kernel.optimizer.name for name, _, kernel in fused_kernels(model)}
    keys = [key for key in fused_state(model) if key.kind not in KERNEL_KINDS]
    keys_of: dict[str, set[StateKey]] = {}
    optimizer_of: dict[str, str] = {}
    for their_kernels, their_keys in gather_objects((kernels, keys), group):
        optimizer_of |= their_kernels
        for key in their_keys:
            keys_of.setdefault(key.weight, set()).add(key)
    taken: dict[str, Tensor] = {}
    unused: dict[_Unused, list[str]] = {}
    for name, state in states.items():
        now, there = optimizer_of.get(name, "no fused optimizer"), shaped(state)
        source_of = {key: _SOURCES.get(now, {}).get(key.kind) for key in keys_of.get(name, ())}
        if now not in _SOURCES or set(source_of.values()) != there.keys():
            if there:
                unused.setdefault((tuple(sorted(there)), now.removeprefix("EXACT_")), []).append(name)
            continue
        for key, source in source_of.items():
            value = there[str(source)]
            # Row-wise optimizers keep the mean over the columns; it commutes with sums and running means, to rounding.
            taken[str(key)] = value if key.columns is None else value[:, slice(*key.columns)].mean(1)
        taken[str(StateKey(name, ITERATION))] = torch.tensor([int(state.get("step", 0))])
    return taken, unused
