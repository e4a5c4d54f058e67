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
    """A batch in flight. It keeps alive every tensor that a queued kernel or collective still reads."""

    index: int
    """Number of batches fetched earlier in the epoch."""
    batch: Any
    """The staged batch: the same object that `training_step` gets. These five fields are those of `FetchedBatch`."""
    batch_idx: int = 0
    dataloader_idx: int = 0
    latest_none: int = -1
    loader_states: Any = None
    done: dict[Stage, tuple[StreamName, Any]] = field(default_factory=dict)
    """Stages issued so far, each with its stream and the event recorded after it."""
    modules: dict[str, Any] = field(default_factory=dict)
    """State of each pipelined module for this batch, by the module's name; the sparse stages own it."""
    made: dict[Any, Any] = field(default_factory=dict)
    """Results of staged methods, until its backward is over; `preprocessing.StagedCalls` owns them."""
    missing: frozenset[str] = frozenset()
    """Modules whose input only some ranks' batches contain; known once the sizes are read."""
    sizes: Any = None
    """The exchange of split sizes of all modules, while it is under way; the sparse stages own it."""
    defers_update: bool = False
    """Whether its backward defers the update of the tables (`DeferredUpdates`); set at its lookup."""
    is_held: bool = False
    """Whether that update waits for an optimizer step (`frozen_window`); else a module's own forward may make it."""
    ran_unpipelined: bool = False
    """Whether a module ran its own forward for it, on the compute stream, and no backward has followed yet."""
    consumed: bool = False
    """Whether its `training_step` has begun."""
    num_unseen: int = 0
    """Staleness of the lookup of its fused tables: the number of earlier batches whose updates it did not see."""
    counted: Any = None
    """The count of its stale rows (`sparse.StaleCounts`), which may be under way."""


_abandoned: list[object] = []


def abandon(holders: Sequence[object]) -> None:
    """Release the holders of collectives that other ranks may never join, so that the process can end meanwhile.

    A gloo group's thread frees the tensors of its last collectives, which takes the interpreter's lock. An ending
    interpreter ends the thread instead, and C++ then aborts the process (SIGABRT instead of its own exit code). So the
    holders abandoned last are never freed.
    """
    if holders:
        _abandoned[:] = holders
        atexit.unregister(_never_free)
        atexit.register(_never_free)


def _never_free() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))
