"""The parts that carry updated rows to a served model: their names, their header, and their Arrow IPC form (schema 1).

At a *cut* every rank copies the rows that were updated since the cut before, and writes them as its *part*, in one
*chunk* or several. A cut is *whole* once every chunk of every rank's part is there; a replica applies whole cuts only,
in the order of (generation, step). A *base* is a part with all rows of its rank. A *generation* is what one fit writes:
a fit that resumes from a checkpoint begins the next one, and its first cut has all rows that earlier generations wrote
past that checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

try:
    from isal.isal_zlib import crc32  # zlib's, at the speed of memory
except ImportError:
    from zlib import crc32

from .arrow_stream import Piece, binary, joined, stream

SCHEMA = 1
"""Version of what is written; a reader refuses any other."""

WEIGHT = "weight"
"""The field of a table's own values; other fields are of its optimizer's state (`momentum1`, ...)."""

TRAILER_SIZE = len(b"CRC32:00000000")
"""Bytes at the end of a chunk: the checksum of all that is before them."""

_HEADER = b"embedding_deltas.part"
_TRAILER = re.compile(rb"CRC32:([0-9a-f]{8})")
_NAME = re.compile(r"g(\d{6,})-s(\d{12})-r(\d{5})of(\d{5})-c(\d{5})of(\d{5})\.arrow")
_COLUMNS = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("field", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("first_column", pa.int64()),
        ("num_columns", pa.int64()),
        ("rows", pa.large_binary()),
        ("values", pa.large_binary()),
    ]
)


class PartError(ValueError):
    """A part cannot be read: it is torn, of another schema, or no part at all."""


class PartName(NamedTuple):
    """What the name of a chunk says: names sort by generation, step, rank and chunk."""

    generation: int
    step: int
    rank: int
    world_size: int
    chunk: int
    num_chunks: int

    def __str__(self) -> str:
        return (
            f"g{self.generation:06d}-s{self.step:012d}-r{self.rank:05d}of{self.world_size:05d}"
            f"-c{self.chunk:05d}of{self.num_chunks:05d}.arrow"
        )

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Read a name; None where it is not one of a chunk."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))

    @property
    def cut(self) -> tuple[int, int]:
        """The cut that it belongs to: generation and step."""
        return self.generation, self.step


def parse_names(names: Iterable[str]) -> list[PartName]:
    """Return the names that are those of chunks, sorted."""
    return sorted(filter(None, map(PartName.parse, names)))


@dataclass(frozen=True, kw_only=True)
class Header:
    """What every chunk says of itself.

    Args:
        run: Identifies the training whose tables these are, over all of its resumes.
        generation: Number of the fit that wrote it, from 1 on.
        step: Batches that had been trained at the cut, over the whole training.
        after: The cut (generation, step) that this one follows. Within a generation a replica must have applied that
            very cut. The first cut of a generation names the newest one that was known to be whole when the
            checkpoint was saved: a replica must have applied that one or a later one. None in a base, which needs
            nothing before it.
        rank: The rank that wrote it.
        world_size: How many ranks write a part of this cut.
        chunk: Its number in the part, from 0 on.
        num_chunks: Chunks of the part.
        num_pending: Batches among the `step` trained ones whose update of the tables was still to come at the cut
            (modes that defer updates; else 0).
        global_step: Steps of the optimizers at the cut, as `Trainer.global_step`.
        time: When the cut was made, in seconds since the Unix epoch.
        tables: Name -> (rows, columns) of every table that the run sends, whether or not this chunk has rows of it.
        is_void: Whether the cut must not be applied: somebody wrote tables while a rank copied its rows. A cut that is
            a base of every rank follows it.
        fit: Identifies the fit that wrote it: if two fits have written the same generation, their cuts do not follow
            each other. Empty if that is not known.
        found: The newest cut of which its fit found a part in the sink. A replica that has applied a later one of an
            earlier generation has rows that this fit did not know of. None: that is not known.
        schema: Version of this format.
    """

    run: str
    generation: int
    step: int
    after: tuple[int, int] | None
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
    found: tuple[int, int] | None = None
    schema: int = SCHEMA

    @property
    def is_base(self) -> bool:
        """Whether the part holds every row that its rank has."""
        return self.after is None

    @property
    def name(self) -> PartName:
        """The chunk's name in a sink."""
        return PartName(self.generation, self.step, self.rank, self.world_size, self.chunk, self.num_chunks)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table, or of one field of its optimizer's state.

    Args:
        table: The name of the table's weight in the unsharded LightningModule's `state_dict`.
        field: `WEIGHT`, or a state's name.
        shape: Of the whole table: rows and columns; of row-wise state: rows and 1.
        first_column: Where the columns of this shard begin.
        rows: Row numbers in the whole table, `(N,)`, int64, on the host, each once.
        values: `(N, num_columns)`, any dtype, on the host: as they stand in the trainer's table, bit for bit.
    """

    table: str
    field: str
    shape: tuple[int, int]
    first_column: int
    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A whole tensor of the dense part.

    Args:
        name: Its name in the LightningModule's `state_dict`.
        value: Any shape and dtype, on the host.
    """

    name: str
    value: Tensor


