"""`DeadlineStore`: a store's server that is stopped, has ended, or answers."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.distributed import NoAnswerError
from lightning_overlap.distributed.stores import DeadlineStore, port_of

TIMEOUT_S = 0.5


class Server(NamedTuple):
    pid: int
    store: DeadlineStore  # its client in this process
    end: Any


@pytest.fixture
def server() -> Iterator[Server]:
    process, port = start_server(0)

    def end() -> None:
        process.kill()
        process.join()

    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    assert process.pid is not None
    yield Server(process.pid, DeadlineStore(dist.PrefixStore("a", dist.PrefixStore("b", client)), TIMEOUT_S), end)
    end()


def start_server(port: int) -> tuple[Any, int]:
    """Return the process of a store's server, and the port: 0 stands for a free one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    ours, theirs = context.Pipe()
    process = context.Process(target=keep_a_store, args=(theirs, port))
    process.start()
    return process, ours.recv()


def keep_a_store(pipe: Any, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


CALLS = {
    "add": lambda store: store.add("n", 1),
    "compare_set": lambda store: store.compare_set("k", "", "v"),
    "delete_key": lambda store: store.delete_key("k"),
    "wait": lambda store: store.wait(["none"], timedelta(seconds=0.2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_though_the_server_does_not_answer(server: Server, name: str) -> None:
    assert server.store.add("n", 1) == 1
    os.kill(server.pid, signal.SIGSTOP)
    while not all(") T " in path.read_text() for path in Path(f"/proc/{server.pid}/task").glob("*/stat")):
        time.sleep(0.001)
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"store has not answered within 0\.5 s"):
        CALLS[name](server.store)
    assert 0.4 < time.monotonic() - began < 2
    for later in CALLS:  # the time counts from the first call: all calls on the way out take no longer than one
        with pytest.raises(NoAnswerError):
            CALLS[later](server.store)
    with pytest.raises(NoAnswerError):
        server.store.set("k", "v")
    assert time.monotonic() - began < 2.5
    threading.Timer(0.2, os.kill, (server.pid, signal.SIGCONT)).start()
    assert server.store.within(20).add("n", 0) in (1, 2)
    server.store.within(20).set("k", "v")
    assert server.store.within(20).compare_set("k", "", "") == b"v"


def test_a_server_that_has_ended_is_told_by_an_error_alone(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    """torch writes a warning with a stack to stderr for every call over a closed connection."""
    server.store.set("k", "v")
    server.end()
    for call in (*CALLS.values(), lambda store: store.set("k", "v")):
        with pytest.raises(dist.DistNetworkError, match="has ended"):
            call(server.store)
    assert capfd.readouterr().err == ""


def test_an_older_stores_server_on_the_same_port_is_not_taken_for_it(server: Server) -> None:
    """The older store is held, by a reference cycle, say, and its socket comes first."""
    older, port = server.store, port_of(server.store)
    assert port is not None
    older.set("k", "v")
    server.end()
    process, _ = start_server(port)
    try:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert DeadlineStore(client, timeout_s=20).add("n", 1) == 1
        with pytest.raises(dist.DistNetworkError, match="has ended"):
            older.set("k", "v")
    finally:
        process.kill()
        process.join()


def test_a_process_without_free_descriptors_has_its_store(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.store.add("n", 1) == 1
    monkeypatch.setattr(os, "dup", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    assert server.store.add("n", 1) == 2


def test_the_process_that_keeps_the_store_waits_for_keys_at_its_end(server: Server) -> None:
    assert not server.store.wait_here(["k"], 20)  # not here
    here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = DeadlineStore(here, TIMEOUT_S)
    assert not store.wait_here(["k"], 0.05)
    threading.Timer(0.1, here.set, ("k", "v")).start()
    assert store.wait_here(["k"], 20)


_KEYS = st.sampled_from(["a", "b"])
_OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.just("number"), st.integers(-3, 3)),
    st.tuples(st.just("set"), _KEYS, st.sampled_from(["", "x", "y"])),
    st.tuples(st.just("compare_set"), _KEYS, st.sampled_from(["", "x"]), st.sampled_from(["x", "y"])),
    st.tuples(st.just("delete_key"), _KEYS),
)


@given(st.lists(_OPERATIONS, max_size=12))
def test_it_answers_as_the_store_does(operations: list[Any]) -> None:
    plain, bounded = dist.HashStore(), DeadlineStore(dist.HashStore(), 20)
    for name, *arguments in operations:
        assert getattr(bounded, name)(*arguments) == getattr(plain, name)(*arguments)
