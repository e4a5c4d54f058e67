"""A store of each kind, as a fixture."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.storage import DiskStore, ObjectStore, RedisStore, close_store, redis_store

from .ranks import free_port


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: `requirements/redis_server.sh` installs it for root on Debian")
    redis = pytest.importorskip("redis")  # tests on GPU machines import this file without it
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 400)
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "dir": tmp_path_factory.mktemp("redis")}
    command = [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with redis.Redis(port=port, retry=retry) as client:
                client.ping()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


@pytest.fixture(params=["local", "memory", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        monkeypatch.setattr(redis_store, "_PAGE", 3)  # names at once
        found: Any = RedisStore(url, key=f"deltas of {tmp_path.name}")
    else:
        local, memory = tmp_path / "a" / "b", f"memory://{tmp_path.name}/deltas"
        found = DiskStore(local) if request.param == "local" else ObjectStore(memory)
    yield found
    close_store(found)
