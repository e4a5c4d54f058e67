"""A replica: what it writes into, who may read when, how it follows, and what it refuses."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.deltas import (
    Dense,
    PartError,
    Position,
    Replica,
    ReplicaError,
    Rows,
    TablesError,
    decode,
    encode,
)

from .histories import SHAPES, TOP, A, B, MemorySink, Model, Training, assert_equal, empty_tables, write


def test_a_module_is_kept_up_to_date_with_its_dense_part_also_where_it_moves(training: Training) -> None:
    module = Model()
    replica = Replica(module, training.sink)
    replica.update()
    assert_equal(module.state_dict(), training.tables)
    assert all(parameter.requires_grad for parameter in module.parameters())
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # as `module.to(device)` does
    training.train(2)
    training.cut()
    replica.update()
    assert_equal(module.state_dict(), training.tables)


def test_a_mapping_may_have_less_than_is_sent_and_more(training: Training) -> None:
    tables = {name: value for name, value in empty_tables().items() if name != TOP} | {"own": torch.ones(2)}
    replica = Replica(tables, training.sink)
    replica.update()
    assert_equal(tables, {A: training.tables[A], B: training.tables[B], "own": torch.ones(2)})
    assert replica.run == "run"


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8]))
def test_every_bit_is_kept(dtype: torch.dtype) -> None:
    training = Training(MemorySink())
    bits = torch.randint(0, 256, (5, 4 * torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8)
    values = bits.view(dtype)
    rows = Rows("t", "weight", (5, 4), 0, torch.tensor([4, 0, 2, 1, 3]), values)
    write(training, (rows,), tables={"t": (5, 4)}, after=None)
    for tables in (None, {"t": torch.zeros(5, 4, dtype=dtype)}):
        replica = Replica(tables, training.sink)
        replica.update()
        assert torch.equal(replica.state_dict()["t"][rows.rows].view(torch.uint8), bits)


def test_optimizer_state_is_kept_when_it_is_asked_for(training: Training) -> None:
    state = [
        Rows(A, "momentum1", (7, 4), first, torch.tensor([3]), torch.full((1, 2), value))
        for first, value in ((0, 0.5), (2, 0.25))
    ]
    of_rows = Rows(A, "momentum2", (7, 1), 0, torch.tensor([3]), torch.tensor([[9.0]]))
    wide = Rows(B, "exp_avg", (5, 2), 1, torch.tensor([4, 0]), torch.tensor([[7.0], [8.0]]))
    write(training, (*state, of_rows, wide), dense=(Dense(TOP, torch.ones(3)),))
    for asked in (False, True):
        replica = Replica(empty_tables(), training.sink, optimizer_state=asked)
        replica.update()
        found = replica.optimizer_state
        assert set(found) == ({A, B} if asked else set())
    assert found[A]["momentum1"][3].tolist() == [0.5, 0.5, 0.25, 0.25]
    assert found[A]["momentum2"].tolist() == [[0], [0], [0], [9], [0], [0], [0]]
    assert found[B]["exp_avg"].tolist() == [[0, 8], [0, 0], [0, 0], [0, 0], [0, 7]]


def test_large_cuts_are_read_twice_and_not_kept(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = training.sink.read, []
    monkeypatch.setattr(training.sink, "read", lambda name: names.append(name) or read(name))
    num_chunks = len(training.sink.parts)
    for kept_bytes, times in ((1 << 20, 1), (0, 2)):
        names.clear()
        Replica(empty_tables(), training.sink, kept_bytes=kept_bytes).update()
        assert len(names) == times * num_chunks + 2  # and a header of each rank


def test_what_changes_while_it_is_applied_leaves_a_replica_without_a_state(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = training.sink
    replica = Replica(empty_tables(), sink, kept_bytes=0)
    replica.update()
    training.train(1)
    training.cut()
    name = max(training.sink.parts)
    other = decode(sink.parts[name])
    changed = encode(other.header, [Rows(A, "weight", SHAPES[A], 0, torch.tensor([1]), torch.ones(1, 4))])
    read, number = sink.read, []

    def changes(which: str) -> bytes:
        number.append(which)
        return changed if number.count(name) > 1 + name.count("c00000") else read(which)

    with monkeypatch.context() as patch:
        patch.setattr(sink, "read", changes)
        with pytest.raises(PartError, match=f"{name} was rewritten with other content"):
            replica.update()
    assert replica.step is None
    with pytest.raises(ReplicaError, match=r"so the tables are inconsistent: call update\(\)"), replica.reading():
        pass
    replica.update()
    with replica.reading():
        assert_equal(replica.state_dict(), training.tables)


def test_what_is_read_is_of_one_step(training: Training) -> None:
    """Readers look at all tables while a training runs: every answer is the tables at the step it names."""
    replica = Replica(empty_tables(), training.sink)
    replica.update()
    wrong: list[Any] = []
    seen: set[int] = set()
    done = threading.Event()

    def reads() -> None:
        while not done.is_set():
            with replica.reading() as position:
                first = replica.state_dict()[A].clone()
                time.sleep(0.001)
                if not torch.equal(first, replica.state_dict()[A]) or not torch.equal(
                    first, training.at_cut[position.cut][A]
                ):
                    wrong.append(position)
            seen.add(position.step)

    readers = [threading.Thread(target=reads) for _ in range(3)]
    replica.follow(every_s=0.001)
    for reader in readers:
        reader.start()
    for _ in range(30):
        training.train(1)
        training.cut()
        replica.wait(training.step - 1, timeout=20)
    assert replica.wait(training.step, timeout=20).step == training.step
    done.set()
    for reader in readers:
        reader.join()
    replica.close()
    assert not wrong
    assert len(seen) > 3


def test_readers_read_at_once_and_a_writer_alone(training: Training) -> None:
    replica = Replica(empty_tables(), training.sink)
    replica.update()
    inside, order = threading.Barrier(2, timeout=10), []

    def reads() -> None:
        with replica.reading(), replica.reading():
            inside.wait()
            order.append("read")

    with replica.reading():
        other = threading.Thread(target=reads)
        other.start()
        inside.wait()
        other.join()
        with (
            pytest.raises(RuntimeError, match=r"a thread inside `reading\(\)` cannot update the replica"),
            replica.lock,
        ):
            pass

    def updates() -> None:
        replica.update()
        order.append("write")

    training.train(1)
    training.cut()
    with replica.lock, replica.reading() as position:
        writer = threading.Thread(target=updates)
        writer.start()
        writer.join(0.05)
        assert position == replica.position
        order.append("locked")
    writer.join()
    assert order == ["read", "locked", "write"]


def test_position_and_lag(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(empty_tables(), training.sink)
    with pytest.raises(ReplicaError, match=r"no cut of .* has been applied: call update\(\), or follow\(\)"):
        _ = replica.lag
    assert (replica.step, replica.generation, replica.run) == (None, None, None)
    replica.update()
    assert replica.position == Position(1, 2, 0, 2, 1002.0)
    assert (replica.step, replica.generation) == (2, 1)
    assert replica.lag[::2] == (0, 0)
    assert replica.lag.seconds == pytest.approx(time.time() - 1002.0, abs=100)
    for _ in range(2):
        training.train(3)
        training.cut()
    newer = [name for name in training.sink.parts if "s000000000002" not in name]
    read, lags = training.sink.read, []
    monkeypatch.setattr(training.sink, "read", lambda name: lags.append(replica.lag[::2]) or read(name))
    replica.update()
    assert lags[-1] == (3, sum("s000000000008" in name for name in newer))
    assert (6, len(newer)) in lags
    assert replica.lag[::2] == (0, 0)


def test_waiting(training: Training) -> None:
    replica = Replica(empty_tables(), training.sink)
    assert replica.wait(timeout=5).step == 2
    with pytest.raises(
        TimeoutError, match=r"step 3 was not reached after 0.1 s; applied: the cut of generation 1, step 2"
    ):
        replica.wait(3, timeout=0.1)
    with replica:
        replica.follow(every_s=0.01)
        replica.follow(every_s=0.01)
        training.train(1)
        training.cut()
        assert replica.wait(3, timeout=20).step == 3


def test_an_error_while_following_is_raised_until_it_follows_again(training: Training) -> None:
    replica = Replica(empty_tables(), training.sink)
    replica.update()
    training.train(1)
    training.cut()
    name = max(training.sink.parts)
    whole = training.sink.parts[name]
    training.sink.parts[name] = whole[:40]
    with replica:
        replica.follow(every_s=0.01)
        said = rf"stopped following .* after the cut of generation 1, step 2: PartError: {re.escape(name)} is damaged"
        with pytest.raises(ReplicaError, match=said):
            replica.wait(3, timeout=20)
        for use in (lambda: replica.lag, replica.check, lambda: replica.reading().__enter__()):
            with pytest.raises(ReplicaError, match=said):
                use()
        with replica.reading(after_error=True) as position:
            assert_equal(replica.state_dict(), training.at_cut[position.cut])
        training.sink.parts[name] = whole
        replica.follow(every_s=0.01)
        assert replica.wait(3, timeout=20).step == 3
        replica.check()


def test_a_saved_state_needs_no_history(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "states" / "state.pt"
    replica = Replica(Model(), training.sink)
    with pytest.raises(ReplicaError, match="has been applied: "):
        replica.save(path)
    replica.update()
    replica.save(path)
    assert list(path.parent.iterdir()) == [path]
    training.sink.parts.clear()
    training.train(1)
    training.cut()
    for target in (Model(), empty_tables(), None):
        again = Replica(target, training.sink, start=path)
        assert again.position == replica.position
        assert_equal(dict(again.state_dict()), training.at_cut[1, 2])
        assert again.update() == 1
        assert_equal(dict(again.state_dict()), training.tables)


def test_what_is_no_saved_state_is_told(training: Training, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    for name in ("text", "other.pt"):
        with pytest.raises(ReplicaError, match=f"{name} is not a state of a replica: "):
            Replica(None, training.sink, start=tmp_path / name)
    replica = Replica(None, training.sink)
    replica.update()
    replica.save(tmp_path / "state.pt")
    with pytest.raises(TablesError, match=r"is \(7, 4\) of torch.float32 in the saved state, and \(7, 5\) of"):
        Replica(empty_tables() | {A: torch.ones(7, 5)}, training.sink, start=tmp_path / "state.pt")
