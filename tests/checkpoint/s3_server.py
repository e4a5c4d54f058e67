"""moto's S3 server, which kills a process at a drawn request, and what programs need to use it.

Its packages lie in `s3/` of the environment (requirements/s3.lock), because they need another python-dateutil.
"""

import contextlib
import importlib.util
import os
import signal
import site
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ..support.ranks import ROOT, free_port

BUCKET = "bucket"
_KILL = "/_kill/"  # how paths begin that say whom to kill


def find_packages() -> bool:
    """Let this process import s3fs and moto; return whether they are there."""
    if importlib.util.find_spec("s3fs") is None:
        site.addsitedir(str(Path(sys.prefix) / "s3"))
    return all(importlib.util.find_spec(name) is not None for name in ("s3fs", "moto"))


@contextmanager
def uses(endpoint: str) -> Iterator[None]:
    """Let this process and those that it starts find the server."""
    assert find_packages()
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # of another server
    names = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    with mock.patch.dict(os.environ, {**names, "AWS_DEFAULT_REGION": "us-east-1"}):
        yield
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def server() -> Iterator[str]:
    """Start a server with an empty bucket; return its address."""
    endpoint = f"http://127.0.0.1:{(port := free_port())}"
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", __name__, str(port)], cwd=ROOT)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                _call(f"{endpoint}/{BUCKET}", "PUT")
                break
            time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def kill_at(endpoint: str, pid: int, num: int, before: bool) -> None:
    """Let the server send SIGKILL to a process before or after it has done the `num`th change from now on."""
    _call(f"{endpoint}{_KILL}{pid}/{num}/{int(before)}", "GET")


def _call(address: str, method: str) -> None:
    urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=10).close()


def _killing(app: Callable[..., Any]) -> Callable[..., Any]:
    """Return the server's application with kills at changes."""
    pid, left, before = 0, 0, False

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def call(environ: dict[str, Any], start_response: Any) -> Any:
        nonlocal pid, left, before
        path = environ["PATH_INFO"]
        if path.startswith(_KILL):
            pid, left, before = (int(number) for number in path.removeprefix(_KILL).split("/"))
            start_response("200 OK", [])
            return []
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            left -= 1
            if left == 0:
                if before:
                    kill()
                    start_response("503 Service Unavailable", [])
                    return []
                answer = list(app(environ, start_response))
                kill()
                return answer
        return app(environ, start_response)

    return call


def main() -> None:
    assert find_packages()
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = _killing(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)


if __name__ == "__main__":
    main()
