"""One line of advice from the numbers of a step: what to change, and what that can gain at most."""

from __future__ import annotations

from ..schedules import Schedule, Stage
from .overlap import Breakdown
from .spans import Category

WORTHWHILE = 0.03
"""Share of a step below which a gain is not worth a change."""


def advice(found: Breakdown, schedule: Schedule) -> str:
    """Return what to change first.

    Args:
        found: The mean step of the rank that the others wait for.
        schedule: What ran.
    """
    data_ms, exposed_ms = found.time_of(Category.DATA).busy_ms, found.time_of(Category.COMMUNICATION).exposed_ms
    choices = [
        (data_ms, f"waiting for data {data_ms:.3g} of {found.step_ms:.3g} ms: raise num_workers of the DataLoader"),
        (exposed_ms, f"waiting for other ranks {exposed_ms:.3g} of {found.step_ms:.3g} ms: {_another_mode(schedule)}"),
        (
            found.log_ms,
            f"self.log {found.log_ms:.3g} of {found.step_ms:.3g} ms: log fewer values, or with on_step=False",
        ),
        (
            found.loop_ms,
            f"Lightning's loop, callbacks and loggers {found.loop_ms:.3g} of {found.step_ms:.3g} ms, whatever the "
            "batch: raise the batch size, log_every_n_steps and the progress bar's refresh_rate",
        ),
    ]
    gain_ms, text = max(choices, key=lambda choice: choice[0])
    if gain_ms < WORTHWHILE * found.step_ms:
        return f"Advice: nothing to change here; {found.bound[0]} is what a step takes."
    share = f"{gain_ms / found.step_ms:.0%}" if found.step_ms else ""
    return f"Advice: {text}. That gains at most {gain_ms:.3g} ms a step ({share})."


def _another_mode(schedule: Schedule) -> str:
    """Return a mode that hides more than this one."""
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    if schedule.step_of(Stage.EMBEDDING_UPDATE) is not None:
        return "raise the batch size, or shard so that less travels"
    if schedule.staleness:
        return "take defer_update=True, which keeps the staleness"
    if lookup is None or lookup.offset < 1:
        return "take pipeline='fused_sparse_dist', which gives the same losses"
    return f"take pipeline='semi_sync' if a staleness of 1 will do; {schedule.name} is exact"
