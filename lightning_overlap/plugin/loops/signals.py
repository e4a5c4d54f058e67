"""Signals of this process as they come, also while its main thread is in C code, where Python runs no handler."""

import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")  # of a sender: its process, user and group


class Signals:
    """The signals of this process that have a handler in Python; made and closed in the main thread.

    Python writes a byte of each to a socket at once, but calls the handler only when the main thread is in Python
    again. Another thread reads the socket. An event loop that got these bytes before still gets them.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        # A forked process has the sender too: the system tells who has sent.
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._pid = os.getpid()
        self._former = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> set[int]:
        """Return the signals that have come since the last call; wait for one, or for `wake`, if there is none."""
        poll = select.poll()  # unlike `select.select` for any number of open files
        poll.register(self._receiver, select.POLLIN)
        poll.poll(1000 * timeout_s)
        return set(self._read())

    def wake(self) -> None:
        """Let the thread in `wait` return."""
        with suppress(BlockingIOError):  # then there is something to read
            self._sender.send(b"\0")

    def close(self) -> None:
        """Give the bytes back to who has had them before; no thread may be in `wait`."""
        current = signal.set_wakeup_fd(self._former)
        if current != self._sender.fileno():  # somebody has taken them since
            signal.set_wakeup_fd(current)
        self._receiver.close()
        self._sender.close()

    def _read(self) -> Iterator[int]:
        with suppress(BlockingIOError):
            while True:
                sent, ancillary, _, _ = self._receiver.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                is_own = any(_CREDENTIALS.unpack(data)[0] == self._pid for _, _, data in ancillary)
                if not is_own or sent == b"\0":
                    continue
                if self._former != -1:
                    with suppress(OSError):
                        os.write(self._former, sent)
                yield sent[0]


def in_main_thread() -> bool:
    """Whether the caller may deal with signals."""
    return threading.current_thread() is threading.main_thread()
