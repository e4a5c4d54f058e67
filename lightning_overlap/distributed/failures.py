"""Let failing ranks tell each other the cause through the store; the first error is printed once, after all others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .stores import NO_ANSWER, RanksStore, longest_pause_s, open_sockets, port_of

LEAVE_S = 3.0  # seconds that the first failing rank and the others wait for each other to print

_MARK = "lightning_overlap_cause"
_causes: dict[int, FirstCause] = {}
"""The `FirstCause` of the newest error, by its id. The error holds only this id: a store cannot be pickled."""
_PLACE = re.compile(r"rank \d+ (was|had failed) |Another rank did not answer|the ranks waited at different places")
"""Notes that other ranks need not print: the first failing rank prints the same."""
PEER_LOST = (
    "Another rank has failed, for which",
    NO_ANSWER,
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "/gloo/",
    "NCCL",
)
_sockets: dict[int, str] = {}  # descriptor -> its socket at that time, since descriptors are reused


class Word(NamedTuple):
    """The message that a failing rank writes to the store for the others."""

    rank: int
    error: str  # type and message
    place: str  # in the training, and in the user's code
    stderr: str  # where the rank prints errors, see `_stderr`


_NOT_USERS = {
    *("lightning", "lightning_fabric", "lightning_overlap", "lightning_utilities", "pytorch_lightning", "torch"),
    *("fbgemm_gpu", "torchmetrics", "torchrec", *sys.stdlib_module_names),
}
"""Packages whose functions are no place of a user's."""


def place_of_user(error: BaseException) -> str:
    """Return in which function of the user's the trainer was when an error was raised: ", in f (file.py:7)", or ""."""
    found, in_trainer = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        in_trainer |= package in ("lightning", "pytorch_lightning")
        if in_trainer and package not in _NOT_USERS:
            found = f", in {frame.f_code.co_qualname} ({_short(frame.f_code.co_filename)}:{line})"
    return found


def _short(path: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)


def _stderr() -> str:
    """Return an identifier of this process's stderr, the same for ranks that share a terminal, a pipe or a file."""
    try:
        file = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # a Python stream without a descriptor, in notebooks
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{socket.gethostname()} {file.st_dev} {file.st_ino}"


class FirstCause:
    """Finds the rank that failed first in a run. No method raises: the store ends with the rank that keeps it."""

    def __init__(self, store: RanksStore, rank: int, run: int) -> None:
        self.store = store
        self.rank = rank
        self.key = f"lightning_overlap/first_cause/{run}"
        self.first: Word | None = None  # of the first failing rank, set when this rank has failed

    def note(self, error: BaseException, place: str) -> None:
        """Report an error; if another rank reported one earlier, add its word as a note, after all others.

        An error that only says that another rank did not come also gets a note of where the ranks waited.
        """
        place += place_of_user(error)
        mine = Word(self.rank, f"{type(error).__name__}: {error}", place, _stderr())
        if is_of_lost_peer(error) and not timed_out(error):
            self._wait_for(self.key, LEAVE_S)  # the other rank, if it lives, is about to say why it failed
        with contextlib.suppress(Exception):
            self.first = Word(*json.loads(self.store.compare_set(self.key, "", json.dumps(mine))))
            places = self._add_place(place)
            if timed_out(error) or is_of_lost_peer(error):
                self._note_places(error, places)
            if self.first.rank != self.rank and self.first.error != mine.error:
                _note_last(error, f"rank {self.first.rank} had failed {self.first.place}: {self.first.error}")

    def put_last(self, error: BaseException) -> None:
        """Put the note of the first cause after all that were added since."""
        for note in list(getattr(error, "__notes__", [])):
            if self.first is not None and note.startswith(f"rank {self.first.rank} had failed "):
                _note_last(error, note)

    def _add_place(self, place: str) -> dict[str, int]:
        """Add the place of this rank to those of all that have failed; return them, each with a rank."""
        before = b""
        while True:
            after: dict[str, int] = {place: self.rank} | json.loads(before or b"{}")
            found = self.store.compare_set(f"{self.key}/places", before.decode(), json.dumps(after))
            if found == json.dumps(after).encode():
                return after
            before = found

    def _note_places(self, error: BaseException, places: dict[str, int]) -> None:
        """Note where the other ranks waited, if they waited for each other at different places."""
        assert self.first is not None
        if not _says_timeout(self.first.error):
            return  # the first error says why
        deadline = time.monotonic() + LEAVE_S
        while len(places) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            places = json.loads(self.store.compare_set(f"{self.key}/places", "", ""))
        if len(places) > 1:
            waited = "; ".join(f"rank {rank} {place}" for rank, place in sorted((r, p) for p, r in places.items()))
            _note_last(
                error,
                f"the ranks waited at different places: {waited}. What waits for other ranks (saves, logs with "
                "sync_dist=True, metrics, strategy.table) has to be called on all ranks.",
            )

    def mark_printed(self) -> None:
        """Report that the first cause was printed."""
        with contextlib.suppress(Exception):
            self.store.set(f"{self.key}/printed", "")

    def wait_until_printed(self, timeout_s: float) -> None:
        """Wait until the first failing rank has printed."""
        self._wait_for(f"{self.key}/printed", timeout_s)

    def _wait_for(self, key: str, timeout_s: float) -> None:
        """Wait until a rank has set a key of the store."""
        with contextlib.suppress(Exception):
            self.store.wait([key], timedelta(seconds=timeout_s))

    def all_failed(self, num_ranks: int, place: str, timeout_s: float) -> bool:
        """Return whether all ranks call this from the same place within `timeout_s`, so that they may save together."""
        mine = "together" if self.all_come(f"here {place}", num_ranks, timeout_s) else "alone"
        with contextlib.suppress(Exception):
            # The first rank to know decides for all: another rank may time out at this moment.
            return self.store.compare_set(f"{self.key}/verdict", "", mine) == b"together"
        return False

    def all_come(self, what: str, num_ranks: int, timeout_s: float) -> bool:
        """Count this rank as there, or gone; return whether `num_ranks` are counted within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            num_here = self.store.add(f"{self.key}/{what}", 1)
            while num_here < num_ranks and (left_s := deadline - time.monotonic()) > 0:
                time.sleep(min(left_s, longest_pause_s(num_ranks, num_requests=1)))
                num_here = self.store.add(f"{self.key}/{what}", 0)
            return num_here >= num_ranks
        return False


def timed_out(error: BaseException) -> bool:
    """Whether a gloo collective failed because another rank did not answer in time."""
    return _says_timeout(str(error))


def _says_timeout(text: str) -> bool:
    # If several collectives are under way, gloo reports a timeout for one and a closed pair for the others.
    return any(said in text for said in ("Timed out waiting", "Application timeout caused pair closure"))


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has ended."""
    return isinstance(error, RuntimeError | SystemExit) and any(said in str(error) for said in PEER_LOST)