class Part(NamedTuple):
    """The content of one chunk, as `decode` returns it."""

    header: Header
    rows: list[Rows]
    dense: list[Dense]


def encode(header: Header, rows: Iterable[Rows] = (), dense: Iterable[Dense] = ()) -> bytes:
    """Return a chunk in its Arrow IPC form: an IPC stream with one record batch for each table's rows or tensor.

    After the end of the stream, where Arrow's readers stop, comes a checksum of all that is before it.

    Args:
        header: Goes into the schema's metadata, as JSON.
        rows: Rows `(N,)` and values `(N, D)`, on the host.
        dense: Whole tensors, on the host.

    Returns:
        The bytes; `decode` reads them. Rows are int64 and values raw, both little-endian as in memory.
    """
    return joined(encode_pieces(header, rows, dense))


def encode_pieces(header: Header, rows: Iterable[Rows] = (), dense: Iterable[Dense] = ()) -> list[Piece]:
    """Return the bytes of `encode` in pieces; those of rows and values are views of the given tensors, not copies."""
    schema = _COLUMNS.with_metadata({_HEADER: json.dumps(vars(header)).encode()})
    entries = [
        _entry(one.rows, one.values, "rows", one.table, one.field, one.shape, one.first_column, one.values.shape[1])
        for one in rows
    ]
    entries += [_entry(torch.empty(0), one.value, "dense", one.name, WEIGHT, one.value.shape, 0, 0) for one in dense]
    pieces = stream(schema, entries)
    checksum = 0
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return [*pieces, b"CRC32:%08x" % checksum]


def decode(data: bytes, name: str = "part") -> Part:
    """Read a chunk whole.

    Args:
        data: What `encode` returned.
        name: What errors call it.

    Raises:
        PartError: It is torn (too short, or its checksum is wrong), of another schema, or no part.
    """
    header, batches = _read(data, name, rows=True)
    found = Part(header, [], [])
    for batch in batches:
        entry = batch.to_pylist()[0] if batch.num_rows else {}
        dtype = getattr(torch, str(entry.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise PartError(f"{name}: an entry has the dtype {entry.get('dtype')!r}, which this torch does not have.")
        values = _tensor(batch.column("values")[0].as_buffer(), dtype)
        if entry["kind"] == "dense":
            found.dense.append(Dense(entry["name"], values.reshape(entry["shape"])))
            continue
        numbers = _tensor(batch.column("rows")[0].as_buffer(), torch.int64)
        shape, values = tuple(entry["shape"]), values.reshape(len(numbers), entry["num_columns"])
        found.rows.append(Rows(entry["name"], entry["field"], shape, entry["first_column"], numbers, values))
    return found


def read_header(data: bytes, name: str = "part") -> Header:
    """Return the header of a chunk; arguments and errors are those of `decode`."""
    return _read(data, name, rows=False)[0]


def _read(data: bytes, name: str, *, rows: bool) -> tuple[Header, list[Any]]:
    # Arrow does not check what it reads, and a wrong length in it ends the process: the checksum is checked first.
    trailer = _TRAILER.fullmatch(data[-TRAILER_SIZE:])
    content = memoryview(data)[:-TRAILER_SIZE]
    if trailer is None or crc32(content) != int(trailer[1], 16):
        raise PartError(
            f"{name} is torn, or no part of embedding deltas: its checksum is {'wrong' if trailer else 'missing'}."
        )
    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
            written = json.loads((reader.schema.metadata or {})[_HEADER])
            if written.get("schema") == SCHEMA:
                return _header(written), list(reader) if rows else []
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as err:
        raise PartError(f"{name} is no part of embedding deltas: {type(err).__name__}: {err}") from err
    raise PartError(
        f"{name} is of schema {written.get('schema')!r}, this version reads schema {SCHEMA}: read it with the version "
        "of lightning_overlap that wrote it."
    )


def _header(written: dict[str, Any]) -> Header:
    kept = {key: value for key, value in written.items() if key in Header.__dataclass_fields__}
    for cut in ("after", "found"):
        kept[cut] = None if kept.get(cut) is None else tuple(kept[cut])
    kept["tables"] = {table: (int(shape[0]), int(shape[1])) for table, shape in kept["tables"].items()}
    return Header(**kept)


def _entry(rows: Tensor, values: Tensor, kind: str, name: str, field: str, shape: Any, *columns: int) -> pa.RecordBatch:
    described = _described(kind, name, field, str(values.dtype).removeprefix("torch."), tuple(shape), *columns)
    return pa.RecordBatch.from_arrays([*described, binary(_bytes(rows)), binary(_bytes(values))], schema=_COLUMNS)


@lru_cache(maxsize=1024)  # alike in every cut; Arrow takes longer to make them than small values take to be written
def _described(*description: Any) -> list[pa.Array]:
    return [pa.array([value], column.type) for value, column in zip(description, _COLUMNS, strict=False)]


def _bytes(tensor: Tensor) -> memoryview:
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _tensor(buffer: Any, dtype: torch.dtype) -> Tensor:
    if not buffer.size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(buffer), dtype=dtype)
