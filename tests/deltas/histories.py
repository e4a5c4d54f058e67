"""A training that writes deltas, crashes and resumes, independent of the package; it keeps its tables at every cut."""

import itertools
import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_overlap.deltas import Dense, FileName, Header, Replica, Rows, decode, encode
from lightning_overlap.storage import Piece, joined

A, B, TOP = "model.ebc.embedding_bags.a.weight", "model.ebc.embedding_bags.b.weight", "model.top.weight"
SHAPES = {A: (7, 4), B: (5, 2)}
Marks = set[tuple[str, int]]  # (table, row)
CutId = tuple[int, int]


class MemorySink:
    """Files of cuts in a dict, beside another file."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        self.files[name] = joined(pieces)

    def names(self) -> list[str]:
        return [*self.files, "README.md"]

    def read(self, name: str) -> bytes:
        try:
            return self.files[name]
        except KeyError as err:
            raise FileNotFoundError(name) from err

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.files.pop(name, None)


class Crash(Exception):
    """The training's processes are gone."""


@dataclass(frozen=True)
class Shard:
    rank: int
    table: str
    rows: range
    columns: range


def deal(world_size: int, kind: int) -> list[Shard]:
    """Shard the tables: each whole on one rank, by rows or by columns, as `kind` says."""
    found = []
    for place, (table, (num_rows, num_columns)) in enumerate(SHAPES.items()):
        way = (kind + place) % 3
        for rank in range(world_size):
            rows, columns = range(num_rows), range(num_columns)
            if way == 0 and rank != place % world_size:
                continue
            if way == 1:
                rows = range(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)
            if way == 2:
                columns = range(rank * num_columns // world_size, (rank + 1) * num_columns // world_size)
            if rows and columns:
                found.append(Shard(rank, table, rows, columns))
    return found


@dataclass
class Checkpoint:
    tables: dict[str, Tensor]
    generation: int
    step: int
    marks: Marks
    after: CutId | None


class Training:
    def __init__(self, sink: MemorySink, seed: int = 0, run: str = "run") -> None:
        self.sink, self.run = sink, run
        self.random = random.Random(seed)
        self.numbers = itertools.count(16.0, 16.0)  # no value is written twice
        self.tables = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {TOP: torch.zeros(3)}
        self.marks: Marks = set()
        self.generation, self.step, self.fit = 1, 0, 1
        self.found: CutId | None = None
        self.whole: CutId | None = None
        self.at_cut: dict[CutId, dict[str, Tensor]] = {}
        self.wholes: list[CutId] = []
        self.checkpoints: list[Checkpoint] = []
        self.start(1, 0)

    def start(self, world_size: int, kind: int) -> None:
        self.world_size, self.shards = world_size, deal(world_size, kind)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            for table, (num_rows, num_columns) in SHAPES.items():
                for row in self.random.sample(range(num_rows), self.random.randint(0, 2)):
                    self.tables[table][row] = torch.arange(num_columns) + next(self.numbers)
                    self.marks.add((table, row))
            self.tables[TOP].fill_(next(self.numbers))

    def checkpoint(self) -> None:
        state = Checkpoint(deepcopy(self.tables), self.generation, self.step, set(self.marks), self.whole)
        self.checkpoints.append(state)

    def cut(self, bases: Iterable[int] = (), crash_after: int | None = None, *, steps: int = 0) -> None:
        """Train, and write a cut; the ranks in `bases` write all they have. What is not whole stays marked."""
        self.train(steps)
        at = (self.generation, self.step)
        self.at_cut[at] = deepcopy(self.tables)
        files = [
            file
            for rank in range(self.world_size)
            for file in self._files_of(rank, base=self.whole is None or rank in bases)
        ]
        self.random.shuffle(files)
        for number, (name, data) in enumerate(files):
            if number == crash_after:
                raise Crash
            self.sink.put(name, [data])
        self.wholes.append(at)
        self.whole = at
        self.marks.clear()

    def crash_ahead(self) -> None:
        """Crash when the first rank is two cuts ahead of the others, which have written neither."""
        before = self.whole
        for _ in range(2):
            self.train(1)
            at = (self.generation, self.step)
            self.at_cut[at] = deepcopy(self.tables)
            for name, data in self._files_of(0, base=self.whole is None):
                self.sink.put(name, [data])
            if self.world_size == 1:
                self.wholes.append(at)
            self.whole = at
        if self.world_size > 1:
            self.whole = before

    def resume(self, checkpoint: Checkpoint, world_size: int, kind: int) -> None:
        """Go on from a checkpoint in a new generation; the next cut is its first."""
        files = [name for name in map(FileName.parse, self.sink.names()) if name is not None]
        self.generation = max([checkpoint.generation, *(name.generation for name in files)]) + 1
        self.fit, self.found = self.fit + 1, max((name.cut for name in files), default=None)
        self.tables, self.step = deepcopy(checkpoint.tables), checkpoint.step
        self.marks, self.whole = set(checkpoint.marks), checkpoint.after
        self.start(world_size, kind)
        for name in files:
            if name.cut > (checkpoint.generation, checkpoint.step):
                for entry in decode(self.sink.read(str(name))).rows:
                    self.marks |= {(entry.table, row) for row in entry.rows.tolist()}

    def _files_of(self, rank: int, base: bool) -> list[tuple[str, bytes]]:
        entries = []
        for shard in self.shards:
            rows = [row for row in shard.rows if base or (shard.table, row) in self.marks]
            values = self.tables[shard.table][rows][:, shard.columns.start : shard.columns.stop]
            if shard.rank == rank and rows:
                entries.append(
                    Rows(shard.table, "weight", SHAPES[shard.table], shard.columns.start, torch.tensor(rows), values)
                )
        num_chunks = self.random.randint(1, 3)
        dense = [Dense(TOP, self.tables[TOP])] if rank == 0 else []
        headers = [self.header(rank, chunk, num_chunks, base) for chunk in range(num_chunks)]
        return [(str(one.name), encode(one, entries[one.chunk :: num_chunks], dense[one.chunk :])) for one in headers]

    def header(self, rank: int = 0, chunk: int = 0, num_chunks: int = 1, base: bool = False) -> Header:
        return Header(
            run=self.run,
            generation=self.generation,
            step=self.step,
            after=None if base else self.whole,
            rank=rank,
            world_size=self.world_size,
            chunk=chunk,
            num_chunks=num_chunks,
            num_pending=0,
            global_step=self.step,
            time=1000.0 + self.step,
            tables=SHAPES,
            fit=f"fit {self.fit}",
            found=self.found,
        )


def updated(*args: Any, **kwargs: Any) -> Replica:
    """Return a replica at the newest cut."""
    replica = Replica(*args, **kwargs)
    replica.update()
    return replica


def begun(sink: MemorySink) -> Training:
    made = Training(sink, seed=2)
    made.start(2, 1)
    made.cut(steps=2)
    return made


def empty_tables() -> dict[str, Tensor]:
    """Tables that no step of a training has."""
    return {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()} | {TOP: torch.full((3,), -1.0)}


def assert_equal(tables: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tables.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tables[name], value), name


class Model(nn.Module):
    """The names of `SHAPES`, in a module; `others` are tables besides."""

    def __init__(self, others: tuple[str, ...] = (), device: str = "cpu") -> None:
        super().__init__()
        self.model = nn.Module()
        tables = {name.split(".")[-2]: shape for name, shape in SHAPES.items()} | dict.fromkeys(others, (3, 4))
        configs = [
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=columns)
            for name, (rows, columns) in tables.items()
        ]
        self.model.ebc = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        self.model.top = nn.Linear(3, 1, bias=False)
        self.model.top.weight = nn.Parameter(torch.zeros(3))


def write(training: Training, rows: tuple[Rows, ...] = (), dense: tuple[Dense, ...] = (), **header: Any) -> str:
    training.step += 1
    training.start(1, 0)
    changed = replace(training.header(), **header)
    training.sink.put(str(changed.name), [encode(changed, rows, dense)])
    return str(changed.name)
