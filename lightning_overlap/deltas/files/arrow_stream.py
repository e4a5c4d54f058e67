"""Read an Arrow IPC stream whose bytes may be anything: in views of its memory, and no further.

Arrow's own reader of streams trusts lengths and offsets, so that wrong ones end the process, and it unpacks compressed
buffers of any size. Here each message is looked at first, and each batch is validated before any of it is used.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

_HEADER, _COMPRESSION = 2, 3  # numbers of fields in Arrow's tables Message and RecordBatch (Message.fbs)


def read_stream(content: Any, schema: pa.Schema) -> tuple[dict[bytes, bytes], Iterator[pa.RecordBatch]]:
    """Return the metadata of a stream's schema, and its batches, which have one row and no null.

    Raises a ValueError, or an error of Arrow (not all are ValueErrors), for a stream that is not of this schema, or
    that is compressed; also while the batches are read.
    """
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(content))
    first = messages.read_next_message()
    if first.type != "schema":
        raise ValueError(f"it begins with a message of type {first.type!r}, not with a schema")
    found = pa.ipc.read_schema(first)
    if not found.equals(schema):
        raise ValueError("its columns are others")

    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            yield _batch(message, schema)

    return dict(found.metadata or {}), batches()


def _batch(message: pa.ipc.Message, schema: pa.Schema) -> pa.RecordBatch:
    if message.type != "record batch":
        raise ValueError(f"it has a message of type {message.type!r}")
    if _is_compressed(memoryview(message.metadata)):
        raise ValueError("it has a compressed batch")
    batch = pa.ipc.read_record_batch(message, schema)
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
