"""The ranks' store with a deadline for each call: over a dead link a call of torch's TCPStore has no end."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as public as `dist.RanksStore`
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from ..compat import torch

FAILED = "lightning_overlap/failures"  # in the store: how often a rank of this job has failed
ANSWER_S = 5.0  # how long a rank that ends waits for an answer: a process that is there answers within milliseconds
REQUESTS_PER_S = 10_000  # of all waiting ranks together: the process that keeps the store trains, too
NO_ANSWER = "The process that keeps the ranks' store has not answered"


def longest_pause_s(num_ranks: int, num_requests: int) -> float:
    """Return how long a waiting rank pauses at most before it makes so many requests again."""
    return max(0.02, num_ranks * num_requests / REQUESTS_PER_S)


class NoAnswerError(RuntimeError):
    """The store has not answered in time."""


class RanksStore(Protocol):
    """What is used of torch's stores, with the same meaning."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number and return it; a new key begins at 0."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a value if the present one is expected, "" for a new key; return the value then."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until keys are there; raises a DistStoreError after the timeout."""


class DeadlineStore:
    """A store whose calls end: with an answer, an error, or a `NoAnswerError` after `timeout_s`.

    Each call has a thread of its own, which it leaves behind if no answer comes. The time counts from the oldest call
    without an answer: those after it wait in torch's store behind it.

    No call is made once the store's server has closed the connection, because torch would print an error on stderr. A
    dist.DistNetworkError tells so.
    """

    def __init__(self, store: TorchStore, timeout_s: float) -> None:
        self.torch_store, self._timeout_s = store, timeout_s
        self._connection = Connection(store)
        self._unanswered: dict[int, float] = {}  # calls under way -> when they began
        self._numbers = itertools.count()
        self._counters: dict[str, itertools.count[int]] = {}

    def next_number(self, of: str) -> int:
        """Return how many times this process has called this for `of`, with this store.

        Ranks that make the same calls get the same numbers, also after an error in an earlier process group.
        """
        return next(self._counters.setdefault(of, itertools.count()))

    def within(self, timeout_s: float) -> DeadlineStore:
        """Return the same store with another deadline."""
        other = DeadlineStore.__new__(DeadlineStore)
        vars(other).update(vars(self), _timeout_s=timeout_s)
        return other

    def add(self, key: str, amount: int, /) -> int:
        """As the store does."""
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As the store does."""
        return bytes(self._call("compare_set", key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        """As the store does."""
        return bool(self._call("delete_key", key))

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """As the store does; the deadline is later by `timeout`."""
        self._call("wait", keys, timeout, extra_s=timeout.total_seconds())

    def set(self, key: str, value: str, /) -> None:
        """As the store does, but without a thread: torch's TCPStore sends the value and waits for no answer.

        It works in `atexit` functions too, where Python may start no thread.
        """
        if self._unanswered:  # it would wait behind this call
            self._call("set", key, value)
        else:
            self._check_open()
            self.torch_store.set(key, value)

    def wait_here(self, keys: list[str], timeout_s: float) -> bool:
        """If this process keeps the store, wait until keys are there; return whether they are. Starts no thread."""
        port, deadline = port_of(self), time.monotonic() + timeout_s
        if port is None or not any(_listens(number, port) for number in open_sockets()):
            return False
        while not (there := self.torch_store.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return there

    def _call(self, name: str, *args: Any, extra_s: float = 0.0) -> Any:
        self._check_open()
        now = time.monotonic()
        left_s = min([now, *self._unanswered.values()]) + self._timeout_s + extra_s - now
        if left_s > 0:
            answer: Future[Any] = Future()
            number = next(self._numbers)
            self._unanswered[number] = now

            def call() -> None:
                try:
                    result = getattr(self.torch_store, name)(*args)
                except BaseException as err:
                    del self._unanswered[number]
                    answer.set_exception(err)
                else:
                    del self._unanswered[number]
                    answer.set_result(result)

            thread = threading.Thread(target=call, name="call of the store", daemon=True)
            thread.start()
            with contextlib.suppress(TimeoutError):
                answer.exception(left_s)
                thread.join()  # it has answered, and ends
                return answer.result()
        raise NoAnswerError(
            f"{NO_ANSWER} within {self._timeout_s:g} s: its host is down, the network to it is, or it is stopped."
        )

    def _check_open(self) -> None:
        if self._connection.is_closed():
            raise dist.DistNetworkError("The process that keeps the ranks' store has ended.")


_of_default_group: DeadlineStore | None = None


def default_store(timeout_s: float) -> DeadlineStore | None:
    """Return the store of the default process group; its calls end within `timeout_s`. None without such a group."""
    global _of_default_group
    if not dist.is_initialized():
        return None
    store = torch.default_store()
    if _of_default_group is None or _of_default_group.torch_store is not store:
        _of_default_group = DeadlineStore(store, timeout_s)
    return _of_default_group.within(timeout_s)


def port_of(store: RanksStore | TorchStore) -> int | None:
    """Return the port of a TCPStore's server; None for another store."""
    while isinstance(store, DeadlineStore | PrefixStore):
        store = store.torch_store if isinstance(store, DeadlineStore) else store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


class Connection:
    """This process's connection to a store's server, of which torch does not tell; Linux only."""

    def __init__(self, store: TorchStore) -> None:
        self._port = port_of(store)
        self._socket: tuple[int, str] | None = None  # its descriptor and name, once it is found

    def is_closed(self) -> bool:
        """Whether the server has closed it, as far as this process knows; does not wait."""
        if self._port is None:
            return False
        known = self._socket  # other threads may find another
        if known is not None and name_of_socket(known[0]) == known[1]:
            return _is_closed(known[0])
        # The socket of an older store may lead to a server that has ended, which had the same port.
        leading = [one for one in open_sockets().items() if _leads_to(one[0], self._port)]
        self._socket = known = next((one for one in leading if not _is_closed(one[0])), None)
        return bool(leading) and known is None


def open_sockets() -> dict[int, str]:
    """Return descriptor -> name of the sockets of this process; a name is of one socket, descriptors are reused."""
    found = {}
    with contextlib.suppress(OSError):
        for number in sorted(map(int, os.listdir("/proc/self/fd"))):
            name = name_of_socket(number)
            if name is not None:
                found[number] = name
    return found


def name_of_socket(number: int) -> str | None:
    """Return the name of the socket with a descriptor; None if it is no open socket."""
    with contextlib.suppress(OSError):
        name = os.readlink(f"/proc/self/fd/{number}")
        if name.startswith("socket:"):
            return name
    return None


def _listens(number: int, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        is_ip = one.family in (socket.AF_INET, socket.AF_INET6)
        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return is_ip and bool(listens) and bool(one.getsockname()[1] == port)
    return False


def _is_closed(number: int) -> bool:
    """Return whether the other end has closed a socket; False if no copy of the descriptor can be made."""
    try:
        copy = os.dup(number)
    except OSError:
        return False
    with socket.socket(fileno=copy) as one:
        try:
            return one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:  # there is nothing to read, as there should be
            return False
        except OSError:
            return True


def _leads_to(number: int, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        return one.family in (socket.AF_INET, socket.AF_INET6) and bool(one.getpeername()[1] == port)
    return False
