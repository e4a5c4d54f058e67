"""A redis-server of the tests' own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..support.ranks import free_port


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Start a server on a free port; yield its address. Skip the test where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: `requirements/redis_server.sh` installs it for root on Debian")
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder}
    command = [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(20)


def _wait(port: int) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
