"""The format of files (docs/deltas_format.md): each has some of a rank's rows of a cut. A base has all rows."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

try:
    import pyarrow as pa
except ImportError as err:
    raise ImportError(
        f"embedding deltas need pyarrow, which cannot be imported ({err}): pip install 'lightning_overlap[deltas]'"
    ) from err

from ...storage import Piece, joined
from .arrow_stream import read_stream

try:
    from isal.isal_zlib import crc32  # as zlib's, but faster
except ImportError:
    from zlib import crc32

PLAIN, SCHEMA = 1, 2  # versions of the format: of runs without and with raw ids; a reader rejects others
WEIGHT = "weight"  # the field of a table's weights; other fields are kinds of optimizer state (`momentum1`, ...)
RAW_ID = "raw_id"  # the field that has the raw id of each row under managed collisions, or `NO_ID`
EVICTED_ID = "evicted_id"  # the field of raw ids that were known at the cut before, by the row that they had then
NO_ID = torch.iinfo(torch.int64).max  # of a row that stands for no id
TRAILER_SIZE = len(b"CRC32:00000000")  # bytes of the checksum at the end of a file
SMALL = 4096  # adjacent pieces below this size in bytes are joined

Columns: TypeAlias = tuple[str, str, int, int]  # table, kind of state, first column and number of columns of a shard

_HEADER = b"embedding_deltas.part"
_TRAILER = re.compile(rb"CRC32:([0-9a-f]{8})")
_NAME = re.compile(r"g(\d{6,})-s(\d{12})-r(\d{5})of(\d{5})-c(\d{5})of(\d{5})\.arrow")
_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("kind", "name", "field", "dtype")),
        ("shape", pa.list_(pa.int64())),
        *((name, pa.int64()) for name in ("first_column", "num_columns")),
        *((name, pa.large_binary()) for name in ("rows", "values")),
    ]
)
_DESCRIPTION = [name for name in _COLUMNS.names if name not in ("rows", "values")]


class FileError(ValueError):
    """A file cannot be decoded: it is damaged, of another schema, or no file of a cut."""


class FileName(NamedTuple):
    """The fields of a file's name; names sort by generation, step, rank and chunk."""

    generation: int
    step: int
    rank: int
    world_size: int
    chunk: int  # number of the file among those of its rank
    num_chunks: int  # files of its rank

    def __str__(self) -> str:
        return (
            f"g{self.generation:06d}-s{self.step:012d}-r{self.rank:05d}of{self.world_size:05d}"
            f"-c{self.chunk:05d}of{self.num_chunks:05d}.arrow"
        )

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the fields of a name; None if it is not the name of a file of a cut."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))

    @property
    def cut(self) -> tuple[int, int]:
        """Generation and step."""
        return self.generation, self.step


def parse_names(names: Iterable[str]) -> list[FileName]:
    """Return the sorted names of files of cuts; skip other names."""
    return sorted(filter(None, map(FileName.parse, names)))


@dataclass(frozen=True, kw_only=True)
class RawIds:
    """How the ids of a table under managed collisions get their rows; names are those in the unsharded `state_dict`."""

    module: str  # name of the managed collision module
    sorted_ids: str  # name of its buffer with all ids, `(rows,)`, int64, ascending, `NO_ID` at the end
    rows_of_ids: str  # name of its buffer with their rows, `(rows,)`, int64
    segments: tuple[int, ...]  # the first row of each rank's shard, and the number of rows
    hash_size: int  # ids below it are divided among the shards in ranges, others by their remainder
    is_hashed: bool  # whether the module maps ids by a function of the user's first


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a file; docs/deltas_format.md describes its fields."""

    run: str
    generation: int
    step: int
    after: tuple[int, int] | None  # None in a base; at the start of a generation: known to be whole at the checkpoint
    rank: int
    world_size: int
    chunk: int
    num_chunks: int
    num_pending: int
    global_step: int
    time: float
    tables: dict[str, tuple[int, int]]
    is_void: bool = False
    fit: str = ""
    found: tuple[int, int] | None = None  # the fit does not know the rows of later cuts of earlier generations
    epoch: int = 0  # number of epochs that are over
    batch: int = 0  # number of batches of the next epoch that are trained
    row_wise: list[Columns] | None = None  # row-wise states of column shards; None: no states are sent
    raw_ids: dict[str, RawIds] | None = None  # by table; None if no table is under managed collisions
    schema: int = PLAIN

    @property
    def is_base(self) -> bool:
        """Whether the file belongs to a base, which has all rows of its rank."""
        return self.after is None

    @property
    def name(self) -> FileName:
        """The file's name in a sink."""
        return FileName(self.generation, self.step, self.rank, self.world_size, self.chunk, self.num_chunks)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table, of one kind of its optimizer state, or of its raw ids; tensors are on the host."""

    table: str  # name of the table's weight in the unsharded LightningModule's `state_dict`
    field: str  # `WEIGHT`, `RAW_ID`, `EVICTED_ID`, or a kind of optimizer state
    shape: tuple[int, int]  # of the unsharded table; (rows, 1) for row-wise state and raw ids
    first_column: int  # of this shard
    rows: Tensor  # distinct row numbers in the unsharded table, `(N,)`, int64
    values: Tensor  # `(N, num_columns)`, with the dtype and bits of the trainer's table


@dataclass(frozen=True, slots=True)
class Dense:
    """A tensor of the dense part, on the host; `name` is its name in the LightningModule's `state_dict`."""

    name: str
    value: Tensor


