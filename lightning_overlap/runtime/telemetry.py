"""Name each stage and its batch to a profiler, an observer and a timer, and in errors; next to free without them."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from ..compat.torch import is_profiled
from ..schedules import Stage, StreamName
from .interfaces import Observer, StageTimer
from .streams import NOTHING


def _ignore(kind: str, stage: Stage, batch: int) -> None:
    """Take the place of an observer."""


class Telemetry:
    """Tells who watches a run which stage of which batch is issued, runs, or is waited for."""

    def __init__(self, observe: Observer | None = None, rank: int = 0) -> None:
        self.observe: Observer = observe or _ignore
        self.rank = rank
        self.timer: StageTimer | None = None  # of stages, while anybody records them

    def stage(self, stage: Stage, batch: int) -> "InStage":
        """Return a context around a stage of a batch, which names it to the profiler and in any error."""
        return InStage(stage, batch, self.rank)

    def timed(self, stage: Stage, batch: int, stream: StreamName) -> AbstractContextManager[None]:
        """Return a context that times a stage of a batch on a stream, which is current."""
        return NOTHING if self.timer is None else self.timer.during(stage, batch, stream)

    def merge(self, batch: int | None) -> AbstractContextManager[None]:
        """Return a context that times the wait for the embeddings of a batch; None: of no batch in flight."""
        return NOTHING if self.timer is None or batch is None else self.timer.merge(batch)


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
