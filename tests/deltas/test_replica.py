"""A replica: what it writes into, who may read when, how it follows, and what it refuses; the format of files."""

import dataclasses
import io
import math
import re
import threading
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_overlap.deltas import (
    CutError,
    Dense,
    FileError,
    Position,
    Replica,
    ReplicaError,
    Rows,
    TablesError,
    decode,
    encode,
    encode_pieces,
)

from .histories import SHAPES, TOP, A, B, MemorySink, Model, Training, assert_equal, begun, empty_tables, updated, write


@pytest.fixture
def training() -> Training:
    return begun(MemorySink())


@pytest.fixture
def replica(training: Training) -> Replica:
    """At the only cut."""
    return updated(empty_tables(), training.sink)


def test_a_module_is_kept_up_to_date_with_its_dense_part_also_where_it_moves(training: Training) -> None:
    module = Model()
    replica = updated(module, training.sink)
    assert_equal(module.state_dict(), training.tables)
    assert all(parameter.requires_grad for parameter in module.parameters())
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # as `module.to(device)` does
    training.cut(steps=2)
    replica.update()
    assert_equal(module.state_dict(), training.tables)


def test_a_mapping_may_have_less_than_is_sent_and_more(training: Training) -> None:
    tables = {name: value for name, value in empty_tables().items() if name != TOP} | {"own": torch.ones(2)}
    updated(tables, training.sink)
    assert_equal(tables, {A: training.tables[A], B: training.tables[B], "own": torch.ones(2)})


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8]))
def test_every_bit_is_kept(dtype: torch.dtype) -> None:
    training = Training(MemorySink())
    bits = torch.randint(0, 256, (5, 4 * torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8)
    values = bits.view(dtype)
    rows = Rows("t", "weight", (5, 4), 0, torch.tensor([4, 0, 2, 1, 3]), values)
    write(training, (rows,), tables={"t": (5, 4)}, after=None)
    for tables in (None, {"t": torch.zeros(5, 4, dtype=dtype)}):
        table = updated(tables, training.sink).state_dict()["t"]
        assert torch.equal(table[rows.rows].view(torch.uint8), bits)


def test_what_changes_while_it_is_applied_leaves_a_replica_without_a_state(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that is too large to be kept is read twice, its first file also for its header."""
    replica = updated(empty_tables(), training.sink, kept_bytes=0)
    training.cut(steps=1)
    name = max(training.sink.files)
    rows = [Rows(A, "weight", SHAPES[A], 0, torch.tensor([1]), torch.ones(1, 4))]
    changed = encode(decode(training.sink.files[name]).header, rows)
    read, names = training.sink.read, []

    def changes(which: str) -> bytes:
        names.append(which)
        return changed if names.count(name) > 1 + name.count("c00000") else read(which)

    with monkeypatch.context() as patch:
        patch.setattr(training.sink, "read", changes)
        with pytest.raises(FileError, match=f"{name} was rewritten with other content"):
            replica.update()
    with pytest.raises(ReplicaError, match=r"so the tables are inconsistent: call update\(\)"), replica.reading():
        pass
    replica.update()
    assert_equal(replica.state_dict(), training.tables)


def test_what_is_read_is_of_one_step(training: Training, replica: Replica) -> None:
    """Readers look at all tables while a training runs: every answer is the tables at the step it names."""
    wrong: list[Any] = []
    seen: set[int] = set()
    done = threading.Event()

    def reads() -> None:
        while not done.is_set():
            with replica.reading() as position:
                first = replica.state_dict()[A].clone()
                time.sleep(0.001)
                for table in (first, replica.state_dict()[A]):
                    if not torch.equal(table, training.at_cut[position.cut][A]):
                        wrong.append(position)
            seen.add(position.step)

    readers = [threading.Thread(target=reads) for _ in range(3)]
    with replica:
        replica.follow(every_s=0.001)
        replica.follow(every_s=0.001)  # it does so already
        for reader in readers:
            reader.start()
        for _ in range(30):
            training.cut(steps=1)
            replica.wait(training.step - 1, timeout=20)
        done.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert len(seen) > 3


def test_a_writer_is_alone(training: Training, replica: Replica) -> None:
    said = r"a thread inside `reading\(\)` cannot update the replica"
    with replica.reading(), pytest.raises(RuntimeError, match=said), replica.lock:
        pass
    training.cut(steps=1)
    with replica.lock, replica.reading() as position:
        writer = threading.Thread(target=replica.update)
        writer.start()
        writer.join(0.05)
        assert position == replica.position
    writer.join()
    assert replica.step == 3


def test_position_and_lag(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(empty_tables(), training.sink)
    with pytest.raises(ReplicaError, match=r"no cut of .* has been applied: call update\(\), or follow\(\)"):
        _ = replica.lag
    assert (replica.step, replica.generation, replica.run) == (None, None, None)
    replica.update()
    assert replica.position == Position(1, 2, 0, 2, 1002.0)
    assert (replica.step, replica.generation, replica.run) == (2, 1, "run")
    assert replica.lag == (0, pytest.approx(time.time() - 1002.0, abs=100), 0)
    training.cut(steps=3)
    newer = [name for name in training.sink.files if "s000000000005" in name]
    read, lags = training.sink.read, []
    monkeypatch.setattr(training.sink, "read", lambda name: lags.append(replica.lag[::2]) or read(name))
    replica.update()
    assert set(lags) == {(3, len(newer))}
    assert replica.lag[::2] == (0, 0)
    assert replica.wait(timeout=5).step == 5
    with pytest.raises(TimeoutError, match=r"step 6 was not reached after 0.1 s; applied: .* generation 1, step 5"):
        replica.wait(6, timeout=0.1)


def test_an_error_while_following_is_raised_until_it_follows_again(training: Training, replica: Replica) -> None:
    training.cut(steps=1)
    name = max(training.sink.files)
    whole = training.sink.files[name]
    training.sink.files[name] = whole[:40]
    with replica:
        replica.follow(every_s=0.01)
        said = rf"stopped following .* after the cut of generation 1, step 2: FileError: {re.escape(name)} is damaged"
        with pytest.raises(ReplicaError, match=said):
            replica.wait(3, timeout=20)
        for use in (lambda: replica.lag, replica.check, lambda: replica.reading().__enter__()):
            with pytest.raises(ReplicaError, match=said):
                use()
        with replica.reading(after_error=True) as position:
            assert_equal(replica.state_dict(), training.at_cut[position.cut])
        training.sink.files[name] = whole
        replica.follow(every_s=0.01)
        assert replica.wait(3, timeout=20).step == 3


def test_a_saved_state_needs_no_history(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "states" / "state.pt"
    replica = Replica(Model(), training.sink)
    with pytest.raises(ReplicaError, match="has been applied: "):
        replica.save(path)
    replica.update()
    replica.save(path)
    assert list(path.parent.iterdir()) == [path]
    training.sink.files.clear()
    training.cut(steps=1)
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
    updated(None, training.sink).save(tmp_path / "state.pt")
    with pytest.raises(TablesError, match=r"is \(7, 4\) of torch.float32 in the saved state, and \(7, 5\) of"):
        Replica(empty_tables() | {A: torch.ones(7, 5)}, training.sink, start=tmp_path / "state.pt")


def test_a_damaged_state_is_refused(training: Training, tmp_path: Path) -> None:
    """Any single byte, the checksum's own too, and any end that is missing."""
    path = tmp_path / "state.pt"
    updated(None, training.sink).save(path)
    torch.load(path, weights_only=True)  # other readers skip the checksum
    whole, draw = path.read_bytes(), Random(3)
    for place in (*draw.sample(range(len(whole)), 60), *range(len(whole) - 40, len(whole))):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        with pytest.raises(ReplicaError, match=r"state.pt is (damaged|no)"):
            Replica(None, training.sink, start=path)
    for size in (0, 1, 30, *draw.sample(range(len(whole)), 20), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ReplicaError, match=r"state.pt is (damaged|no)"):
            Replica(None, training.sink, start=path)


REFUSED: dict[str, tuple[Any, str]] = {
    "fewer_tables": (
        {A: torch.ones(7, 4)},
        rf"the run 'run' sends tables that this replica lacks: {B}.\n  The replica has: {A}.\n  Use the",
    ),
    "another_shape": (
        empty_tables() | {A: torch.ones(8, 4)},
        rf"{A} has the shape \(7, 4\) in the run 'run', and \(8, 4\) in this replica: use the same",
    ),
    "another_dtype": (
        empty_tables() | {A: torch.ones(7, 4, dtype=torch.float16)},
        rf"{A} is \(7, 4\) of torch.float32 in g000001-s\S+, and \(7, 4\) of torch.float16 in this replica: "
        "use tables of the same shape and dtype",
    ),
    "tables_besides": (
        Model(("c",)),
        r"the module has tables that the run 'run' does not send, .*: model.ebc.embedding_bags.c.weight.\n  The run ",
    ),
    "another_module": (nn.Linear(2, 2), r"lacks: .*\n  The replica has: none.\n  Use the trained LightningModule"),
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


def test_what_cannot_be_written_is_refused(training: Training) -> None:
    with pytest.raises(TablesError, match=r"cannot write tables on `meta`.\n  got: model.ebc.embedding_bags.a.weight"):
        Replica(Model(device="meta"), training.sink)
    with pytest.raises(TablesError, match=r"a replica needs plain tensors.\n  got: a, a list"):
        Replica({"a": [1.0]}, training.sink)  # type: ignore[dict-item]
    module = Model()
    del module.model.top
    with pytest.raises(TablesError, match=f"has a dense tensor {TOP} that the module lacks"):
        Replica(module, training.sink).update()


BAD_ROWS: dict[str, tuple[Rows, str]] = {
    "row": (Rows(A, "weight", (7, 4), 0, torch.tensor([7]), torch.ones(1, 4)), "outside of its shape"),
    "negative_row": (Rows(A, "weight", (7, 4), 0, torch.tensor([-1]), torch.ones(1, 4)), "outside of"),
    "column": (Rows(A, "weight", (7, 4), 2, torch.tensor([0]), torch.ones(1, 3)), "values (1, 3) from column 2"),
    "shape": (Rows(A, "weight", (6, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "of a tensor (6, 4)"),
    "table": (Rows("c", "weight", (7, 4), 0, torch.tensor([0]), torch.ones(1, 4)), "has rows of c, which its header"),
    "state": (Rows(A, "momentum", (9, 1), 0, torch.tensor([8]), torch.ones(1, 1)), f"rows of {A} (momentum) outside"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_that_do_not_fit_are_refused(training: Training, what: str) -> None:
    entry, said = BAD_ROWS[what]
    good = Rows(B, "weight", SHAPES[B], 0, torch.tensor([0]), torch.full((1, 2), 9.0))
    replica = updated(empty_tables(), training.sink, optimizer_state=True)
    name = write(training, (good, entry))
    with pytest.raises(TablesError, match=re.escape(said)) as err:
        replica.update()
    assert str(err.value).startswith(name)
    assert_equal(replica.state_dict(), training.at_cut[1, 2])


def test_a_base_that_is_not_the_whole_table_is_refused() -> None:
    training = Training(MemorySink())
    rows = [Rows(name, "weight", SHAPES[name], 0, torch.tensor([0]), torch.ones(1, SHAPES[name][1])) for name in SHAPES]
    write(training, tuple(rows), after=None)
    with pytest.raises(TablesError, match=rf"generation 1, step 1 have 4 values of {A}, which needs 28. Do all files"):
        Replica(None, training.sink).update()


def test_parts_of_a_cut_that_differ_are_refused(training: Training) -> None:
    training.step += 1
    replica = Replica(None, training.sink)
    base = dataclasses.replace(training.header(), world_size=2)
    for change, expected in (
        ({"global_step": 9}, r"are of the same cut, but differ in global_step \(9 and 3\)"),
        ({"run": "another"}, f"is of the run 'another', {base.name} of the run 'run'. Use a separate sink"),
        ({"after": (1, 1)}, "they follow the cut of generation 1, step 1 and the cut of generation 1, step 2"),
    ):
        for rank, options in ((0, {}), (1, change)):
            header = dataclasses.replace(base, rank=rank, **options)
            training.sink.put(str(header.name), [encode(header)])
        with pytest.raises(CutError, match=expected):
            replica.update()
    training.sink.remove([str(header.name)])
    for chunk, after in ((0, (1, 2)), (1, None)):
        header = dataclasses.replace(base, rank=1, chunk=chunk, num_chunks=2, after=after)
        training.sink.put(str(header.name), [encode(header)])
    with pytest.raises(CutError, match="and the first file of its rank follow different cuts"):
        replica.update()


def test_a_part_under_another_name_is_refused(training: Training) -> None:
    """Its first file is read for its header; of the others too the name and the content have to be one."""
    training.step += 1
    headers = [dataclasses.replace(training.header(chunk=chunk, num_chunks=3), world_size=1) for chunk in range(3)]
    whole = {str(header.name): encode(header) for header in headers}
    names = list(whole)
    for one, other in ((0, 1), (2, 1)):
        training.sink.files |= whole | {names[one]: whole[names[other]]}
        with pytest.raises(FileError, match=f"{names[one]} has the header of {names[other]}: it was"):
            Replica(None, training.sink).update()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float64)
SHAPES_OF_DENSE: tuple[tuple[int, ...], ...] = ((0,), (), (2, 3), (1, 5, 1))
WORDS = st.text("abc.\u00e4", max_size=9)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@st.composite
def _rows(draw: st.DrawFn) -> Rows:
    # Many rows are more bytes than are joined.
    num_rows, width = draw(st.integers(0, 7) | st.just(1100)), draw(st.integers(1, 5))
    apart = draw(st.integers(0, 1))  # then the rows are not adjacent in memory
    values = torch.arange(num_rows * (width + apart)).reshape(num_rows, width + apart).to(draw(st.sampled_from(DTYPES)))
    values = values[:, :width]
    return Rows(draw(WORDS), draw(WORDS), (100, 9), draw(st.integers(0, 4)), torch.arange(num_rows) * 5, values)


@st.composite
def _dense(draw: st.DrawFn) -> Dense:
    shape = draw(st.sampled_from(SHAPES_OF_DENSE))
    return Dense(draw(WORDS), torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES))))


@settings(max_examples=50)
@given(st.lists(_rows(), max_size=3), st.lists(_dense(), max_size=2))
def test_a_file_is_what_arrow_would_have_written(rows: list[Rows], dense: list[Dense]) -> None:
    """Of the tensors given, by Arrow's own writer, read by Arrow's own reader; and it is read back."""
    header = Training(MemorySink()).header()
    found = encode(header, rows, dense)
    reader = pa.ipc.open_stream(found)
    entries = [
        ("rows", one.table, one.field, one.values, one.shape, one.first_column, one.values.shape[1], one.rows)
        for one in rows
    ] + [("dense", one.name, "weight", one.value, one.value.shape, 0, 0, torch.empty(0)) for one in dense]
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, reader.schema) as writer:
        for kind, name, field, values, shape, first, width, numbers in entries:
            row = (kind, name, field, str(values.dtype)[6:], shape, first, width, bytes_of(numbers), bytes_of(values))
            arrays = [pa.array([value], column.type) for value, column in zip(row, reader.schema, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=reader.schema))
    batches = list(reader)
    for batch in batches:
        batch.validate(full=True)
    assert batches == list(pa.ipc.open_stream(stream.getvalue()))
    assert len(found) == len(stream.getvalue()) + 14
    assert found[-14:] == b"CRC32:%08x" % zlib.crc32(found[:-14])
    back = decode(found)
    assert back.header == header
    for mine, theirs in zip([*back.rows, *back.dense], [*rows, *dense], strict=True):
        for field in dataclasses.fields(theirs):
            read, given_value = getattr(mine, field.name), getattr(theirs, field.name)
            assert torch.equal(read, given_value) if isinstance(read, Tensor) else read == given_value, field.name


def test_values_are_not_copied() -> None:
    values, header = torch.zeros(400, 3), Training(MemorySink()).header()
    pieces = encode_pieces(header, [Rows("table", "weight", (400, 3), 0, torch.arange(400), values)])
    before = b"".join(pieces)
    values[1, 1] = 7
    assert sum(one != other for one, other in zip(before, b"".join(pieces), strict=True)) == 2


def test_states_of_another_shape_are_refused_until_a_base_brings_them(training: Training) -> None:
    replica = Replica(empty_tables(), training.sink, optimizer_state=True)
    write(training, (Rows(A, "momentum1", (7, 1), 0, torch.tensor([3]), torch.ones(1, 1)),))
    replica.update()
    training.whole = (training.generation, training.step)
    wide = Rows(A, "momentum1", (7, 4), 0, torch.tensor([3]), torch.ones(1, 4))
    name = write(training, (wide,))
    with pytest.raises(TablesError, match=r"\(momentum1\) is \(7, 4\) of torch.float32 in .*, and \(7, 1\) of"):
        replica.update()
    training.sink.remove([name])
    base = [Rows(one, "weight", size, 0, torch.arange(size[0]), torch.ones(size)) for one, size in SHAPES.items()]
    write(training, (*base, wide), after=None)
    replica.update()
    assert replica.optimizer_state[A]["momentum1"].shape == (7, 4)
