"""Callbacks that users add to the Trainer: they ask the strategy what a run does, and change nothing of it.

`EmbeddingDeltas` needs packages of the extra `deltas`, so it is imported when it is asked for.
"""

from .monitor import OverlapMonitor as OverlapMonitor
from .timeline import OverlapTimeline as OverlapTimeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .deltas import EmbeddingDeltas as EmbeddingDeltas


def __getattr__(name: str) -> object:
    if name == "EmbeddingDeltas":
        from .deltas import EmbeddingDeltas as EmbeddingDeltas

        return EmbeddingDeltas
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
