"""The format of files (docs/deltas_format.md): each has some of a rank's rows of a cut. A base has all rows."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from ...row_log import (
    Dense,
    FileError,
    Rows,
    arrow,
    as_file_error,
    decode_rows,
    encode_rows,
    integers,
)
from ...storage import Piece, joined

arrow()  # so that a missing pyarrow is told when deltas are imported

PLAIN, SCHEMA = 1, 2  # versions of the format: of runs without and with raw ids; a reader rejects others
RAW_ID = "raw_id"  # the field that has the raw id of each row under managed collisions, or `NO_ID`
EVICTED_ID = "evicted_id"  # the field of raw ids that were known at the cut before, by the row that they had then
NO_ID = torch.iinfo(torch.int64).max  # of a row that stands for no id

Columns: TypeAlias = tuple[str, str, int, int]  # table, kind of state, first column and number of columns of a shard

_HEADER = b"embedding_deltas.part"
_NAME = re.compile(r"g(\d{6,})-s(\d{12})-r(\d{5})of(\d{5})-c(\d{5})of(\d{5})\.arrow")


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
    return encode_rows({_HEADER: json.dumps(vars(header), default=vars).encode()}, rows, dense)


def decode(data: bytes, name: str = "file") -> CutFile:
    """Return the content of a file; a FileError names it if it is damaged, of another schema, or no file of a cut.

    Holds at most a copy of the file, whatever its bytes are.
    """
    metadata, entries = decode_rows(data, name)
    found = CutFile(_header_of(metadata, name), [], [])
    for entry in entries:
        if isinstance(entry, Dense):
            found.dense.append(entry)
        else:
            with as_file_error(name):
                _check_ids(entry, found.header)
            found.rows.append(entry)
    return found


def read_header(data: bytes, name: str = "file") -> Header:
    """Return the header of a file; arguments and errors as for `decode`."""
    return _header_of(decode_rows(data, name)[0], name)


def _header_of(metadata: dict[bytes, bytes], name: str) -> Header:
    with as_file_error(name):
        written = json.loads(metadata[_HEADER])
        schema = written.get("schema")
        if schema in (PLAIN, SCHEMA):
            return _header(written)
    raise FileError(
        f"{name} is of schema {schema!r}, this version reads schemas {PLAIN} and {SCHEMA}: read it with the version "
        "of lightning_overlap that wrote it."
    )


def _check_ids(entry: Rows, header: Header) -> None:
    """Raise a ValueError for raw ids of a table without managed collisions, or that are not one for each row."""
    if entry.field in (RAW_ID, EVICTED_ID):
        described = header.raw_ids is not None and entry.table in header.raw_ids
        if not described or entry.values.dtype != torch.int64 or entry.values.shape[1] != 1 or entry.shape[1] != 1:
            raise ValueError(f"{entry.table} has no such {entry.field}")


def _header(written: dict[str, Any]) -> Header:
    kept = {key: value for key, value in written.items() if key in Header.__dataclass_fields__}
    for cut in ("after", "found"):
        kept[cut] = None if kept.get(cut) is None else integers(kept[cut], 2)
    kept["tables"] = {table: integers(shape, 2) for table, shape in kept["tables"].items()}
    if kept.get("row_wise") is not None:
        if not isinstance(kept["row_wise"], list):
            raise TypeError(f"its row_wise is {kept['row_wise']!r}")
        kept["row_wise"] = [(str(table), str(kind), *integers(at, 2)) for table, kind, *at in kept["row_wise"]]
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
    integers([getattr(header, key) for key in numbers], len(numbers))
    return header


def _raw_ids(written: dict[str, Any], shape: tuple[int, ...]) -> RawIds:
    found = RawIds(**{**written, "segments": integers(written["segments"], len(written["segments"]))})
    integers([found.hash_size], 1)
    segments = found.segments
    if len(segments) < 2 or segments[0] != 0 or segments[-1] != shape[0] or sorted(set(segments)) != [*segments]:
        raise ValueError(f"it divides a table of {shape[0]} rows into {segments}")
    names = found.module, found.sorted_ids, found.rows_of_ids
    if not all(isinstance(name, str) for name in names) or not isinstance(found.is_hashed, bool):
        raise TypeError(f"its raw_ids are {found}")
    return found
