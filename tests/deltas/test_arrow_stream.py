"""Chunks are Arrow's own streams, and the values in them are nobody's copies."""

import importlib
import io
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.deltas import Dense, FolderSink, Rows, encode, encode_pieces, parts
from lightning_overlap.deltas.parts import form
from lightning_overlap.deltas.recording.writer import CutWriter

from .histories import MemorySink, Training

HEADER = Training(MemorySink()).header()
NAME = str(HEADER.name)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float64)

SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = ((0, (0,)), (1, ()), (6, (2, 3)), (5, (1, 5, 1)))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@st.composite
def entries(draw: st.DrawFn) -> tuple[list[Rows], list[Dense]]:
    names = st.text("abc.ä", max_size=9)
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        num_rows, width, dtype = draw(st.integers(0, 7)), draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES))
        values = torch.arange(num_rows * width).reshape(num_rows, width).to(dtype)
        numbers = torch.arange(num_rows) * 5
        rows.append(Rows(draw(names), draw(names), (100, 9), draw(st.integers(0, 4)), numbers, values))
    dense = [
        Dense(draw(names), torch.arange(size).to(draw(st.sampled_from(DTYPES))).reshape(shape))
        for size, shape in draw(st.lists(st.sampled_from(SHAPES), max_size=2))
    ]
    return rows, dense


@given(entries())
def test_a_chunk_is_what_arrow_would_have_written(given_entries: tuple[list[Rows], list[Dense]]) -> None:
    """Of the tensors given, by Arrow's own writer, read by Arrow's own reader."""
    rows, dense = given_entries
    found = encode(HEADER, rows, dense)
    reader = pa.ipc.open_stream(found)
    columns = [
        ("rows", one.table, one.field, one.values, one.shape, one.first_column, one.values.shape[1], one.rows)
        for one in rows
    ] + [("dense", one.name, "weight", one.value, one.value.shape, 0, 0, torch.empty(0)) for one in dense]
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, reader.schema) as writer:
        for kind, name, field, values, shape, first, width, numbers in columns:
            row = (kind, name, field, str(values.dtype)[6:], shape, first, width, bytes_of(numbers), bytes_of(values))
            arrays = [pa.array([value], column.type) for value, column in zip(row, reader.schema, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=reader.schema))
    expected = list(pa.ipc.open_stream(stream.getvalue()))
    batches = list(reader)
    for batch in batches:
        batch.validate(full=True)
    assert batches == expected
    assert found[-14:] == b"CRC32:%08x" % zlib.crc32(found[:-14])
    assert len(found) == len(stream.getvalue()) + 14


def test_values_are_not_copied() -> None:
    values = torch.zeros(400, 3)
    pieces = encode_pieces(HEADER, [Rows("table", "weight", (100, 3), 0, torch.arange(400), values)])
    before = b"".join(pieces)
    values[1, 1] = 7
    after = b"".join(pieces)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 2


class Upper(FolderSink):
    def write(self, name: str, part: bytes) -> None:
        super().write(name, part.upper())


class UpperPieces(Upper):
    def write_pieces(self, name: str, pieces: Iterable[Any]) -> None:
        super().write_pieces(name, [bytes(piece).upper() for piece in pieces])


@pytest.mark.parametrize(
    ("kind", "expected"), [(FolderSink, b"two pieces"), (Upper, b"TWO PIECES"), (UpperPieces, b"TWO PIECES")]
)
def test_a_write_of_ones_own_is_called(tmp_path: Path, kind: Callable[[Path], FolderSink], expected: bytes) -> None:
    writer = CutWriter(kind(tmp_path))
    writer.write_now(2, [(NAME, [b"two ", memoryview(b"pieces")])])
    writer.close(1)
    assert (tmp_path / NAME).read_bytes() == expected
    assert writer.num_bytes == len(expected)


def test_isal_makes_the_checksums_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def crc32(data: Any, value: int = 0) -> int:
        sizes.append(len(data))
        return zlib.crc32(data, value)

    stand_in = ModuleType("isal.isal_zlib")
    monkeypatch.setattr(stand_in, "crc32", crc32, raising=False)
    monkeypatch.setitem(sys.modules, "isal", ModuleType("isal"))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.delitem(sys.modules, form.__name__)
    with monkeypatch.context() as patched:
        patched.setattr(parts, "form", form)  # which the import sets
        anew = importlib.import_module(form.__name__)
    rows = [Rows("table", "weight", (100, 3), 0, torch.arange(4), torch.rand(4, 3))]
    assert anew.encode(HEADER, rows) == encode(HEADER, rows)
    assert sum(sizes) == len(encode(HEADER, rows)) - 14