class CutFile(NamedTuple):
    """The content of one file of a cut."""

    header: Header
    rows: list[Rows]
    dense: list[Dense]


def encode(header: Header, rows: Iterable[Rows] = (), dense: Iterable[Dense] = ()) -> bytes:
    """Return the bytes of a file: an Arrow IPC stream and a checksum, as in docs/deltas_format.md."""
    return joined(encode_pieces(header, rows, dense))


def encode_pieces(header: Header, rows: Iterable[Rows] = (), dense: Iterable[Dense] = ()) -> list[Piece]:
    """Return the bytes of `encode` in pieces; row numbers and values are views of the tensors."""
    schema = _COLUMNS.with_metadata({_HEADER: json.dumps(vars(header), default=vars).encode()})
    entries = [
        _entry(one.rows, one.values, "rows", one.table, one.field, one.shape, one.first_column, one.values.shape[1])
        for one in rows
    ]
    entries += [_entry(torch.empty(0), one.value, "dense", one.name, WEIGHT, one.value.shape, 0, 0) for one in dense]
    written = _Written()
    with pa.ipc.new_stream(written, schema) as writer:
        for entry in entries:
            writer.write_batch(entry)
    pieces: list[Piece] = []
    for is_small, run in groupby(written, lambda piece: len(piece) < SMALL):
        adjacent = list(run)
        pieces += [b"".join(adjacent)] if is_small else adjacent
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return [*pieces, b"CRC32:%08x" % checksum]


class _Written(list[memoryview]):
    """A file for Arrow's writer that keeps the buffers of a batch without copying."""

    closed = False

    def write(self, data: Any) -> None:
        self.append(memoryview(data))


def decode(data: bytes, name: str = "file") -> CutFile:
    """Return the content of a file; a FileError names it if it is damaged, of another schema, or no file of a cut.

    Holds at most a copy of the file, whatever its bytes are.
    """
    header, batches = _read(data, name)
    found = CutFile(header, [], [])
    with _as_file_error(name):
        for batch in batches:
            _take(batch.select(_DESCRIPTION).to_pylist()[0], batch, found)
    return found


def read_header(data: bytes, name: str = "file") -> Header:
    """Return the header of a file; arguments and errors as for `decode`."""
    return _read(data, name)[0]


def _read(data: bytes, name: str) -> tuple[Header, Iterator[pa.RecordBatch]]:
    trailer = _TRAILER.fullmatch(data[-TRAILER_SIZE:])
    content = memoryview(data)[:-TRAILER_SIZE]
    if trailer is None or crc32(content) != int(trailer[1], 16):
        raise FileError(
            f"{name} is damaged, or no file of embedding deltas: its checksum is {'wrong' if trailer else 'missing'}."
        )
    with _as_file_error(name):
        metadata, batches = read_stream(content, _COLUMNS)
        written = json.loads(metadata[_HEADER])
        schema = written.get("schema")
        if schema in (PLAIN, SCHEMA):
            return _header(written), batches
    raise FileError(
        f"{name} is of schema {schema!r}, this version reads schemas {PLAIN} and {SCHEMA}: read it with the version "
        "of lightning_overlap that wrote it."
    )


@contextmanager
def _as_file_error(name: str) -> Iterator[None]:
    """Raise a FileError for any other error: a right checksum does not say who wrote the file."""
    try:
        yield
    except Exception as err:
        raise FileError(f"{name} is not a file of embedding deltas: {type(err).__name__}: {err}") from err


