"""Files of rows: an Arrow IPC stream, with a batch for each entry, and a checksum (docs/deltas_format.md).

Deltas and incremental checkpoints have such files. Needs pyarrow; isal's checksums are faster than zlib's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..storage import Piece
from .rows import WEIGHT, Dense, Rows

try:
    from isal.isal_zlib import crc32  # as zlib's, but faster
except ImportError:
    from zlib import crc32

TRAILER_SIZE = len(b"CRC32:00000000")  # bytes of the checksum at the end of a file
SMALL = 4096  # adjacent pieces below this size in bytes are joined

_TRAILER = re.compile(rb"CRC32:([0-9a-f]{8})")


class FileError(ValueError):
    """A file cannot be decoded: it is damaged, of another schema, or no file of rows."""


def arrow() -> ModuleType:
    """Return what writes and reads the streams; an ImportError without pyarrow, which is imported here alone."""
    try:
        from . import arrow_stream
    except ImportError as err:
        raise ImportError(
            f"embedding deltas and incremental checkpoints need pyarrow, which cannot be imported ({err}): "
            "pip install pyarrow"
        ) from err
    return arrow_stream


def encode_rows(metadata: Mapping[bytes, bytes], rows: Iterable[Rows], dense: Iterable[Dense] = ()) -> list[Piece]:
    """Return the bytes of a file in pieces; row numbers and values are views of the tensors."""
    entries = [
        _entry(one.rows, one.values, "rows", one.table, one.field, one.shape, one.first_column, one.values.shape[1])
        for one in rows
    ]
    none = torch.empty(0)
    entries += [_entry(none, one.value, "dense", one.name, WEIGHT, one.value.shape, 0, 0) for one in dense]
    pieces: list[Piece] = []
    for is_small, run in groupby(arrow().write_stream(metadata, entries), lambda piece: len(piece) < SMALL):
        adjacent = list(run)
        pieces += [b"".join(adjacent)] if is_small else adjacent
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return [*pieces, b"CRC32:%08x" % checksum]


def decode_rows(data: bytes | memoryview, name: str) -> tuple[dict[bytes, bytes], Iterator[Rows | Dense]]:
    """Return the metadata of a file, and its entries, each read when it is asked for.

    Raises a FileError, also while entries are read, for a file that is damaged or no file of rows. Holds at most a copy
    of an entry, whatever the bytes are.
    """
    trailer = _TRAILER.fullmatch(data[-TRAILER_SIZE:])
    content = memoryview(data)[:-TRAILER_SIZE]
    if trailer is None or crc32(content) != int(trailer[1], 16):
        raise FileError(
            f"{name} is damaged, or no file of embedding deltas: its checksum is {'wrong' if trailer else 'missing'}."
        )

    def entries() -> Iterator[Rows | Dense]:
        with as_file_error(name):
            for described, rows, values in found:
                yield _read(described, rows, values)

    with as_file_error(name):
        metadata, found = arrow().read_stream(content)
        return metadata, entries()


@contextmanager
def as_file_error(name: str) -> Iterator[None]:
    """Raise a FileError for any other error: a right checksum does not say who wrote the file."""
    try:
        yield
    except FileError:
        raise
    except Exception as err:
        raise FileError(f"{name} is not a file of embedding deltas: {type(err).__name__}: {err}") from err


def integers(values: Any, count: int) -> tuple[int, ...]:
    """Return numbers from 0 on, of which there have to be `count`, as a tuple; else raise a ValueError."""
    numbers = tuple(values)
    if len(numbers) != count or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"it has {values!r} where {count} integers from 0 on have to be")
    return numbers


def are_distinct(rows: Tensor) -> bool:
    """Return whether no row number, `(N,)` int64, is there twice."""
    return bool((rows[1:] > rows[:-1]).all()) or len(torch.unique(rows)) == len(rows)


def _read(entry: Mapping[str, Any], rows_of_file: Any, values_of_file: Any) -> Rows | Dense:
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"an entry has the dtype {entry['dtype']!r}, which this torch lacks")
    values = _tensor(values_of_file, dtype)
    shape = integers(entry["shape"], len(entry["shape"]))
    if entry["kind"] == "dense":
        return Dense(entry["name"], values.reshape(shape))
    first_column, num_columns = integers([entry["first_column"], entry["num_columns"]], 2)
    num_rows, num_all_columns = integers(shape, 2)
    rows = _tensor(rows_of_file, torch.int64)
    if not are_distinct(rows):
        raise ValueError(f"{entry['name']} has a row twice")
    values = values.reshape(len(rows), num_columns)
    return Rows(entry["name"], entry["field"], (num_rows, num_all_columns), first_column, rows, values)


def _entry(rows: Tensor, values: Tensor, kind: str, name: str, field: str, shape: Any, *columns: int) -> Any:
    description = (kind, name, field, str(values.dtype).removeprefix("torch."), tuple(shape), *columns)
    return description, _bytes(rows), _bytes(values)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor(buffer: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=dtype) if buffer.size else torch.empty(0, dtype=dtype)
