"""Costs of a step under a virtual clock. Functions that ranks run."""

from __future__ import annotations

from lightning_overlap.tuning import Costs, costs_of

from ..callbacks.monitors import steady_step
from ..support.cases import Case


def costs_of_a_steady_step(case: Case, pipeline: str) -> tuple[Costs, float]:
    """Train; return the costs of a step, with the all-to-alls of the tables alone, and what it took."""
    spans, window = steady_step(case, pipeline)
    return costs_of(spans, window), window[1] - window[0]
