"""Make Arrow IPC streams without copying large values: a stream is a list of pieces, views of the values among them.

Arrow copies every value into the stream that it makes. Here it makes the message of a record batch whose last two
columns are empty; the sizes of these are set in a copy of that message, and their bytes follow it. Arrow 1.0 and later
read the result. Source: Arrow's columnar format 1.5, "Encapsulated message format", and Message.fbs.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Piece: TypeAlias = bytes | memoryview
"""Some bytes of a part; a view's memory is reused once the part is written."""

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end-of-stream marker."""

_PREFIX = struct.Struct("<Ii")  # continuation and size of the metadata, before each message
_OFFSETS = struct.Struct("<qq")  # of a large_binary column of one row
_BODY_LENGTH, _HEADER, _BUFFERS = 3, 2, 2  # numbers of fields: of Message, of Message, of RecordBatch
_ALIGNED_TO = 8


class BatchForm:
    """A template for record batches of one row that differ in their last two columns only.

    Args:
        batch: Such a batch, whose last two columns are large_binary and empty.
    """

    def __init__(self, batch: Any) -> None:
        message = batch.serialize().to_pybytes()
        _, size = _PREFIX.unpack_from(message)
        table = _followed(message, _PREFIX.size)
        self._body_length = _field(message, table, _BODY_LENGTH)
        header = _followed(message, _field(message, table, _HEADER))
        buffers = _followed(message, _field(message, header, _BUFFERS))
        # The buffers of the last two columns (validity, offsets, bytes of each) come after all others.
        self._last = buffers + 4 + _OFFSETS.size * (_number(message, buffers) - 6)
        self._first, _ = _OFFSETS.unpack_from(message, self._last + _OFFSETS.size)
        end = _PREFIX.size + size
        self._metadata, self._body = message[:end], message[end : end + self._first]

    def pieces(self, one: memoryview, other: memoryview) -> list[Piece]:
        """Return a batch as pieces, with the bytes of its last two columns: `one`, then `other`."""
        message = bytearray(self._metadata)
        at, place = self._first, self._last
        for column in (one, other):
            after_offsets = at + _OFFSETS.size
            struct.pack_into("<qqqqqq", message, place, at, 0, at, _OFFSETS.size, after_offsets, column.nbytes)
            at, place = after_offsets + _aligned(column.nbytes), place + 3 * _OFFSETS.size
        struct.pack_into("<q", message, self._body_length, at)
        message += self._body + _OFFSETS.pack(0, one.nbytes)
        between = bytes(_aligned(one.nbytes) - one.nbytes) + _OFFSETS.pack(0, other.nbytes)
        return [bytes(message), one, between, other, bytes(_aligned(other.nbytes) - other.nbytes)]


def joined(pieces: Sequence[Piece]) -> bytes:
    """Return the bytes of pieces, copied without the interpreter's lock, which the thread that trains needs."""
    if len(pieces) == 1 and isinstance(pieces[0], bytes):
        return pieces[0]
    whole = io.BytesIO(bytes(sum(map(len, pieces))))
    with whole.getbuffer() as memory:
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=np.frombuffer(memory, np.uint8))
    return whole.getvalue()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_TO) * _ALIGNED_TO


def _number(data: bytes, at: int, form: str = "<I") -> int:
    found: int = struct.unpack_from(form, data, at)[0]
    return found


def _followed(data: bytes, at: int) -> int:
    return at + _number(data, at)


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a flatbuffers table stands."""
    vtable = table - _number(data, table, "<i")
    return table + _number(data, vtable + 4 + 2 * number, "<H")
