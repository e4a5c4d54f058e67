"""A replica: what it writes into, who may read when, how it follows, and what it refuses."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_overlap.deltas import (
    CutError,
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

from .histories import SHAPES, TOP, A, B, MemorySink, Training, assert_equal, empty_tables


class Model(nn.Module):
    """The names of `SHAPES`, in a module; `others` are tables besides."""

    def __init__(self, others: tuple[str, ...] = (), device: str = "cpu") -> None:
        super().__init__()
        self.model = nn.Module()
        tables = {name.split(".")[-2]: shape for name, shape in SHAPES.items()} | dict.fromkeys(others, (3, 4))
        configs = [
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=columns)
            for name, (rows, columns) in tables.items()
        ]
        self.model.ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.model.top = nn.Linear(3, 1, bias=False)
        self.model.top.weight = nn.Parameter(torch.zeros(3))


@pytest.fixture
def training() -> Training:
    made = Training(MemorySink(), seed=2)
    made.start(2, 1)
    made.train(2)
    made.cut()
    return made


def write(training: Training, rows: tuple[Rows, ...] = (), dense: tuple[Dense, ...] = (), **header: Any) -> str:
    """Write a cut of one rank by hand."""
    training.step += 1
    training.start(1, 0)
    said = training.header()
    changed = type(said)(**{name: getattr(said, name) for name in said.__slots__} | header)
    training.sink.write(str(changed.name), encode(changed, rows, dense))
    return str(changed.name)


# -- what it writes into -----------------------------------------------------------------------------------------------


def test_a_module_is_kept_up_to_date_with_its_dense_part(training: Training) -> None:
    module = Model()
    Replica(module, training.sink).update()
    assert_equal(module.state_dict(), training.tables)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_module_that_moves_is_followed(training: Training) -> None:
    module = Model()
    replica = Replica(module, training.sink)
    replica.update()
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


def test_tables_are_made_where_none_are_given(training: Training) -> None:
    replica = Replica(None, training.sink)
    replica.update()
    assert_equal(replica.state_dict(), training.tables)


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
        Rows(A, "momentum1", (7, 1), first, torch.tensor([3]), torch.tensor([[value]]))
        for first, value in ((0, 0.5), (2, 0.25))
    ]
    wide = Rows(B, "exp_avg", (5, 2), 1, torch.tensor([4, 0]), torch.tensor([[7.0], [8.0]]))
    write(training, (*state, wide), dense=(Dense(TOP, torch.ones(3)),))
    for asked in (False, True):
        replica = Replica(empty_tables(), training.sink, optimizer_state=asked)
        replica.update()
        found = replica.optimizer_state
        assert set(found) == ({A, B} if asked else set())
    assert found[A]["momentum1"][3].item() == 0.5
    assert found[A]["momentum1[2:]"][3].item() == 0.25
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
        with pytest.raises(PartError, match=f"{name} was written anew with other content"):
            replica.update()
    assert replica.step is None
    with pytest.raises(ReplicaError, match=r"so the tables are of no step: update\(\) begins again"), replica.reading():
        pass
    replica.update()
    with replica.reading():
        assert_equal(replica.state_dict(), training.tables)


# -- who reads when ----------------------------------------------------------------------------------------------------


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
        with pytest.raises(RuntimeError, match="a thread that reads a replica cannot write it"), replica.lock:
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


# -- how it follows ----------------------------------------------------------------------------------------------------


def test_position_and_lag(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(empty_tables(), training.sink)
    with pytest.raises(ReplicaError, match=r"nothing has been applied yet from .*: call update\(\), or follow\(\)"):
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
        TimeoutError, match=r"step 3 was not there after 0.1 s; applied: the cut of generation 1, step 2"
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
        said = rf"stopped following .* after the cut of generation 1, step 2: PartError: {re.escape(name)} is torn"
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


# -- from one process to the next --------------------------------------------------------------------------------------


def test_a_saved_state_needs_no_history(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "states" / "state.pt"
    replica = Replica(Model(), training.sink)
    with pytest.raises(ReplicaError, match="nothing has been applied yet"):
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
        with pytest.raises(ReplicaError, match=f"{name} is no state of a replica: "):
            Replica(None, training.sink, start=tmp_path / name)
    replica = Replica(None, training.sink)
    replica.update()
    replica.save(tmp_path / "state.pt")
    with pytest.raises(TablesError, match=r"is \(7, 4\) of torch.float32 in the saved state, and \(7, 5\) of"):
        Replica(empty_tables() | {A: torch.ones(7, 5)}, training.sink, start=tmp_path / "state.pt")


# -- what it refuses ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "fewer_tables": (
        {A: torch.ones(7, 4)},
        rf"the run 'run' sends tables that this replica does not have: {B}.\n  It has: {A}.\n  Give the Lightning",
    ),
    "another_shape": (
        empty_tables() | {A: torch.ones(8, 4)},
        rf"{A} has the shape \(7, 4\) in the run 'run', and \(8, 4\) in this replica: give it the same",
    ),
    "another_dtype": (
        empty_tables() | {A: torch.ones(7, 4, dtype=torch.float16)},
        rf"{A} is of torch.float32 in g000001-s\S+, and of torch.float16 in this replica: rows are written bit for bit",
    ),
    "another_dense_shape": (
        empty_tables() | {TOP: torch.ones(4)},
        rf"{TOP} is \(3,\) of torch.float32 in g000001-s\S+, and \(4,\) of torch.float32 in this replica",
    ),
    "tables_besides": (
        Model(("c",)),
        r"the module has tables that the run 'run' does not send, .*: model.ebc.embedding_bags.c.weight.\n  It sends: ",
    ),
    "another_module": (nn.Linear(2, 2), r"does not have: .*\n  It has: none.\n  Give the LightningModule that is"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_tables_are_refused_before_anything_is_written(training: Training, what: str) -> None:
    target, said = REFUSED[what]
    tensors: dict[str, Tensor] = target.state_dict() if isinstance(target, nn.Module) else target
    before = {name: value.clone() for name, value in tensors.items()}
    replica = Replica(target, training.sink)
    with pytest.raises(TablesError, match=said):
        replica.update()
    assert replica.step is None
    assert_equal(tensors, before)


def test_a_module_without_the_dense_part_is_refused(training: Training) -> None:
    module = Model()
    del module.model.top
    with pytest.raises(TablesError, match=f"has a dense tensor {TOP} that the module does not have"):
        Replica(module, training.sink).update()


def test_tables_without_memory_are_refused(training: Training) -> None:
    with pytest.raises(TablesError, match=r"cannot write tables on `meta`.\n  got: model.ebc.embedding_bags.a.weight"):
        Replica(Model(device="meta"), training.sink)


def test_what_is_no_tensor_is_refused(training: Training) -> None:
    with pytest.raises(TablesError, match=r"a replica writes plain tensors.\n  got: a, a list"):
        Replica({"a": [1.0]}, training.sink)  # type: ignore[dict-item]


BAD_ROWS: dict[str, tuple[Rows, str]] = {
    "row": (Rows(A, "weight", (7, 4), 0, torch.tensor([7]), torch.ones(1, 4)), "do not lie within its shape"),
    "negative_row": (Rows(A, "weight", (7, 4), 0, torch.tensor([-1]), torch.ones(1, 4)), "do not lie within"),
    "column": (
        Rows(A, "weight", (7, 4), 2, torch.tensor([0]), torch.ones(1, 3)),
        "(1, 3) values from column 2",
    ),
    "shape": (Rows(A, "weight", (6, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "of a tensor (6, 4)"),
    "table": (Rows("c", "weight", (7, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "has rows of c, which its header"),
    "state": (Rows(A, "momentum", (9, 1), 0, torch.tensor([8]), torch.ones(1, 1)), f"rows of {A} (momentum) that do"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_that_do_not_fit_are_refused(training: Training, what: str) -> None:
    entry, said = BAD_ROWS[what]
    good = Rows(B, "weight", SHAPES[B], 0, torch.tensor([0]), torch.full((1, 2), 9.0))
    replica = Replica(empty_tables(), training.sink, optimizer_state=True)
    replica.update()
    name = write(training, (good, entry))
    with pytest.raises(TablesError, match=re.escape(said)) as err:
        replica.update()
    assert str(err.value).startswith(name)
    assert_equal(replica.state_dict(), training.at_cut[1, 2])


def test_a_base_that_is_not_the_whole_table_is_refused() -> None:
    training = Training(MemorySink())
    rows = [Rows(name, "weight", SHAPES[name], 0, torch.tensor([0]), torch.ones(1, SHAPES[name][1])) for name in SHAPES]
    write(training, tuple(rows), after=None)
    with pytest.raises(TablesError, match=rf"generation 1, step 1 have 4 values of {A}, which has 28: the training"):
        Replica(None, training.sink).update()


def test_parts_of_a_cut_that_differ_are_refused(training: Training) -> None:
    training.step += 1
    replica = Replica(None, training.sink)
    said = training.header()
    base = {name: getattr(said, name) for name in said.__slots__} | {"world_size": 2}
    for change, expected in (
        ({"global_step": 9}, "are parts of one cut and differ in global_step: 9 and 3"),
        ({"after": (1, 1)}, "its parts follow the cut of generation 1, step 1 and the cut of generation 1, step 2"),
    ):
        for rank, options in ((0, {}), (1, change)):
            header = type(said)(**base | options | {"rank": rank})
            training.sink.write(str(header.name), encode(header))
        with pytest.raises(CutError, match=expected):
            replica.update()
    for chunk, after in ((0, (1, 2)), (1, None)):
        header = type(said)(**base | {"rank": 1, "chunk": chunk, "num_chunks": 2, "after": after})
        training.sink.remove([str(type(said)(**base | {"rank": 1}).name)])
        training.sink.write(str(header.name), encode(header))
    with pytest.raises(CutError, match="does not fit the first chunk of its part"):
        replica.update()


def test_a_part_under_another_name_is_refused(training: Training) -> None:
    """Its first chunk is read for its header; of the others too the name and the content have to be one."""
    training.step += 1
    training.start(1, 0)
    names = []
    for chunk in range(3):
        header = training.header(chunk=chunk, num_chunks=3)
        names.append(str(header.name))
        training.sink.write(names[-1], encode(header))
    replica = Replica(None, training.sink)
    whole = dict(training.sink.parts)
    for one, other in ((0, 1), (2, 1)):
        training.sink.parts = whole | {names[one]: whole[names[other]]}
        with pytest.raises(PartError, match=f"{names[one]} says of itself that it is {names[other]}: a part"):
            replica.update()
