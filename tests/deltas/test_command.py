"""`overlap-replica`: what it prints, writes and serves, and how it says what is wrong."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap.deltas import DiskStore, Replica, ReplicaServer
from lightning_overlap.deltas.serving import http_server
from lightning_overlap.deltas.serving.command import main

from .histories import SHAPES, TOP, A, B, Training, assert_equal, begun, empty_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return begun(DiskStore(tmp_path / "deltas"))  # type: ignore[arg-type]


def test_it_writes_the_tables_and_a_state_to_go_on_from(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink, saved, state = str(tmp_path / "deltas"), tmp_path / "out" / "tables.pt", tmp_path / "state.pt"
    command = [sink, "--once", "--save", str(saved), "--state", str(state)]
    assert main(command) == 0
    assert_equal(torch.load(saved, weights_only=True), training.tables)
    assert capsys.readouterr().out == f"{saved}: step 2\n"
    training.sink.remove(list(training.sink.names()))
    training.cut(steps=3)
    assert main(command) == 0
    assert_equal(torch.load(saved, weights_only=True), training.tables)
    assert capsys.readouterr().out == f"{saved}: step 5\n"
    assert main([sink, "--state", str(state), "--until", "5", "--every", "0.01"]) == 0
    said = r"following .*\nstep 5 \(generation 1\), [\d.]+ s old, 0 steps and 0 files behind\n"
    assert re.fullmatch(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere", "--once"], "DiskStore('nowhere') has no whole cut. Does the training"),
        (["redis://127.0.0.1:1/0"], "this replica stopped following RedisStore('redis://127.0.0.1:1/0'"),
        (["deltas", "--state", "text"], "text is not a state of a replica"),
    ],
)
def test_what_is_wrong_is_one_message(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("x")
    assert main(options) == 2
    assert capsys.readouterr().err.startswith(f"overlap-replica: {said}")


@pytest.mark.parametrize("option", ["--serve=x", "--serve=70000", "--every=0", "--every=soon"])
def test_options_are_checked(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["deltas", option])
    assert f"got '{option.partition('=')[2]}'" in capsys.readouterr().err


def ask(url: str, question: Any = None, **headers: str) -> tuple[int, Any]:
    data = question if question is None or isinstance(question, bytes) else json.dumps(question).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as err:
        with err:
            return err.code, json.load(err)["error"]


def test_rows_are_looked_up_and_wrong_requests_are_answered(training: Training) -> None:
    with ReplicaServer(replica := Replica(empty_tables(), training.sink)) as server:
        url = f"http://127.0.0.1:{server.port}"
        for path, question in (("/step", None), ("/lookup", {"table": A, "ids": [0]})):
            status, said = ask(url + path, question)
            assert (status, said[:6]) == (503, "no cut")
        replica.update()
        rows = {"generation": 1, "step": 2, "rows": training.tables[A][[6, 0, 6]].tolist()}
        assert ask(f"{url}/lookup", {"table": A, "ids": [6, 0, 6]}) == (200, rows)
        assert ask(f"{url}/lookup", {"table": B, "ids": []})[1]["rows"] == []
        status, answer = ask(f"{url}/step")
        assert (status, answer["run"], answer["generation"], answer["step"]) == (200, "run", 1, 2)
        assert answer["tables"] == {A: [7, 4], B: [5, 2], TOP: [3]}
        assert answer["lag"]["steps"] == 0
        for question, expected in (
            ({"table": TOP, "ids": [0]}, f"unknown table '{TOP}'. Did you mean '{B}' or '{A}'"),
            ({"table": A, "ids": [0, 7]}, f"{A} has rows 0 to 6, got 7"),
            ({"table": A, "ids": [-1]}, f"{A} has rows 0 to 6, got -1"),
            ({"table": A, "ids": [True]}, "a request must be {"),
            ({"table": A}, "a request must be {"),
            (b"{", "Expecting property name"),
        ):
            status, said = ask(f"{url}/lookup", question)
            assert (status, said[: len(expected)]) == (400, expected)
        status, said = ask(f"{url}/lookup", b"{}", **{"Content-Length": "-1"})
        assert (status, said) == (400, "a request must have 0 to 4194304 bytes, got -1: request fewer ids.")
        status, said = ask(f"{url}/lookup", b" " * (5 << 20))
        assert (status, said) == (400, "a request must have 0 to 4194304 bytes, got 5242880: request fewer ids.")
        status, said = ask(f"{url}/lookup", b"[" * 200_000)
        assert (status, said) == (400, "the request is nested too deeply")
        status, said = ask(f"{url}/lookup", {"table": A, "ids": [0] * 10_001})
        assert (status, said) == (400, "a request must have at most 10000 ids, got 10001")
        assert ask(f"{url}/rows") == (404, "GET /step or POST /lookup, not GET /rows")


@pytest.fixture
def server(training: Training) -> Iterator[ReplicaServer]:
    replica = Replica(empty_tables(), training.sink)
    replica.update()
    with ReplicaServer(replica) as server:
        yield server


def _connected(server: ReplicaServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection((server.host, server.port), timeout=20)
    client.sendall(sent)
    return client


POST = b"POST /lookup HTTP/1.1\r\nContent-Length: 100\r\n\r\n"


def test_200_clients_at_once_are_answered(server: ReplicaServer) -> None:
    clients = [_connected(server) for _ in range(200)]  # all are connected before one asks
    for client in clients:
        client.sendall(b"GET /step HTTP/1.0\r\n\r\n")
    for client in clients:
        with client, client.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.0 200 ")


def test_a_client_that_disconnects_early_leaves_no_traceback(
    server: ReplicaServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", b"GET /st", POST, POST + b"{", b"GET /step HTTP/1.0\r\n\r\n"):
        client = _connected(server, sent)
        # The server's next write, or read, fails: the connection is reset.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    url = f"http://127.0.0.1:{server.port}"
    assert ask(f"{url}/step")[0] == 200
    until = time.monotonic() + 20
    while server._open:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
    assert caplog.records == []


@pytest.mark.parametrize("trickles", [False, True])
def test_clients_that_stay_keep_no_others_out(
    server: ReplicaServer, trickles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sends nothing is idle, one that sends a byte now and then is not: its connection ends all the same."""
    monkeypatch.setattr(http_server, "CONNECTED_S", 0.5 if trickles else 60)
    monkeypatch.setattr(http_server._Handler, "timeout", http_server._Handler.timeout * (6 if trickles else 0.05))
    server._free = threading.Semaphore(2)
    staying = [_connected(server, b"GET /step HTTP") for _ in range(4)]
    ended = threading.Event()

    def trickle() -> None:
        while trickles and not ended.wait(0.05):
            for client in staying:
                with suppress(OSError):
                    client.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        status, _ = ask(f"http://127.0.0.1:{server.port}/step")
    finally:
        ended.set()
        sender.join()
        for client in staying:
            client.close()
    assert status == 200


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(training: Training, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "lightning_overlap.deltas.serving.command"]
    command += [str(tmp_path / "deltas"), "--serve", "0", "--every", "0.05", "--save", str(tmp_path / "tables.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removesuffix("/step")
        assert url.startswith("http://127.0.0.1:")
        assert process.stdout.readline() == f"following DiskStore('{tmp_path}/deltas')\n"
        assert process.stdout.readline().startswith("step 2 (generation 1)")
        training.cut(steps=1)
        until = time.monotonic() + 30
        while ask(f"{url}/step")[1]["step"] != 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        rows = ask(f"{url}/lookup", {"table": B, "ids": list(range(SHAPES[B][0]))})[1]["rows"]
        assert rows == training.tables[B].tolist()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert_equal(torch.load(tmp_path / "tables.pt", weights_only=True), training.tables)
