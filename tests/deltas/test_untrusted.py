"""A right checksum does not say who wrote a file: what does not fit is a FileError, in bounded memory."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.deltas import Replica, Rows, encode
from lightning_overlap.deltas.files import TRAILER_SIZE, FileError, decode, read_header
from lightning_overlap.deltas.files.form import _COLUMNS, _HEADER
from lightning_overlap.deltas.serving.served_tables import CoveredRows, TablesError

from .histories import MemorySink
from .untrusted import HEADER, decode_changed, file_of_two_tables, with_checksum


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process from Linux")
def test_changed_bytes_are_refused_or_decoded(get_ranks: Any) -> None:
    [(num_refused, num_decoded)] = get_ranks(1).run(decode_changed, 400)
    assert num_refused > 100
    assert num_decoded > 10  # among others, bytes of values


def _stream(batch: pa.RecordBatch, **options: Any) -> bytes:
    schema = _COLUMNS.with_metadata({_HEADER: json.dumps(vars(HEADER)).encode()})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return with_checksum(out.getvalue().to_pybytes())


def _batch(**changes: Any) -> pa.RecordBatch:
    one = pa.ipc.open_stream(file_of_two_tables()[:-TRAILER_SIZE]).read_next_batch().to_pylist()[0]
    return pa.RecordBatch.from_pylist([{**one, **changes}], schema=_COLUMNS)


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
@given(st.sampled_from([field.name for field in dataclasses.fields(HEADER)]), JUNK)
def test_a_header_has_the_types_that_it_says(name: str, junk: Any) -> None:
    try:
        header = read_header(encode(dataclasses.replace(HEADER, **{name: junk})))
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
        elif field.name == "time":
            assert value - value == 0
        else:
            assert type(value) is type(getattr(HEADER, field.name))


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
        sink.write(str(own.name), encode(own, [entry]))
    replica = Replica(None, sink)
    with pytest.raises(TablesError, match="have some rows of a twice, and so lack others"):
        replica.update()
    assert replica.state_dict() == {}


def test_a_table_of_any_size_without_a_base_is_refused() -> None:
    """A new replica would make a table of the size that a header states."""
    sink = MemorySink()
    base = dataclasses.replace(HEADER, tables={"a": (2, 1)})
    sink.write(str(base.name), encode(base, [Rows("a", "weight", (2, 1), 0, torch.arange(2), torch.ones(2, 1))]))
    size = 1 << 40, 1
    cut = dataclasses.replace(base, step=3, after=(1, 2), tables={"a": (2, 1), "b": size})
    sink.write(str(cut.name), encode(cut, [Rows("b", "weight", size, 0, torch.tensor([5]), torch.ones(1, 1))]))
    with pytest.raises(TablesError, match="has rows of b, of which this replica has had no base"):
        Replica(None, sink).update()
