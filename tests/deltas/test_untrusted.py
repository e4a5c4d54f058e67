"""A right checksum does not say who wrote a file: what does not fit is a FileError, in bounded memory."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap.deltas import NO_ID, Header, Replica, Rows, encode
from lightning_overlap.deltas.files import TRAILER_SIZE, FileError, decode, read_header
from lightning_overlap.deltas.files.form import _HEADER
from lightning_overlap.deltas.serving import KnownIds
from lightning_overlap.deltas.serving.covered_rows import CoveredRows, TablesError
from lightning_overlap.row_log.arrow_stream import COLUMNS

from .histories import MemorySink
from .untrusted import HEADER, MANAGED, OF_RAW_IDS, decode_changed, file_of_two_tables, raw_ids, with_checksum


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process from Linux")
def test_changed_bytes_are_refused_or_decoded(get_ranks: Any) -> None:
    [(num_refused, num_decoded)] = get_ranks(1).run(decode_changed, 400)
    assert num_refused > 100
    assert num_decoded > 10  # among others, bytes of values


def _stream(batch: pa.RecordBatch, **options: Any) -> bytes:
    schema = COLUMNS.with_metadata({_HEADER: json.dumps(vars(MANAGED), default=vars).encode()})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return with_checksum(out.getvalue().to_pybytes())


def _batch(**changes: Any) -> pa.RecordBatch:
    one = pa.ipc.open_stream(file_of_two_tables()[:-TRAILER_SIZE]).read_next_batch().to_pylist()[0]
    return pa.RecordBatch.from_pylist([{**one, **changes}], schema=COLUMNS)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_batches_are_not_unpacked(compression: str) -> None:
    large = _batch(values=bytes(64 << 20))
    data = _stream(large, compression=compression)
    assert len(data) < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(FileError, match="it has a compressed batch"):
        decode(data)
    assert pa.total_allocated_bytes() - before < 1 << 20


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a row twice": ({"rows": np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 0]).tobytes()}, "a has a row twice"),
    "a dtype": ({"dtype": "no_such_dtype"}, "has the dtype 'no_such_dtype'"),
    "no dtype": ({"dtype": "nn"}, "has the dtype 'nn'"),
    "a null": ({"name": None}, "it has a batch with a null"),
    "a shape": ({"shape": [10]}, "where 2 integers from 0 on have to be"),
    "a negative shape": ({"shape": [-10, 4]}, "where 2 integers from 0 on have to be"),
    "few values": ({"values": bytes(8)}, "RuntimeError: shape"),
    "half a value": ({"values": bytes(7)}, "must be a multiple of element size"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_batch_that_is_wrong_is_told(what: str) -> None:
    changes, said = WRONG[what]
    with pytest.raises(FileError, match=f"^NAME is not a file of embedding deltas: .*{said}"):
        decode(_stream(_batch(**changes)), "NAME")
    decode(_stream(_batch()))


def test_two_rows_in_a_batch_are_refused() -> None:
    with pytest.raises(FileError, match="it has a batch of 2 rows"):
        decode(_stream(pa.Table.from_batches([_batch(), _batch()]).combine_chunks().to_batches()[0]))


JUNK = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=2) | st.lists(st.integers(-1, 2))


@settings(max_examples=200)
@given(st.sampled_from([HEADER, MANAGED]), st.sampled_from([field.name for field in dataclasses.fields(HEADER)]), JUNK)
def test_a_header_has_the_types_that_it_says(whole: Header, name: str, junk: Any) -> None:
    try:
        header = read_header(encode(dataclasses.replace(whole, **{name: junk})))
    except FileError:
        return
    for field in dataclasses.fields(header):
        value = getattr(header, field.name)
        if field.name in ("after", "found"):
            assert value is None or (len(value) == 2 and {type(one) for one in value} == {int})
        elif field.name == "row_wise":
            assert value is None or [list(map(type, one)) for one in value] == [[str, str, int, int]] * len(value)
        elif field.name == "tables":
            assert isinstance(value, dict)
        elif field.name == "raw_ids":
            assert value == whole.raw_ids
        elif field.name == "time":
            assert value - value == 0
        else:
            assert type(value) is type(getattr(HEADER, field.name))


@settings(max_examples=200)
@given(st.sampled_from([field.name for field in dataclasses.fields(OF_RAW_IDS)]), JUNK | st.lists(st.integers(0, 11)))
@example("segments", [0, 10])
@example("segments", [0, 4, 4, 10])
@example("segments", [0, 11])
def test_how_ids_get_rows_has_the_types_that_it_says(name: str, junk: Any) -> None:
    how = dataclasses.replace(OF_RAW_IDS, **{name: junk})
    try:
        found = read_header(encode(dataclasses.replace(MANAGED, raw_ids={"a": how})))
    except FileError:
        return
    assert found.raw_ids is not None
    [(table, one)] = found.raw_ids.items()
    assert table == "a"
    assert [type(value) for value in vars(one).values()] == [type(value) for value in vars(OF_RAW_IDS).values()]
    assert sorted(set(one.segments)) == [*one.segments]
    assert (one.segments[0], one.segments[-1]) == (0, 10)
    assert one.hash_size >= 0


@pytest.mark.parametrize("wrong", ["twice", "unknown", "evicted", "rows", "plain"])
def test_raw_ids_that_do_not_fit_are_refused(wrong: str) -> None:
    """Nothing is written: a replica stays as it was."""
    sink, header = MemorySink(), dataclasses.replace(MANAGED, tables={"a": (10, 4)})
    weight = Rows("a", "weight", (10, 4), 0, torch.arange(10), torch.ones(10, 4))
    none = raw_ids("raw_id", {**dict.fromkeys(range(10), NO_ID), 0: 100})
    sink.put(str(header.name), [encode(header, [weight, none])])
    replica = Replica(None, sink)
    replica.update()
    coming = {
        "twice": [raw_ids("raw_id", {7: 100})],
        "unknown": [raw_ids("raw_id", {3: 101})],  # the last row of a shard
        "evicted": [raw_ids("evicted_id", {0: 100})],
        "rows": [raw_ids("raw_id", {10: 101})],
        "plain": [],
    }[wrong]
    cut = dataclasses.replace(header, step=3, after=(1, 2))
    if wrong == "plain":
        cut = dataclasses.replace(cut, raw_ids={"a": dataclasses.replace(OF_RAW_IDS, segments=(0, 10))})
    sink.put(str(cut.name), [encode(cut, [dataclasses.replace(weight, values=torch.zeros(10, 4)), *coming])])
    said = {
        "twice": "two rows of a would have the same raw id",
        "unknown": "a row of a for unknown ids would have a raw id",
        "evicted": "are evicted, which have a row",
        "rows": "outside of its shape",
        "plain": "in another way, without a base",
    }[wrong]
    with pytest.raises(TablesError, match=said):
        replica.update()
    assert replica.step == 2
    assert replica.raw_ids["a"].tolist() == [100] + [NO_ID] * 9
    assert replica.state_dict()["a"].eq(1).all()


def test_a_reader_of_plain_files_refuses_raw_ids() -> None:
    """By the number of the format; plain files keep the former number, which it reads."""
    assert json.loads(json.dumps(vars(HEADER)))["schema"] == 1
    assert read_header(encode(HEADER)).raw_ids is None
    for changed in (dataclasses.replace(MANAGED, schema=1), dataclasses.replace(HEADER, schema=2)):
        with pytest.raises(FileError, match="its raw_ids do not belong to schema"):
            read_header(encode(changed))
    with pytest.raises(FileError, match="is of schema 3, this version reads schemas 1 and 2"):
        read_header(encode(dataclasses.replace(MANAGED, schema=3)))
    with pytest.raises(FileError, match="b has no such raw_id"):
        decode(encode(MANAGED, [dataclasses.replace(raw_ids("raw_id", {0: 1}), table="b")]))


@given(st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(-3, 12) | st.just(NO_ID)))))
def test_sorted_ids_follow_changes(changes: list[list[tuple[int, int]]]) -> None:
    """As if all were sorted anew; changes that give two rows an id are left out."""
    known = KnownIds.of(OF_RAW_IDS, torch.full((10,), NO_ID))
    for some in changes:
        now = known.id_of_row.clone()
        for row, each in some:
            if each == NO_ID or each not in now.tolist():
                now[row] = each
        known, anew = KnownIds.of(OF_RAW_IDS, now, known), KnownIds.of(OF_RAW_IDS, now)
        assert known.sorted_ids.tolist() == anew.sorted_ids.tolist() == sorted(now.tolist())
        assert known.rows_of_ids.tolist() == anew.rows_of_ids.tolist()
        assert now[known.rows_of_ids].tolist() == sorted(now.tolist())


@st.composite
def pieces(draw: Any) -> list[tuple[list[int], range]]:
    """Rows (each once) and columns of pieces of a table (6, 3): all of it in some order, often changed a little."""
    found = []
    for columns in draw(st.sampled_from([[range(3)], [range(1), range(1, 3)], [range(2), range(2, 3)]])):
        rows = draw(st.permutations(range(6)))
        cut = draw(st.integers(0, 6))
        found += [(rows[:cut], columns), (rows[cut:], columns)]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(found) - 1))
        columns = draw(st.sampled_from([found[at][1], range(1), range(1, 3), range(3)]))
        found[at] = draw(st.lists(st.integers(0, 5), unique=True)), columns
    return found


@given(pieces())
def test_bases_cover_each_row_once(drawn: list[tuple[list[int], range]]) -> None:
    covered, count = CoveredRows(), np.zeros((6, 3), int)
    for rows, columns in drawn:
        values = torch.zeros(len(rows), len(columns))
        covered.add(Rows("a", "weight", (6, 3), columns.start, torch.tensor(rows, dtype=torch.int64), values))
        for row in rows:
            count[row, columns.start : columns.stop] += 1
    header = dataclasses.replace(HEADER, tables={"a": (6, 3)})
    if (count == 1).all():
        covered.check(header)
        return
    with pytest.raises(TablesError, match="Do all files come" if count.sum() != 18 else "have some rows of a twice"):
        covered.check(header)


def test_a_base_with_a_row_in_two_files_is_refused() -> None:
    """As many rows as the table has; nothing is written."""
    sink, header = MemorySink(), dataclasses.replace(HEADER, tables={"a": (4, 1)}, num_chunks=2)
    for chunk, rows in enumerate(([0, 1], [1, 2])):
        entry = Rows("a", "weight", (4, 1), 0, torch.tensor(rows), torch.ones(2, 1))
        own = dataclasses.replace(header, chunk=chunk)
        sink.put(str(own.name), [encode(own, [entry])])
    replica = Replica(None, sink)
    with pytest.raises(TablesError, match="have some rows of a twice, and so lack others"):
        replica.update()
    assert replica.state_dict() == {}


def test_a_table_of_any_size_without_a_base_is_refused() -> None:
    """A new replica would make a table of the size that a header states."""
    sink = MemorySink()
    base = dataclasses.replace(HEADER, tables={"a": (2, 1)})
    sink.put(str(base.name), [encode(base, [Rows("a", "weight", (2, 1), 0, torch.arange(2), torch.ones(2, 1))])])
    size = 1 << 40, 1
    cut = dataclasses.replace(base, step=3, after=(1, 2), tables={"a": (2, 1), "b": size})
    sink.put(str(cut.name), [encode(cut, [Rows("b", "weight", size, 0, torch.tensor([5]), torch.ones(1, 1))])])
    with pytest.raises(TablesError, match="has rows of b, of which this replica has had no base"):
        Replica(None, sink).update()
