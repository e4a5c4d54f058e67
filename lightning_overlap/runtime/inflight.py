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

    index: int  # number of batches fetched earlier in the epoch
    batch: Any  # the same object that `training_step` gets; these five fields are those of `FetchedBatch`
    batch_idx: int = 0
    dataloader_idx: int = 0
    latest_none: int = -1
    loader_states: Any = None
    done: dict[Stage, tuple[StreamName, Any]] = field(default_factory=dict)
    """Stages issued so far, each with its stream and the event recorded after it."""
    modules: dict[str, Any] = field(default_factory=dict)  # state of pipelined modules by name, of the sparse stages
    made: dict[Any, Any] = field(default_factory=dict)  # results of staged methods until the backward, by `StagedCalls`
    missing: frozenset[str] = frozenset()  # modules whose input only some ranks have; known once sizes are read
    sizes: Any = None  # the exchange of split sizes of all modules, while it is under way; the sparse stages own it
    defers_update: bool = False  # whether its backward leaves its update to `DeferredUpdates`; set at its lookup
    is_held: bool = False  # whether that update waits for an optimizer step; else a module's own forward may make it
    ran_unpipelined: bool = False
    """Whether a module ran its own forward for it, on the compute stream, and no backward has followed yet."""
    consumed: bool = False  # whether its `training_step` has begun
    num_unseen: int = 0  # staleness: the number of earlier batches whose updates its fused lookup did not see
    counted: Any = None  # the count of its stale rows (`sparse.StaleCounts`), which may be under way


_abandoned: list[object] = []


def abandon(holders: Sequence[object]) -> None:
    """Release the holders of collectives that other ranks may never join, so that the process can end meanwhile.

    A gloo group's thread frees the tensors of its last collectives, which takes the interpreter's lock. An ending
    interpreter ends that thread, and C++ then aborts the process (SIGABRT). So the last holders are never freed.
    """
    if holders:
        _abandoned[:] = holders
        atexit.unregister(_never_free)
        atexit.register(_never_free)


def _never_free() -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))
