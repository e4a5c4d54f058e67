"""A batch between its fetch and the end of its step."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedules import Stage, StreamName


@dataclass(slots=True)
class InFlightBatch:
    """One batch in flight. Holding it keeps alive every tensor that a queued kernel or collective still reads."""

    index: int
    """Batches fetched before this one in the epoch."""
    batch: Any
    """The staged batch, the very object that `training_step` will get."""
    batch_idx: int = 0
    """What its data loader counts for it."""
    dataloader_idx: int = 0
    done: dict[Stage, tuple[StreamName, Any]] = field(default_factory=dict)
    """Stages issued so far, each with its stream and the event recorded after it."""
    modules: dict[str, Any] = field(default_factory=dict)
    """State of each pipelined module for this batch, by the module's name; the sparse stages own it."""
    missing: frozenset[str] = frozenset()
    """Modules whose input the batches of some ranks have and others' lack, once the sizes are known."""
    sizes: Any = None
    """The exchange of split sizes of all modules, while it is under way; the sparse stages own it."""
    defers_update: bool = False
    """Whether its lookup leaves the update of the tables to a stage of its own."""
    ran_unpipelined: bool = False
    """Whether a module ran its own forward for it, on the compute stream, and no backward has followed yet."""
    consumed: bool = False
    """Whether its `training_step` has begun."""
    num_unseen: int = 0
    """Updates, those of the batches right before it, that the lookup of its fused tables did not see."""
    fewest_skipped: int = 0
    """Batches that are None before it in the epoch, on the rank that has the fewest; where the ranks asked for it."""
    ends_with_none: bool = False
    """Whether it is the last one, and all ranks have nothing but None after it."""
    counted: Any = None
    """The count of its stale rows, which may be under way."""


_abandoned: list[object] = []


def abandon(holders: Sequence[object]) -> None:
    """Let go of what holds collectives that other ranks may never join; the process can end with them under way.

    The thread of a gloo group frees the tensors of its last collectives, for which it takes the interpreter's lock.
    An interpreter that is ending ends the thread instead, and C++ then aborts the process (SIGABRT in the place of
    its own exit code). So what was abandoned last stays until the end, and is not freed then either.
    """
    if holders:
        _abandoned[:] = holders
        atexit.unregister(_never_free)
        atexit.register(_never_free)


def _never_free() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))
