"""Make Arrow IPC streams without copying large values: a stream is a list of pieces, some are views of values."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

try:
    import pyarrow as pa
except ImportError as err:
    raise ImportError(
        f"embedding deltas need pyarrow, which cannot be imported ({err}): pip install 'lightning_overlap[deltas]'"
    ) from err

Piece: TypeAlias = bytes | memoryview
"""Bytes of a part; a view's memory is reused after the part is written."""

SMALL = 4096
"""Adjacent pieces below this size in bytes are joined."""


class _Written(list[memoryview]):
    """A file for Arrow's writer that keeps the buffers of a batch without copying."""

    closed = False

    def write(self, data: Any) -> None:
        self.append(memoryview(data))


def stream(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> list[Piece]:
    """Return an IPC stream of record batches, without copies of large buffers."""
    written = _Written()
    with pa.ipc.new_stream(written, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    pieces: list[Piece] = []
    for is_small, run in groupby(written, lambda piece: len(piece) < SMALL):
        found = list(run)
        pieces += [b"".join(found)] if is_small else found
    return pieces


def binary(content: memoryview) -> pa.Array:
    """Return a large_binary column of one row, a view of the given memory."""
    offsets = np.array([0, content.nbytes])
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def joined(pieces: Sequence[Piece]) -> bytes:
    """Return the bytes of pieces, copied without the GIL, which the training thread needs."""
    if len(pieces) == 1 and isinstance(pieces[0], bytes):
        return pieces[0]
    whole = io.BytesIO(bytes(sum(map(len, pieces))))
    with whole.getbuffer() as memory:
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=np.frombuffer(memory, np.uint8))
    return whole.getvalue()
