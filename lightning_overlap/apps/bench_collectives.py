"""The all-to-alls of a process: a latency put on top of them, and what was waited for which of them, step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from ..distributed import Issue, WrappedWork, wrap_collectives
from ..profiling import Category, Interval, Span


def late_all_to_alls(latency_ms: float) -> AbstractContextManager[None]:
    """Have every all-to-all of this process end no earlier than this after its issue; the host waits (for a CPU)."""

    def late(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        work = issue()
        return None if work is None else _Late(work, latency_ms / 1e3)

    return wrap_collectives(late, ["all_to_all_single"])


class _Late(WrappedWork):
    """A collective under way that is over no earlier than a set time after its issue."""

    def __init__(self, work: dist.Work, latency_s: float) -> None:
        super().__init__(work)
        self._over_s = time.perf_counter() + latency_s

    @override
    def wait(self, timeout: Any = None) -> bool:
        time.sleep(self.left_s)
        return super().wait(timeout)

    @override
    def is_completed(self) -> bool:
        return not self.left_s and super().is_completed()

    @override
    def get_future(self) -> Any:
        late: Future[None] = Future()

        def tell(_: Any) -> None:
            timer = threading.Timer(self.left_s, late.set_result, (None,))
            timer.daemon = True
            timer.start()

        super().get_future().add_done_callback(tell)
        return late

    @property
    def left_s(self) -> float:
        return max(0.0, self._over_s - time.perf_counter())


def by_name(spans: Iterable[Span], steps: Sequence[Interval], lane: str) -> dict[str, tuple[float, float]]:
    """Return which collective -> milliseconds per step that it was under way, and that a lane waited for it.

    The numbers are medians over steps; a collective counts in the step of its issue, a wait where it began.
    """
    seen = [
        span
        for span in spans
        if span.kind is Category.COMMUNICATION or (span.kind is Category.WAIT and span.lane == lane)
    ]

    def typical(name: str, kind: Category) -> float:
        times = [(span.start_ms, span.duration_ms) for span in seen if span.name == name and span.kind is kind]
        return median(sum(ms for start, ms in times if begin <= start < end) for begin, end in steps)

    names = dict.fromkeys(span.name for span in seen)
    return {name: (typical(name, Category.COMMUNICATION), typical(name, Category.WAIT)) for name in names}
