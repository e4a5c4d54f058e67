"""The groups of a combined optimizer after a resume that trains other tables: each group has the rate of its tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..tables import TABLES, DenseAndFused
from .dense_state import State
from .plain_state import schedule_factor

_OF_NO_GROUP = ("milestones", "schedulers")  # lists in the state of schedulers, some with an underscore before


def match_rate_groups(checkpoint: State, optimizers: Sequence[Optimizer], schedulers: Iterable[Any]) -> None:
    """Let the saved groups of combined optimizers, and their schedulers, be those of this run's tables, in place.

    A group whose tables were all frozen when saved begins with this run's rate, moved as the schedule has moved the
    others. A saved group whose tables are all frozen now is left out. Other differences stay, for the error about them.
    """
    states = checkpoint.get("optimizer_states") or []
    for optimizer, state in zip(optimizers, states, strict=False):
        if isinstance(optimizer, DenseAndFused) and (sources := _sources(optimizer, state["param_groups"])) is not None:
            own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
            saved_schedulers = checkpoint.get("lr_schedulers", [])
            matched = list(zip(own, saved_schedulers, strict=False)) if len(own) == len(saved_schedulers) else []
            _match(optimizer, state, sources, matched)


def _sources(optimizer: DenseAndFused, saved: Sequence[Mapping[str, Any]]) -> list[int | None] | None:
    """Return the saved group of each of the optimizer's groups, or None for a new one; None if nothing is to do."""
    num_dense = len(optimizer.dense.param_groups)
    fused = [at for at, group in enumerate(saved) if TABLES in group]
    if len(saved) - len(fused) != num_dense:
        return None  # saved by an earlier version, or with another dense part
    sources: list[int | None] = list(range(num_dense))
    for group in optimizer.fused_groups:
        alike = [at for at in fused if not set(group[TABLES]).isdisjoint(saved[at][TABLES])]
        if len(alike) > 1 or (alike and alike[0] in sources):
            return None
        sources.append(alike[0] if alike else None)
    return None if sources == list(range(len(saved))) else sources


def _match(
    optimizer: DenseAndFused, state: State, sources: list[int | None], schedulers: list[tuple[Any, State]]
) -> None:
    saved, num_saved = state["param_groups"], len(state["param_groups"])
    factor = schedule_factor(saved)
    groups = []
    for at, own in zip(sources, optimizer.param_groups, strict=True):
        if at is not None:
            groups.append({**saved[at], **({TABLES: own[TABLES]} if TABLES in own else {})})
            continue
        rate = own["lr"] if factor is None or "initial_lr" not in own else own["initial_lr"] * factor
        for scheduler, there in schedulers:
            if isinstance(scheduler, LambdaLR):
                rate = own["initial_lr"] * scheduler.lr_lambdas[len(groups)](there["last_epoch"])
        groups.append({**own, "params": [], "lr": rate})
    state["param_groups"] = groups
    for scheduler, there in schedulers:
        for key, here in scheduler.state_dict().items():  # lists have an entry for each group
            listed = there.get(key)
            if key.strip("_") in _OF_NO_GROUP or not isinstance(here, list) or not isinstance(listed, list):
                continue
            if len(listed) == num_saved and len(here) == len(sources):
                there[key] = [own if at is None else listed[at] for at, own in zip(sources, here, strict=True)]
