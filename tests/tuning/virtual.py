"""Costs of a step under a virtual clock. Functions that ranks run."""

from __future__ import annotations

import time
from unittest import mock

from lightning_overlap.profiling import Category
from lightning_overlap.profiling.spans import ALL_TO_ALLS
from lightning_overlap.tuning import Costs, costs_of

from ..callbacks.monitors import _Recorded
from ..profiling.virtual import VirtualClock, run
from ..support.cases import Case


def costs_of_a_steady_step(case: Case, pipeline: str) -> tuple[Costs, float]:
    """Train; return the costs of a step, with the all-to-alls of the tables alone, and what it took."""
    clock, recorded = VirtualClock(), _Recorded(4)
    with mock.patch.object(time, "perf_counter", clock.now_s):
        run(case, pipeline, 10, clock, callbacks=[recorded])
    spans = [
        span
        for span in recorded.recorder.spans()
        if span.kind not in (Category.COMMUNICATION, Category.WAIT) or span.name in ALL_TO_ALLS
    ]
    window = recorded.recorder.windows()[-1]
    return costs_of(spans, window), window[1] - window[0]
