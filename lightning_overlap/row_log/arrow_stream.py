"""Arrow IPC streams of entries, each a batch of one row; they are read from bytes that may be anything.

Arrow's own reader of streams trusts lengths and offsets, so that wrong ones end the process, and it unpacks compressed
buffers of any size. Here memory is only viewed, each message is looked at first, and each batch is validated before any
of it is used.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("kind", "name", "field", "dtype")),
        ("shape", pa.list_(pa.int64())),
        *((name, pa.int64()) for name in ("first_column", "num_columns")),
        *((name, pa.large_binary()) for name in ("rows", "values")),
    ]
)
_DESCRIPTION = [name for name in COLUMNS.names if name not in ("rows", "values")]
_HEADER, _COMPRESSION = 2, 3  # numbers of fields in Arrow's tables Message and RecordBatch (Message.fbs)


def write_stream(
    metadata: Mapping[bytes, bytes], entries: Iterable[tuple[tuple[Any, ...], Any, Any]]
) -> list[memoryview]:
    """Return the pieces of a stream of (description, row numbers, values), the latter as arrays of bytes.

    A description has the columns of `COLUMNS` before `rows`. Pieces are views of the arrays, where they are large.
    """
    written = _Written()
    with pa.ipc.new_stream(written, COLUMNS.with_metadata(dict(metadata))) as writer:
        for description, rows, values in entries:
            columns = [*_described(*description), _binary(rows), _binary(values)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=COLUMNS))
    return written


class _Written(list[memoryview]):
    """A file for Arrow's writer that keeps the buffers of a batch without copying."""

    closed = False

    def write(self, data: Any) -> None:
        self.append(memoryview(data))


@lru_cache(maxsize=1024)  # equal in every cut, and slow to make
def _described(*description: Any) -> list[pa.Array]:
    return [pa.array([value], column.type) for value, column in zip(description, COLUMNS, strict=False)]


def _binary(content: Any) -> pa.Array:
    """Return a large_binary column of one row, a view of an array's memory."""
    buffers = [None, pa.py_buffer(np.array([0, content.nbytes])), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), 1, buffers)


def read_stream(content: Any) -> tuple[dict[bytes, bytes], Iterator[tuple[dict[str, Any], Any, Any]]]:
    """Return the metadata of a stream's schema, and its (description, row numbers, values), the latter as buffers.

    Raises a ValueError, or an error of Arrow (not all are ValueErrors), for a stream that is not of `COLUMNS`, or that
    is compressed; also while entries are read.
    """
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(content))
    first = messages.read_next_message()
    if first.type != "schema":
        raise ValueError(f"it begins with a message of type {first.type!r}, not with a schema")
    found = pa.ipc.read_schema(first)
    if not found.equals(COLUMNS):
        raise ValueError("its columns are others")

    def entries() -> Iterator[tuple[dict[str, Any], Any, Any]]:
        while True:
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            batch = _batch(message)
            description = batch.select(_DESCRIPTION).to_pylist()[0]
            yield description, *(batch.column(name)[0].as_buffer() for name in ("rows", "values"))

    return dict(found.metadata or {}), entries()


def _batch(message: pa.ipc.Message) -> pa.RecordBatch:
    if message.type != "record batch":
        raise ValueError(f"it has a message of type {message.type!r}")
    if _is_compressed(memoryview(message.metadata)):
        raise ValueError("it has a compressed batch")
    batch = pa.ipc.read_record_batch(message, COLUMNS)
    if batch.num_rows != 1:
        raise ValueError(f"it has a batch of {batch.num_rows} rows")
    batch.validate(full=True)
    if any(column.null_count for column in batch.columns):
        raise ValueError("it has a batch with a null")
    return batch


def _is_compressed(metadata: memoryview) -> bool:
    """Return whether the description of a record batch, a flatbuffer that Arrow has verified, names a compression."""
    message = int.from_bytes(metadata[:4], "little")
    header = _field(metadata, message, _HEADER)
    batch = header + int.from_bytes(metadata[header : header + 4], "little")
    return _field(metadata, batch, _COMPRESSION) != 0


def _field(data: memoryview, table: int, number: int) -> int:
    """Return where a table of a flatbuffer has a field; 0 if it has none."""
    places = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[places : places + 2], "little")
    at = 4 + 2 * number  # after the sizes of these places and of the table
    offset = int.from_bytes(data[places + at : places + at + 2], "little") if at < size else 0
    return table + offset if offset else 0