def _header(written: dict[str, Any]) -> Header:
    kept = {key: value for key, value in written.items() if key in Header.__dataclass_fields__}
    for cut in ("after", "found"):
        kept[cut] = None if kept.get(cut) is None else _integers(kept[cut], 2)
    kept["tables"] = {table: _integers(shape, 2) for table, shape in kept["tables"].items()}
    if kept.get("row_wise") is not None:
        if not isinstance(kept["row_wise"], list):
            raise TypeError(f"its row_wise is {kept['row_wise']!r}")
        kept["row_wise"] = [(str(table), str(kind), *_integers(at, 2)) for table, kind, *at in kept["row_wise"]]
    if (kept.get("raw_ids") is None) != (kept["schema"] == PLAIN):
        raise ValueError(f"its raw_ids do not belong to schema {kept['schema']}")
    if kept.get("raw_ids") is not None:
        kept["raw_ids"] = {table: _raw_ids(one, kept["tables"][table]) for table, one in kept["raw_ids"].items()}
    header = Header(**kept)
    for key, kind in (("run", str), ("fit", str), ("is_void", bool)):
        if not isinstance(getattr(header, key), kind):
            raise TypeError(f"its {key} is {getattr(header, key)!r}")
    if isinstance(header.time, bool) or not isinstance(header.time, int | float) or not math.isfinite(header.time):
        raise TypeError(f"its time is {header.time!r}")
    numbers = (
        "schema",
        "generation",
        "step",
        "rank",
        "world_size",
        "chunk",
        "num_chunks",
        "num_pending",
        "global_step",
        "epoch",
        "batch",
    )
    _integers([getattr(header, key) for key in numbers], len(numbers))
    return header


def _raw_ids(written: dict[str, Any], shape: tuple[int, ...]) -> RawIds:
    found = RawIds(**{**written, "segments": _integers(written["segments"], len(written["segments"]))})
    _integers([found.hash_size], 1)
    segments = found.segments
    if len(segments) < 2 or segments[0] != 0 or segments[-1] != shape[0] or sorted(set(segments)) != [*segments]:
        raise ValueError(f"it divides a table of {shape[0]} rows into {segments}")
    names = found.module, found.sorted_ids, found.rows_of_ids
    if not all(isinstance(name, str) for name in names) or not isinstance(found.is_hashed, bool):
        raise TypeError(f"its raw_ids are {found}")
    return found


def _integers(values: Any, count: int) -> tuple[int, ...]:
    """Return numbers from 0 on, of which there have to be `count`, as a tuple."""
    numbers = tuple(values)
    if len(numbers) != count or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"it has {values!r} where {count} integers from 0 on have to be")
    return numbers


def _take(entry: dict[str, Any], batch: pa.RecordBatch, found: CutFile) -> None:
    """Add the content of a batch to a file's."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"an entry has the dtype {entry['dtype']!r}, which this torch lacks")
    values = _tensor(batch.column("values")[0].as_buffer(), dtype)
    shape = _integers(entry["shape"], len(entry["shape"]))
    if entry["kind"] == "dense":
        found.dense.append(Dense(entry["name"], values.reshape(shape)))
        return
    first_column, num_columns = _integers([entry["first_column"], entry["num_columns"]], 2)
    num_rows, num_all_columns = _integers(shape, 2)
    rows = _tensor(batch.column("rows")[0].as_buffer(), torch.int64)
    if not are_distinct(rows):
        raise ValueError(f"{entry['name']} has a row twice")
    values = values.reshape(len(rows), num_columns)
    if entry["field"] in (RAW_ID, EVICTED_ID):
        described = found.header.raw_ids is not None and entry["name"] in found.header.raw_ids
        if not described or dtype != torch.int64 or num_columns != 1 or num_all_columns != 1:
            raise ValueError(f"{entry['name']} has no such {entry['field']}")
    found.rows.append(Rows(entry["name"], entry["field"], (num_rows, num_all_columns), first_column, rows, values))


def are_distinct(rows: Tensor) -> bool:
    """Return whether no row number, `(N,)` int64, is there twice."""
    return bool((rows[1:] > rows[:-1]).all()) or len(torch.unique(rows)) == len(rows)


def _entry(rows: Tensor, values: Tensor, kind: str, name: str, field: str, shape: Any, *columns: int) -> pa.RecordBatch:
    described = _described(kind, name, field, str(values.dtype).removeprefix("torch."), tuple(shape), *columns)
    return pa.RecordBatch.from_arrays([*described, _binary(rows), _binary(values)], schema=_COLUMNS)


@lru_cache(maxsize=1024)  # equal in every cut, and slow to make
def _described(*description: Any) -> list[pa.Array]:
    return [pa.array([value], column.type) for value, column in zip(description, _COLUMNS, strict=False)]


def _binary(tensor: Tensor) -> pa.Array:
    """Return a large_binary column of one row, a view of the tensor's memory."""
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    buffers = [None, pa.py_buffer(np.array([0, content.nbytes])), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), 1, buffers)


def _tensor(buffer: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(buffer), dtype=dtype) if buffer.size else torch.empty(0, dtype=dtype)
