"""The all-to-alls of a process: a latency put on top of them, and a record of when they were on their way.

One place in PyTorch starts them all (`torch.distributed.all_to_all_single`), so ours and TorchRec's are seen alike.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist

from .timeline import Account, Kind, Span, account

_NAMES = {
    "SplitsAllToAllAwaitable": "sizes",
    "_Sizes": "sizes",
    "KJTAllToAllTensorsAwaitable": "ids",
    "All2All_Pooled_Req": "rows",
    "All2All_Seq_Req": "rows",
    "Variable_Batch_All2All_Pooled_Req": "rows",
}
"""Where TorchRec issues an all-to-all (a class on the call stack) -> what travels."""

NAMES = ("sizes", "ids", "rows", "gradients", "other")
"""What travels in an all-to-all."""

_DEPTH = 12
"""Frames between the class that wants an all-to-all and the call."""


class Wire:
    """Slows down and records the all-to-alls of this process.

    Args:
        all_to_all_ms: Each ends no earlier than this after its issue.
    """

    def __init__(self, all_to_all_ms: float = 0.0) -> None:
        self.latency_s = all_to_all_ms / 1e3
        self.spans: list[Span] = []
        self._recording = False
        self._real = dist.all_to_all_single

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Stand where the all-to-alls are issued; without a latency only while they are recorded."""
        with mock.patch.object(dist, "all_to_all_single", self._all_to_all_single):
            yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """Record all that is issued from here on, as communication and as waits; milliseconds of `perf_counter`."""
        spans: list[Span] = []
        self.spans, self._recording = spans, True
        try:
            with self.installed():
                yield spans
        finally:
            self._recording = False

    def _all_to_all_single(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        kwargs["async_op"] = True
        real = self._real(*args, **kwargs)
        work = _Work(real, self.latency_s, self.spans if self._recording else None)
        return work if async_op else work.wait() and None


class _Work(dist.Work):
    """A collective under way; tells when it ended, and who waited for it how long."""

    def __init__(self, work: dist.Work, latency_s: float, spans: list[Span] | None) -> None:
        super().__init__()
        self._work, self._spans = work, spans
        self._start_s = time.perf_counter()
        self._not_before_s = self._start_s + latency_s
        if spans is not None:
            self._name = _what_travels()
            work.get_future().add_done_callback(self._done)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is over, and no shorter than the latency."""
        begin_s = time.perf_counter()
        time.sleep(max(0.0, self._not_before_s - begin_s))
        ended = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        if self._spans is not None:
            now_s = time.perf_counter()
            self._spans.append(Span(begin_s * 1e3, now_s * 1e3, Kind.WAIT, "host", self._name))
        return ended

    def _done(self, _: Any) -> None:
        assert self._spans is not None
        end_s = max(time.perf_counter(), self._not_before_s)
        self._spans.append(Span(self._start_s * 1e3, end_s * 1e3, Kind.COMMUNICATION, "wire", self._name))


def account_by_step(spans: Iterable[Span], ends_ms: list[float]) -> list[Account]:
    """Account for each step between the ends of steps."""
    spans = list(spans)
    return [account(spans, window) for window in itertools.pairwise(ends_ms)]


def by_name(spans: Iterable[Span], ends_ms: list[float]) -> dict[str, tuple[float, float]]:
    """Return what travelled -> milliseconds that it was on its way, and that the host waited for it.

    Args:
        spans: What was recorded.
        ends_ms: Ends of steps. The numbers are medians over the steps; an all-to-all counts where it was issued, a
            wait where it began.
    """
    spans = list(spans)
    steps = list(itertools.pairwise(ends_ms))

    def typical(name: str, kind: Kind) -> float:
        times = [(span.start_ms, span.duration_ms) for span in spans if span.name == name and span.kind is kind]
        return median(sum(ms for start, ms in times if begin <= start < end) for begin, end in steps)

    present = {span.name for span in spans}
    return {name: (typical(name, Kind.COMMUNICATION), typical(name, Kind.WAIT)) for name in NAMES if name in present}


def _what_travels() -> str:
    """Say which all-to-all is being issued, by who is on the call stack."""
    frame = inspect.currentframe()
    for _ in range(_DEPTH):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        owner, _, method = frame.f_code.co_qualname.rpartition(".")
        if method == "backward":
            return "gradients"
        if owner in _NAMES:
            return _NAMES[owner]
    return "other"
