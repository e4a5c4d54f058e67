"""End the connections of gloo groups when a rank fails: torch 2.13 closes them only at the end of the process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = "/proc/self/fd"
_made: dict[int, str] = {}  # descriptor -> its socket at that time, since descriptors are reused


@contextmanager
def remember_sockets() -> Iterator[None]:
    """Remember the connections that are opened within this context, which makes process groups; Linux only."""
    before = _open_sockets()
    yield
    _made.update({number: name for number, name in _open_sockets().items() if before.get(number) != name})


def end_connections(except_port: int | None) -> bool:
    """End the remembered connections, except those of a port, and return whether any was; no group can be used then."""
    ended = False
    for number in [number for number, name in _open_sockets().items() if _made.get(number) == name]:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ports = one.getsockname()[1], one.getpeername()[1]  # raises for a listening socket
                if except_port not in ports:
                    one.shutdown(socket.SHUT_RDWR)
                    ended = True
    _made.clear()
    return ended


def _open_sockets() -> dict[int, str]:
    found = {}
    with suppress(OSError):
        for number in os.listdir(_FOLDER):
            with suppress(OSError):
                name = os.readlink(f"{_FOLDER}/{number}")
                if name.startswith("socket:"):
                    found[int(number)] = name
    return found