def _note_last(error: BaseException, note: str) -> None:
    """Add a note after all others, once."""
    if note in (notes := getattr(error, "__notes__", [])):
        notes.remove(note)
    error.add_note(note)


def print_last(error: BaseException, cause: FirstCause) -> None:
    """Install an excepthook for this error: the process prints it in its turn, or leaves it to another rank."""
    # Python prints an uncaught error after everything that a strategy can hook into. To wait there for other ranks, and
    # to print nothing that another rank prints, takes Python's own hook. Any other error goes to the former hook.
    if dist.is_initialized() and dist.get_world_size() > 1:
        _causes.clear()
        _causes[id(cause)] = cause
        vars(error)[_MARK] = id(cause)
        if getattr(sys.excepthook, "func", None) is not _print_in_turn:
            sys.excepthook = partial(_print_in_turn, sys.excepthook)


def is_printed_last(error: BaseException) -> bool:
    """Whether `sys.excepthook`, given this error, waits for its turn."""
    return vars(error).get(_MARK) in _causes


def _print_in_turn(
    print_whole: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    cause = _causes.get(vars(error).get(_MARK, 0))
    first = None if cause is None else cause.first
    if cause is None or first is None:
        print_whole(kind, error, trace)
    elif first.rank == cause.rank:
        # Ranks that wait for this rank fail and print now, not only after its end.
        others_notice = end_connections(cause.store)
        num_ranks = dist.get_world_size() if others_notice and dist.is_initialized() else 1
        cause.all_come("gone", num_ranks, LEAVE_S)
        if not _torchrun_prints(error):
            print_whole(kind, error, trace)
        sys.stderr.flush()
        cause.mark_printed()
    else:
        is_secondary = is_of_lost_peer(error) or timed_out(error)
        if f"{kind.__name__}: {error}" != first.error and not is_secondary:
            print_whole(kind, error, trace)
        elif first.stderr == _stderr():  # the first rank prints everything except this rank's own notes
            own = [note for note in getattr(error, "__notes__", []) if not _PLACE.match(note)]
            sys.stderr.write("".join(f"rank {cause.rank}: {note}\n" for note in own))
        else:
            sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.stderr.flush()
        cause.all_come("gone", 1, 0.0)
        cause.wait_until_printed(LEAVE_S)


def _torchrun_prints(error: BaseException) -> bool:
    """Leave the error to torchrun, which prints the first error at its end, unless torchrun restarts the ranks."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    try:
        raise error
    except BaseException as err:
        get_error_handler().record_exception(err)
    restarts, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return done >= restarts


# -- connections: torch 2.13 closes those of gloo groups only at the end of the process ----------------------------


@contextlib.contextmanager
def remember_sockets() -> Iterator[dict[int, str]]:
    """Remember the connections that are opened within this context, which makes process groups; Linux only.

    The dict has them, descriptor -> name of the socket, once the context is over.
    """
    before, opened = open_sockets(), dict[int, str]()
    yield opened
    opened.update({number: name for number, name in open_sockets().items() if before.get(number) != name})
    _sockets.update(opened)


def end_connections(except_store: RanksStore, of: Mapping[int, str] | None = None) -> bool:
    """End remembered connections except a store's, those of `of` or all; return whether any was open.

    The groups that have them cannot be used then.
    """
    # Other ranks wait in a collective, and gloo lets them go only when a connection closes. In torch 2.13
    # `destroy_process_group` and `abort` close those of a gloo group only once nothing refers to the group, but the
    # error's traceback, the trainer and the sharded modules do. Nor does torch tell which sockets a group has.
    except_port = port_of(except_store)
    wanted = dict(_sockets if of is None else of)
    ended = False
    for number in [number for number, name in open_sockets().items() if wanted.get(number) == name]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ports = one.getsockname()[1], one.getpeername()[1]  # raises for a listening socket
                if except_port not in ports:
                    one.shutdown(socket.SHUT_RDWR)
                    ended = True
    for number, name in wanted.items():
        if _sockets.get(number) == name:
            del _sockets[number]
    return ended
