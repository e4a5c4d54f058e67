"""A batch between its fetch and the end of its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .stages import Stage, StreamName


@dataclass(slots=True)
class InFlightBatch:
    """One batch in flight. Holding it keeps alive every tensor that a queued kernel or collective still reads.

    Args:
        index: Batches fetched before this one in the epoch.
        batch: The staged batch, the very object that `training_step` will get.
        batch_idx: What the data loader counts for it.
        dataloader_idx: Which loader of a `CombinedLoader` it came from.
    """

    index: int
    batch: Any
    batch_idx: int = 0
    dataloader_idx: int = 0
    done: dict[Stage, tuple[StreamName, Any]] = field(default_factory=dict)
    """Stages issued so far, each with its stream and the event recorded behind it."""
    modules: dict[str, Any] = field(default_factory=dict)
    """State of each pipelined module for this batch, by the module's name; the sparse stages own it."""
    consumed: bool = False
    """Whether its `training_step` has begun."""
