"""A small HTTP server for a replica: `GET /step`, `POST /lookup`."""

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from typing_extensions import override

from .replica import Replica, ReplicaError

MOST_BYTES = 4 << 20  # of a request
MOST_THREADS = 64
IDLE_S = 10.0  # how long a client may send or take nothing
CONNECTED_S = 60.0  # how long a connection may stay open

_log = logging.getLogger(__name__)


class ReplicaServer(ThreadingHTTPServer):
    """Serves a replica's tables until it is closed, without authentication; each answer is of one step.

    `GET /step` returns run, generation, step, lag and the tables' shapes. `POST /lookup` takes `{"table": name,
    "ids": [...]}` and returns `{"generation": ..., "step": ..., "rows": [[...], ...]}`; of a table under managed
    collisions the ids are raw ids, and `"known": [true, ...]` says which of them have a row of their own. A wrong
    request gets status 400, a replica without tables or with an error 503, both with `{"error": ...}`. Port 0 chooses
    a free `port`; an OSError says that the port is not available. `replica.follow()` keeps the tables up to date.

    A request may have `most_ids` ids and 4 MiB. 64 threads answer; further clients wait. A connection is closed
    after a request, after 10 s in which its client sends or takes nothing, and after a minute.
    """

    request_queue_size = 1024  # connections that wait while all threads are busy
    daemon_threads = True

    def __init__(self, replica: Replica, host: str = "127.0.0.1", port: int = 0, *, most_ids: int = 10_000) -> None:
        if not isinstance(most_ids, int) or isinstance(most_ids, bool) or most_ids < 1:
            raise ValueError(f"most_ids is the largest number of ids of a request, at least 1, got {most_ids!r}.")
        super().__init__((host, port), _Handler)
        self.replica, self.host, self.port, self.most_ids = replica, host, self.server_port, most_ids
        self._free = threading.Semaphore(MOST_THREADS)
        self._open: dict[socket.socket, float] = {}  # connections that are answered -> when they began
        self._closes = False
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="replica server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closes = True
        self.shutdown()
        self._thread.join()
        self.server_close()

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=0.1):
            self.service_actions()
            if self._closes:
                self.shutdown_request(request)
                return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._end(request)
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def _end(self, request: Any) -> None:
        if self._open.pop(request, None) is not None:
            self._free.release()

    @override
    def service_actions(self) -> None:
        """Close connections that have been open for too long; called about ten times a second."""
        now = time.monotonic()
        for request, began in list(self._open.items()):
            if now - began > CONNECTED_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the client has disconnected."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request of %s failed", client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReplicaServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._respond("/step", self._step)

    def do_POST(self) -> None:
        self._respond("/lookup", self._rows)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _respond(self, path: str, answer: Callable[[], dict[str, Any]]) -> None:
        status, content = HTTPStatus.NOT_FOUND, {"error": f"GET /step or POST /lookup, not {self.command} {self.path}"}
        try:
            if self.path == path:
                status, content = HTTPStatus.OK, answer()
        except (ReplicaError, ValueError) as err:
            status = HTTPStatus.BAD_REQUEST if isinstance(err, ValueError) else HTTPStatus.SERVICE_UNAVAILABLE
            content = {"error": str(err)}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _discard(self, size: int) -> None:
        """Read a request of up to 64 MiB that is not used: closed before that, its client would get no answer."""
        left = min(size, 64 << 20)
        while left > 0 and (read := len(self.rfile.read(min(left, 1 << 16)))):
            left -= read

    def _step(self) -> dict[str, Any]:
        replica = self.server.replica
        lag = replica.lag
        with replica.reading() as position:
            tables = {name: list(tensor.shape) for name, tensor in replica.state_dict().items()}
        return {"run": replica.run, **position._asdict(), "lag": lag._asdict(), "tables": tables}

    def _rows(self) -> dict[str, Any]:
        size = int(self.headers.get("Content-Length", 0))
        if not 0 <= size <= MOST_BYTES:
            self._discard(size)
            raise ValueError(f"a request must have 0 to {MOST_BYTES} bytes, got {size}: request fewer ids.")
        try:
            query: Any = json.loads(self.rfile.read(size) or b"null")
        except RecursionError:
            raise ValueError("the request is nested too deeply") from None
        table, ids = (query.get("table"), query.get("ids")) if isinstance(query, dict) else (None, None)
        if not isinstance(table, str) or not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise ValueError('a request must be {"table": name, "ids": [integers]}')
        if len(ids) > self.server.most_ids:
            raise ValueError(f"a request must have at most {self.server.most_ids} ids, got {len(ids)}")
        if wrong := [each for each in ids if not -(1 << 63) <= each < 1 << 63]:
            raise ValueError(f"ids are 64-bit integers, got {wrong[0]}")
        replica = self.server.replica
        with replica.reading() as position:
            found, known = replica.look_up(table, torch.tensor(ids, dtype=torch.int64))
            of_raw_ids = {"known": known.tolist()} if table in replica.raw_ids else {}
        return {"generation": position.generation, "step": position.step, "rows": found.cpu().tolist(), **of_raw_ids}
