"""The process groups of a run besides the default group, made once per process."""

import atexit
import contextlib
import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import gloo_alltoall
from .consensus import Consensus
from .failures import end_connections, remember_sockets
from .stores import ANSWER_S, FAILED, RanksStore, default_store


@dataclass(slots=True)
class Groups:
    """Groups of all ranks. On one rank only the default group exists, for the tables."""

    tables: dist.ProcessGroup  # apart from DDP's gradients, which ranks may send in another order
    lookahead: dist.ProcessGroup | None = None  # the input dist of coming batches
    consensus: Consensus | None = None  # messages between ranks at every step, on the host
    checkpoints: dist.ProcessGroup | None = None  # saving, on the host: apart, as it may run in a thread
    samples: dist.ProcessGroup | None = None  # balancing batches, on the host and in a thread; None unless asked for
    has_ended: bool = False  # whether only the tables' group is left, for modules that use it
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # modules whose tables use the tables' group
    sockets: dict[dist.ProcessGroup, dict[int, str]] = field(default_factory=dict)  # connections of each group


CONSENSUS = "consensus"  # name of its group
_made: dict[tuple[dist.ProcessGroup, str, timedelta, bool, tuple[bool, bool], int], Groups] = {}
_failed: list[tuple[dist.ProcessGroup, Groups]] = []
"""Default group and groups of failed runs, alike on all ranks, as long as any rank has a module that uses them."""


def join(timeout: timedelta, *, multi_node: bool = False, balances: bool = False, increments: bool = False) -> Groups:
    """Return the groups of this process, which its runs share; every rank calls this after a barrier.

    With `balances` there is one for samples. Raises a ValueError on all ranks if only some pass it, or `increments`.

    After a run that failed on any rank, all ranks make new groups, and end the groups of that run. Between hosts gloo
    uses both directions of a link at once. Within a host its own all-to-all is faster: its threads make the system
    calls, not the training thread.
    """
    world, store = dist.group.WORLD, default_store(timeout.total_seconds())
    assert world is not None
    assert store is not None
    if dist.get_world_size() == 1:
        return Groups(world)
    backend = dist.get_backend()
    wanted = balances, increments
    found: list[tuple[int, tuple[bool, bool]]] = [(0, wanted)] * dist.get_world_size()
    dist.all_gather_object(found, (store.add(FAILED, 0), wanted))
    for place, option in enumerate(("balance=", "checkpoint_format='incremental'")):
        by_rank = {of_rank[place]: rank for rank, (_, of_rank) in enumerate(found)}
        if len(by_rank) > 1:
            raise ValueError(
                f"rank {by_rank[True]} has the option {option} and rank {by_rank[False]} has not, but all ranks take "
                "part. Give every rank the same options."
            )
    # Rank 0's reading counts: if a rank joins first and fails at once, a slower rank would wait for new groups alone.
    num_failures, _ = found[0]
    key = (world, backend, timeout, multi_node, wanted, num_failures)
    if key not in _made:
        for other in [other for other in _made if (other[0], other[-1]) != (world, num_failures)]:
            _failed.append((other[0], _made.pop(other)))
        _end_failed(world, store)
        on_host = gloo_alltoall.register() if multi_node else "gloo"
        of_tables = on_host if backend == "gloo" else backend
        sockets: dict[dist.ProcessGroup, dict[int, str]] = {}

        def make(backend: str, name: str) -> dist.ProcessGroup:
            with remember_sockets() as opened:
                group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend, group_desc=name)
            sockets[group] = opened
            return group

        _made[key] = Groups(
            consensus=Consensus(make("gloo", CONSENSUS)),
            checkpoints=make("gloo", "checkpoints"),
            tables=make(of_tables, "tables"),
            lookahead=make(of_tables, "lookahead"),
            samples=make(on_host, "samples") if balances else None,
            sockets=sockets,
        )
    return _made[key]


def _end_failed(world: dist.ProcessGroup, store: RanksStore) -> None:
    """End the groups of failed runs; all ranks call this alike, so none is in a collective of theirs.

    The tables' group stays as long as any rank has a module that uses it.
    """
    _failed[:] = [(default, groups) for default, groups in _failed if default == world]  # its user has destroyed others
    if not _failed:
        return
    gc.collect()  # modules of failed fits are in cycles
    of_ranks: list[list[bool]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [bool(groups.users) for _, groups in _failed])
    is_used = [any(of_rank) for of_rank in zip(*of_ranks, strict=True)]
    for (_, groups), used in zip(_failed, is_used, strict=True):
        for group in [group for group in groups.sockets if not (used and group is groups.tables)]:
            _end(group, groups.sockets.pop(group), store)
        groups.lookahead = groups.consensus = groups.checkpoints = groups.samples = None
        groups.has_ended = True
    _failed[:] = [failed for failed, used in zip(_failed, is_used, strict=True) if used]


def _end(group: dist.ProcessGroup, connections: dict[int, str], store: RanksStore) -> None:
    """End a group, with collectives that other ranks have never joined."""
    if "nccl" in dist.get_backend(group):
        group.abort()
    elif connections:
        end_connections(store, connections)  # also those that another rank has ended first
    else:
        return  # not on Linux: it would wait for these collectives, until its timeout
    dist.destroy_process_group(group)


def forget() -> None:
    """Let the next run make new groups on all ranks: these may have collectives that other ranks never join."""
    atexit.unregister(_destroy)  # it would wait for these collectives
    store = default_store(ANSWER_S)
    if store is not None:
        with contextlib.suppress(Exception):  # the store ends with its host rank
            store.add(FAILED, 1)


@contextlib.contextmanager
def destroyed_at_exit() -> Iterator[None]:
    """Let the process destroy its groups when it ends, if the default group is made within this context."""
    # Else a thread of gloo may free tensors while the interpreter ends: C++ then aborts the process (SIGABRT).
    global _owner
    is_users = dist.is_initialized()
    yield
    if dist.is_initialized() and not is_users:
        _owner = os.getpid()
        atexit.unregister(_destroy)
        atexit.register(_destroy)


_owner = 0  # the process that made the default group: a process forked from it has the group without its threads


def _destroy() -> None:
    """Destroy all groups at the end of a process that has not failed, without waiting for other ranks."""
    # After an error other ranks may be gone or wait, and a group ends only after its collectives under way.
    if os.getpid() == _owner and dist.is_initialized() and not hasattr(sys, "last_value"):
        _made.clear()
        _failed.clear()
        dist.destroy_process_group()
        # Modules and trainers keep groups, and so their threads. Each then has at most a few tensors left to free.
        time.sleep(0.05)
