"""Sinks: what is written is there, whole, under its name; what cannot be is told in one sentence."""

import pickle
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from lightning_overlap.deltas import (
    DeltaSink,
    FileName,
    FolderSink,
    RedisSink,
    Replica,
    SinkError,
    check_sink,
    prune,
    resolve_sink,
)
from lightning_overlap.deltas.files import form
from lightning_overlap.deltas.recording.writer import CutWriter
from lightning_overlap.deltas.sinks import redis_sink
from lightning_overlap.text import message_without_secrets, without_secrets

from ..support.ranks import free_port
from .histories import MemorySink, assert_equal, begun, empty_tables, updated

NAMES = [str(FileName(1, step, rank, 2, 0, 1)) for step in (2, 10) for rank in (0, 1)]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server: `requirements/redis_server.sh` installs it for root on Debian")
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "dir": tmp_path_factory.mktemp("redis")}
    command = [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with Redis(port=port, retry=Retry(ConstantBackoff(0.05), 400)) as client:
                client.ping()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


@pytest.fixture(params=["local", "memory", "redis"])
def sink(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        monkeypatch.setattr(redis_sink, "_PAGE", 3)  # names at once
        found: Any = RedisSink(url, key=f"deltas of {tmp_path.name}")
    else:
        found = FolderSink(tmp_path / "a" / "b" if request.param == "local" else f"memory://{tmp_path.name}/deltas")
    yield found
    found.close()


def test_parts_are_there_until_they_are_removed(sink: DeltaSink) -> None:
    check_sink(sink)
    assert list(sink.names()) == []
    if isinstance(sink, FolderSink) and "://" not in sink.path:
        assert list(Path(sink.path).iterdir()) == []
        Path(sink.path, f".{NAMES[1]}.unfinished").write_text("x")
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


def test_a_replica_follows_through_every_sink(sink: Any) -> None:
    training = begun(sink)
    replica = updated(tables := empty_tables(), sink)
    for number in range(3):
        training.cut(bases=[number % 2], steps=2)
        assert replica.update() == 1
        assert_equal(tables, training.tables)
    assert Replica(None, sink).wait(timeout=5).step == training.step
    training.cut(bases=[0, 1], steps=1)
    assert len(prune(sink)) > 5
    replica.update()
    assert_equal(tables, training.tables)


def test_a_key_of_another_kind_is_told(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.set("taken", "x")
    with pytest.raises(SinkError, match=r"cannot write to the stream 'taken' .*WRONGTYPE"):
        check_sink(RedisSink(redis_url, key="taken"))


def test_a_folder_that_cannot_be_written_or_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    sink = FolderSink(tmp_path / "file" / "deltas")
    said = r"cannot write to the folder of embedding deltas '.*file/deltas': .*Choose a"
    for use in (lambda: check_sink(sink), lambda: sink.write(NAMES[0], b"")):
        with pytest.raises(SinkError, match=said):
            use()
    with pytest.raises(SinkError, match=r"cannot open the folder of embedding deltas 'nosuch://x/y': .*nosuch"):
        FolderSink("nosuch://x/y")


def test_a_server_that_is_not_there_is_told_without_its_password() -> None:
    sink = RedisSink("redis://me:secret@127.0.0.1:1/0?key=mine")
    for use in (lambda: check_sink(sink), sink.names, lambda: sink.write(NAMES[0], b"")):
        with pytest.raises(SinkError, match=r"'mine' of embedding deltas at redis://me:\*\*\*@127.0.0.1:1/0: ") as err:
            use()
        assert "secret" not in str(err.value)
    assert "secret" not in repr(sink)


MARK = "Zq9"  # a secret consists of it and anything else
_ANY = st.text(st.sampled_from("@/:?#&=%+ '\"[]-a1"), max_size=4)
_SECRETS = st.builds(lambda *parts: MARK.join(parts), _ANY, _ANY, _ANY)


@given(st.sampled_from(["redis", "rediss", "unix", "nosuch"]), st.sampled_from(["", "me", "a@b"]), _SECRETS)
def test_a_password_never_shows_whatever_it_has(scheme: str, user: str, password: str) -> None:
    address = f"{scheme}://{user}:{password}@127.0.0.1:1/0"
    assert MARK not in without_secrets(address)
    assert MARK not in message_without_secrets(f"cannot reach {address}: {password} is wrong", address)
    said = []
    try:
        said.append(repr(resolve_sink(address)))
    except SinkError as err:
        said += traceback.format_exception(err)
    assert said
    assert MARK not in "".join(line for line in said if "address = " not in line)


@given(
    st.sampled_from(["sig", "SIG", "token", "sas_token", "X-Amz-Signature", "password", "account_key", "accessKeyId"]),
    _SECRETS.filter(lambda one: "&" not in one),
)
def test_a_secret_option_never_shows(name: str, secret: str) -> None:
    address = f"https://account.blob.core.windows.net/a/deltas?sv=2024&{name}={secret}&se=2027"
    assert MARK not in without_secrets(address)
    assert without_secrets(address).startswith("https://account.blob.core.windows.net/a/deltas?sv=2024&")
    for quoted in (quote(secret, safe=""), quote_plus(secret)):
        text = f"cannot GET {address.replace(secret, quoted)}: 403, sig=x&{name}={quoted}"
        assert MARK not in message_without_secrets(text)
    assert MARK not in repr(RedisSink(f"redis://host/0?{name}={quote(secret, safe='')}"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("deltas", "FolderSink('deltas')"),
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


def test_a_package_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"{}, which cannot be imported \(.*\): pip install 'lightning_overlap\[deltas\]'"
    for package in ("pyarrow", "redis"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=said.format("embedding deltas need pyarrow")):
        runpy.run_path(form.__file__)
    with pytest.raises(ImportError, match=said.format("RedisSink needs the package redis")):
        resolve_sink("redis://host/0")


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` lets go of the file system, and a job may have its own folder then."""
    monkeypatch.chdir(tmp_path)
    sink = FolderSink("sent")
    sink.close()
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    sink.write(NAMES[0], b"file")
    assert [path.name for path in (tmp_path / "sent").iterdir()] == NAMES[:1]


class Upper(FolderSink):
    def write(self, name: str, content: bytes) -> None:
        super().write(name, content.upper())


def test_a_write_of_ones_own_is_called(tmp_path: Path) -> None:
    """As such a sink has inherited a way to write pieces, too."""
    writer = CutWriter(Upper(tmp_path))
    writer.write_now(2, [(NAMES[0], [b"two ", memoryview(b"pieces")])])
    writer.close(1)
    assert (tmp_path / NAMES[0]).read_bytes() == b"TWO PIECES"
