"""A small HTTP server for a replica: `GET /step`, `POST /lookup`."""

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from ...text import check_known
from .replica import Replica, ReplicaError

_MOST_BYTES = 64 << 20


class ReplicaServer(ThreadingHTTPServer):
    """Serves a replica's tables until it is closed, without authentication; each answer is of one step.

    `GET /step` returns run, generation, step, lag and the tables' shapes. `POST /lookup` takes `{"table": name,
    "ids": [...]}` and returns `{"generation": ..., "step": ..., "rows": [[...], ...]}`. A wrong request gets status
    400, a replica without tables or with an error 503, both with `{"error": ...}`. Port 0 chooses a free `port`; an
    OSError says that the port is not available. `replica.follow()` keeps the tables up to date.
    """

    def __init__(self, replica: Replica, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.replica, self.host, self.port = replica, host, self.server_port
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="replica server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    server: ReplicaServer

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

    def _step(self) -> dict[str, Any]:
        replica = self.server.replica
        lag = replica.lag
        with replica.reading() as position:
            tables = {name: list(tensor.shape) for name, tensor in replica.state_dict().items()}
        return {"run": replica.run, **position._asdict(), "lag": lag._asdict(), "tables": tables}

    def _rows(self) -> dict[str, Any]:
        size = int(self.headers.get("Content-Length", 0))
        if not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"a request must have 0 to {_MOST_BYTES} bytes, got {size}: request fewer ids.")
        query: Any = json.loads(self.rfile.read(size) or b"null")
        table, ids = (query.get("table"), query.get("ids")) if isinstance(query, dict) else (None, None)
        if not isinstance(table, str) or not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise ValueError('a request must be {"table": name, "ids": [integers]}')
        with self.server.replica.reading() as position:
            tables = {name: tensor for name, tensor in self.server.replica.state_dict().items() if tensor.dim() == 2}
            check_known("table", table, tables)
            rows = tables[table].detach()
            if wrong := [each for each in ids if not 0 <= each < len(rows)]:
                raise ValueError(f"{table} has rows 0 to {len(rows) - 1}, got {wrong[0]}")
            found = rows[torch.tensor(ids, dtype=torch.int64, device=rows.device)].cpu().tolist()
            return {"generation": position.generation, "step": position.step, "rows": found}
