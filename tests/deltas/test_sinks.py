"""Sinks: what is written is there, whole, under its name; what cannot be is told in one sentence."""

import pickle
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.deltas import (
    DeltaSink,
    FolderSink,
    PartName,
    RedisSink,
    Replica,
    SinkError,
    check_sink,
    prune,
    resolve_sink,
)
from lightning_overlap.deltas.parts import form
from lightning_overlap.deltas.sinks import redis_sink

from ..support.ranks import free_port
from .histories import MemorySink, Training, assert_equal, empty_tables

NAMES = [str(PartName(1, step, rank, 2, 0, 1)) for step in (2, 10) for rank in (0, 1)]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: `requirements/redis_server.sh` installs it for root on Debian")
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no"}
    command = [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    command += ["--dir", str(tmp_path_factory.mktemp("redis"))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < until
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(params=["local", "memory", "redis"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        found: Any = RedisSink(url, key=f"deltas of {tmp_path.name}")
    else:
        found = FolderSink(tmp_path / "a" / "b" if request.param == "local" else f"memory://{tmp_path.name}/deltas")
    yield found
    found.close()


def test_parts_are_there_until_they_are_removed(sink: DeltaSink) -> None:
    assert list(sink.names()) == []
    for name in reversed(NAMES):
        sink.write(name, name.encode())
    sink.write(NAMES[0], b"anew\0\xff" * 1000)
    assert sorted(sink.names()) == NAMES
    assert sink.read(NAMES[0]) == b"anew\0\xff" * 1000
    assert sink.read(NAMES[1]) == NAMES[1].encode()
    sink.remove([NAMES[2], "not there", NAMES[0]])
    assert sorted(sink.names()) == [NAMES[1], NAMES[3]]
    with pytest.raises(KeyError, match=NAMES[0]):
        sink.read(NAMES[0])


def test_a_sink_is_copied_before_and_after_its_first_use(sink: DeltaSink) -> None:
    deepcopy(sink).write(NAMES[0], b"0")
    sink.write(NAMES[1], b"1")
    for copied in (pickle.loads(pickle.dumps(sink)), deepcopy(sink)):
        assert sorted(copied.names()) == NAMES[:2]
        copied.close()
        assert copied.read(NAMES[1]) == b"1"


def test_checking_leaves_nothing_behind(sink: DeltaSink) -> None:
    check_sink(sink)
    assert list(sink.names()) == []
    if isinstance(sink, FolderSink) and "://" not in sink.path:
        assert list(Path(sink.path).iterdir()) == []


def test_a_replica_follows_through_every_sink(sink: Any) -> None:
    training = Training(sink, seed=3)
    training.start(2, 1)
    tables = empty_tables()
    replica = Replica(tables, sink)
    for number in range(5):
        training.train(2)
        training.cut(bases=[number % 2] if number == 3 else ())
        assert replica.update() == 1
        assert_equal(tables, training.at_cut[training.whole or (0, 0)])
    late = Replica(None, sink)
    assert late.wait(timeout=5).step == training.step
    training.train(1)
    training.cut(bases=[0, 1])
    assert len(prune(sink)) > 5
    replica.update()
    assert_equal(tables, training.tables)


def test_other_files_may_lie_beside(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path)
    sink.write(NAMES[0], b"part")
    for name in ("README.md", f".{NAMES[1]}.unfinished", f"{NAMES[1]}.tmp", "g000001"):
        (tmp_path / name).write_text("x")
    assert sink.names() == NAMES[:1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    sink = FolderSink(tmp_path / "file" / "deltas")
    said = r"cannot write to the folder of embedding deltas '.*file/deltas': .*Choose a"
    for use in (lambda: check_sink(sink), lambda: sink.write(NAMES[0], b"")):
        with pytest.raises(SinkError, match=said):
            use()


def test_an_address_that_fsspec_does_not_know_is_told() -> None:
    with pytest.raises(SinkError, match=r"cannot open the folder of embedding deltas 'nosuch://x/y': .*nosuch"):
        FolderSink("nosuch://x/y")


def test_a_server_that_is_not_there_is_told_without_its_password() -> None:
    sink = RedisSink("redis://me:secret@127.0.0.1:1/0?key=mine")
    for use in (lambda: check_sink(sink), sink.names, lambda: sink.write(NAMES[0], b"")):
        with pytest.raises(SinkError, match=r"'mine' of embedding deltas at redis://me:\*\*\*@127.0.0.1:1/0: ") as err:
            use()
        assert "secret" not in str(err.value)
    assert "secret" not in repr(sink)


def test_a_key_of_another_kind_is_told(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        client.set("taken", "x")
    with pytest.raises(SinkError, match=r"cannot write to the stream 'taken' .*WRONGTYPE"):
        check_sink(RedisSink(redis_url, key="taken"))


def test_many_names_are_read_in_pages(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_sink, "_PAGE", 3)
    sink = RedisSink(redis_url, key="many")
    names = [str(PartName(1, step, 0, 1, 0, 1)) for step in range(10)]
    for name in names:
        sink.write(name, b"")
    assert sink.names() == names
    sink.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("deltas", "FolderSink('deltas')"),
        (Path("a/b"), "FolderSink('a/b')"),
        ("memory://x", "FolderSink('memory://x')"),
        ("redis://:pw@host:1/2?key=k", "RedisSink('redis://:***@host:1/2', key='k')"),
        ("rediss://host/0", "RedisSink('rediss://host/0', key='embedding_deltas')"),
        ("unix:///run/redis.sock?db=1&key=k", "RedisSink('unix:///run/redis.sock?db=1', key='k')"),
    ],
)
def test_a_sink_by_its_address(address: Any, expected: str) -> None:
    assert repr(resolve_sink(address)) == expected


def test_a_sink_of_ones_own() -> None:
    sink = MemorySink()
    assert resolve_sink(sink) is sink
    check_sink(sink)
    lacks = r"a sink must be a path, .*\n  got: 3, which lacks write, names, read, remove, close"
    with pytest.raises(TypeError, match=lacks):
        resolve_sink(3)


@pytest.mark.parametrize(
    ("package", "use", "said"),
    [
        ("pyarrow", lambda: runpy.run_path(form.__file__), "embedding deltas need pyarrow, which cannot be imported ("),
        ("redis", lambda: resolve_sink("redis://host/0"), "RedisSink needs the package redis, which cannot be "),
    ],
)
def test_a_package_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[], Any], said: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{re.escape(said)}.*: pip install 'lightning_overlap\[deltas\]'"):
        use()


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` lets go of the file system, and a job may have its own folder then."""
    monkeypatch.chdir(tmp_path)
    sink = FolderSink("sent")
    sink.close()
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    sink.write(NAMES[0], b"part")
    assert [path.name for path in (tmp_path / "sent").iterdir()] == NAMES[:1]
