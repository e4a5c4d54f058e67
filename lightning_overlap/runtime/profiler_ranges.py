"""Name the stage and the batch to a profiler and in errors, at next to no cost while no profiler runs."""

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ..schedules import Stage

is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler may see this thread now."""
if "KINETO_USE_DAEMON" in os.environ:  # a daemon may start a profiler unseen by this thread
    is_profiled = partial(bool, True)


class InStage:
    """Goes around a stage of a batch: names it to the profiler and in any error."""

    __slots__ = ("_index", "_range", "_rank", "_stage")

    def __init__(self, stage: Stage, index: int, rank: int) -> None:
        self._stage, self._index, self._rank = stage, index, rank
        # A range costs 7 us.
        self._range = torch.profiler.record_function(f"## {stage} {index} ##") if is_profiled() else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            error.add_note(f"raised in stage {self._stage} of batch {self._index} on rank {self._rank}")
