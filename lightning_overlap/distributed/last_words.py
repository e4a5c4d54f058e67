"""The end of a rank that fails: the error that came first is printed once, after all that the other ranks print.

Ranks share a terminal. One that lost a peer would print the longest traceback, and the last one, about a connection.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .failures import FirstCause
from .groups import timed_out
from .sockets import end_connections

LEAVE_S = 3.0
"""How long the rank that failed first waits for the others' last words; they wait as long for its own."""

_MARK = "_lightning_overlap_cause"
_causes: dict[int, FirstCause] = {}
"""That of the newest error, by its id, which the error carries; an error may be pickled, a store may not."""
_PLACE = re.compile(r"rank \d+ (was|had failed) |Another rank did not answer")
"""Notes of where a rank was and what another one said, which the first rank to fail says itself."""
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "/gloo/", "NCCL")


def tell_last(error: BaseException, cause: FirstCause) -> None:
    """Let the process, if it ends with this error, wait for its turn to print it, or leave that to another rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _causes.clear()
        _causes[id(cause)] = cause
        vars(error)[_MARK] = id(cause)
        if not isinstance(sys.excepthook, _Hook):
            sys.excepthook = _Hook()


def is_told_last(error: BaseException) -> bool:
    """Whether `sys.excepthook`, given this error, waits for its turn."""
    return vars(error).get(_MARK) in _causes


class _Hook:
    """What Python calls with an error that nobody caught."""

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        cause = _causes.get(vars(error).get(_MARK, 0))
        if cause is None or cause.first is None:
            self._before(kind, error, trace)
        elif cause.is_first:
            # Ranks that wait for this one fail now, and have their say, and not when it has ended.
            others_notice = end_connections(cause.store_port)
            cause.leave(dist.get_world_size() if others_notice and dist.is_initialized() else 1, LEAVE_S)
            if not _torchrun_prints(error):
                self._before(kind, error, trace)
            sys.stderr.flush()
            cause.told()
        else:
            mine = f"{kind.__name__}: {error}"
            if mine != cause.first.error and not _is_consequence(error):
                self._before(kind, error, trace)
            else:
                sys.stderr.write(_words_of_a_lost_rank(error, cause))
            sys.stderr.flush()
            cause.leave(1, 0.0)
            cause.wait_until_told(LEAVE_S)


def _words_of_a_lost_rank(error: BaseException, cause: FirstCause) -> str:
    """Return what a rank says that only lost another one: no traceback, but what nobody else knows.

    Where the first rank prints to the same place, the cause and the connection are left out.
    """
    if not cause.shares_stderr:
        return "".join(traceback.format_exception_only(error))
    own = [note for note in getattr(error, "__notes__", []) if not _PLACE.match(note)]
    return "".join(f"rank {cause.rank}: {note}\n" for note in own)


def _is_consequence(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone."""
    return timed_out(error) or (
        isinstance(error, RuntimeError | SystemExit) and any(said in str(error) for said in _PEER_LOST)
    )


def _torchrun_prints(error: BaseException) -> bool:
    """Leave the error to torchrun, which prints the first one at its end; not if it will start the ranks anew."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    try:
        raise error
    except BaseException as err:
        get_error_handler().record_exception(err)
    restarts, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return done >= restarts
