"""`overlap-replica`: what it prints, writes and serves, and how it says what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap.deltas import FolderSink, Replica, ReplicaServer
from lightning_overlap.deltas.serving.command import main

from .histories import SHAPES, TOP, A, B, MemorySink, Training, assert_equal, begun, empty_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return begun(FolderSink(tmp_path / "deltas"))  # type: ignore[arg-type]


def test_once_writes_the_tables_and_a_state_to_go_on_from(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink, saved, state = str(tmp_path / "deltas"), tmp_path / "out" / "tables.pt", tmp_path / "state.pt"
    command = [sink, "--once", "--save", str(saved), "--state", str(state)]
    assert main(command) == 0
    assert_equal(torch.load(saved, weights_only=True), training.tables)
    assert capsys.readouterr().out == f"{saved}: step 2\n"
    training.sink.remove(list(training.sink.names()))
    training.train(3)
    training.cut()
    assert main(command) == 0
    assert_equal(torch.load(saved, weights_only=True), training.tables)
    assert capsys.readouterr().out == f"{saved}: step 5\n"


def test_it_follows_until_a_step(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(tmp_path / "deltas"), "--until", "4", "--every", "0.01", "--save", str(tmp_path / "tables.pt")]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(command)))
    thread.start()
    for _ in range(2):
        training.train(1)
        training.cut()
    thread.join(30)
    assert codes == [0]
    assert re.search(r"step 4 \(generation 1\), [\d.]+ s old, 0 steps and 0 parts behind\n", capsys.readouterr().out)
    assert_equal(torch.load(tmp_path / "tables.pt", weights_only=True), training.tables)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere", "--once"], "FolderSink('nowhere') has no whole cut. Does the training"),
        (["redis://127.0.0.1:1/0", "--once"], "cannot read the stream 'embedding_deltas' of "),
        (["redis://127.0.0.1:1/0"], "this replica stopped following RedisSink('redis://127.0.0.1:1/0'"),
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


@pytest.fixture
def served() -> Iterator[tuple[Training, Replica, str]]:
    training = Training(MemorySink(), seed=4)
    training.train(3)
    replica = Replica(empty_tables(), training.sink)
    with ReplicaServer(replica) as server:
        yield training, replica, f"http://127.0.0.1:{server.port}"


def ask(url: str, question: Any = None) -> tuple[int, Any]:
    data = None if question is None else question if isinstance(question, bytes) else json.dumps(question).encode()
    try:
        with urllib.request.urlopen(url, data, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as err:
        with err:
            return err.code, json.load(err)


def test_rows_are_looked_up(served: tuple[Training, Replica, str]) -> None:
    training, replica, url = served
    for path, question in (("/step", None), ("/lookup", {"table": A, "ids": [0]})):
        status, answer = ask(url + path, question)
        assert (status, answer["error"][:6]) == (503, "no cut")
    training.cut()
    replica.update()
    assert ask(f"{url}/lookup", {"table": A, "ids": [6, 0, 6]}) == (
        200,
        {"generation": 1, "step": 3, "rows": training.tables[A][[6, 0, 6]].tolist()},
    )
    assert ask(f"{url}/lookup", {"table": B, "ids": []})[1]["rows"] == []
    status, answer = ask(f"{url}/step")
    assert (status, answer["run"], answer["generation"], answer["step"]) == (200, "run", 1, 3)
    assert answer["tables"] == {A: [7, 4], B: [5, 2], TOP: [3]}
    assert answer["lag"]["steps"] == 0


@pytest.mark.parametrize(
    ("path", "question", "status", "said"),
    [
        ("/lookup", {"table": TOP, "ids": [0]}, 400, f"unknown table '{TOP}'. Did you mean '{B}' or '{A}'"),
        ("/lookup", {"table": A, "ids": [0, 7]}, 400, f"{A} has rows 0 to 6, got 7"),
        ("/lookup", {"table": A, "ids": [-1]}, 400, f"{A} has rows 0 to 6, got -1"),
        ("/lookup", {"table": A, "ids": [True]}, 400, "a request must be {"),
        ("/lookup", {"table": A}, 400, "a request must be {"),
        ("/lookup", [], 400, "a request must be {"),
        ("/lookup", b"{", 400, "Expecting property name"),
        ("/rows", {}, 404, "GET /step or POST /lookup, not POST /rows"),
        ("/rows", None, 404, "GET /step or POST /lookup, not GET /rows"),
    ],
)
def test_wrong_requests_are_answered(
    served: tuple[Training, Replica, str], path: str, question: Any, status: int, said: str
) -> None:
    training, replica, url = served
    training.cut()
    replica.update()
    found, answer = ask(url + path, question)
    assert found == status
    assert answer["error"].startswith(said)


def test_a_request_of_a_negative_size_is_answered(served: tuple[Training, Replica, str]) -> None:
    request = urllib.request.Request(f"{served[2]}/lookup", b"{}", {"Content-Length": "-1"})
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=20):
        pass
    with caught.value as err:
        assert (err.code, json.load(err)["error"][:45]) == (400, "a request must have 0 to 67108864 bytes, got ")


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(training: Training, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "lightning_overlap.deltas.serving.command"]
    command += [str(tmp_path / "deltas"), "--serve", "0", "--every", "0.05", "--save", str(tmp_path / "tables.pt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removesuffix("/step")
        assert url.startswith("http://127.0.0.1:")
        assert process.stdout.readline() == f"following FolderSink('{tmp_path}/deltas')\n"
        assert process.stdout.readline().startswith("step 2 (generation 1)")
        training.train(1)
        training.cut()
        until = time.monotonic() + 30
        while ask(f"{url}/step")[1]["step"] != 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        rows = ask(f"{url}/lookup", {"table": B, "ids": list(range(SHAPES[B][0]))})[1]["rows"]
        assert rows == training.tables[B].tolist()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert_equal(torch.load(tmp_path / "tables.pt", weights_only=True), training.tables)
