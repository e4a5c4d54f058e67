"""Look at, or kill, a process before each change that it makes to a file system."""

import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_overlap.storage import disk_store

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_before: list[Callable[[], None]] = []
"""What is done before each call that changes a file system; an audit hook stays as long as the process."""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _before and (event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES)):
        _before[-1]()


class _Watched(io.BufferedWriter):
    """A file whose first writes are seen too."""

    num = 0

    def write(self, data: Any) -> int:
        self.num += 1
        if self.num == 1 and _before:
            self.flush()
            _before[-1]()
        return super().write(data)


@contextmanager
def before_each_change(action: Callable[[], None]) -> Iterator[None]:
    """Do something before each call, of any thread, that makes, renames, writes, syncs or removes anything."""
    busy = threading.RLock()
    depth = 0

    def once() -> None:
        nonlocal depth
        with busy:
            depth += 1
            try:
                if depth == 1:  # its own calls are not seen
                    action()
            finally:
                depth -= 1

    def seen(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            once()
            return own(*args)

        return call

    open_path = Path.open

    def watched_open(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return _Watched(io.FileIO(path, mode[0])) if mode in ("wb", "xb") else open_path(path, mode, *args, **kwargs)

    _install()
    _before.append(once)
    try:
        with (
            mock.patch.object(disk_store, "exchange", seen(disk_store.exchange)),
            mock.patch.object(os, "fsync", seen(os.fsync)),
            mock.patch.object(Path, "open", watched_open),
        ):
            yield
    finally:
        _before.pop()


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)


def killed_before(num: int) -> AbstractContextManager[None]:
    """SIGKILL ends this process before its `num`th change."""
    left = num

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_each_change(count)
