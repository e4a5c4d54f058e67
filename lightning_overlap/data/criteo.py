"""Criteo's click logs, streamed. Shapes: B rows of a batch, D dense features (13), F sparse (26), V ids in a batch."""

import glob
import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from .batch import RecBatch, RecDataModule, check_at_least, collate_batch, table_rows

DENSE_NAMES = tuple(f"I{index}" for index in range(1, 14))
CATEGORY_NAMES = tuple(f"C{index}" for index in range(1, 27))
NUM_FIELDS = 1 + len(DENSE_NAMES) + len(CATEGORY_NAMES)
_FORMS = (  # pattern and description of each field
    (r"[01]", "0 or 1"),
    *[(r"(-?[0-9]{1,18})?", "an integer of at most 18 digits or empty")] * len(DENSE_NAMES),
    *[(r"[0-9a-fA-F]{0,16}", "a hexadecimal number of at most 16 digits or empty")] * len(CATEGORY_NAMES),
)
_ROW = re.compile(rb"[01](?:\t-?[0-9]{1,18}+|\t){13}+(?:\t[0-9a-fA-F]{0,16}+){26}+")  # possessive: twice as fast
_SALTS_F = np.arange(len(CATEGORY_NAMES), dtype=np.uint64)

_T = TypeVar("_T")

Line = tuple[Path, int, bytes]  # file, line number from 1 on, and the line without its end


def stable_hash(values: NDArray[np.uint64], salt: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value, the same on every machine; hashes with different salts are unrelated."""
    # Source: the SplitMix64 generator and its finalizer (Steele, Lea, Flood, OOPSLA 2014).
    mixed = np.asarray(values + (salt + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("NDArray[np.uint64]", mixed ^ (mixed >> np.uint64(31)))


def check_row(line: bytes) -> bytes:
    """Return a valid raw Criteo row unchanged; for an invalid row raise a ValueError that names the field."""
    if _ROW.fullmatch(line):
        return line
    text = line.decode("utf-8", "backslashreplace")
    fields = text.split("\t")
    if len(fields) != NUM_FIELDS:
        raise ValueError(f"expected {NUM_FIELDS} tab-separated fields, got {len(fields)}: {text[:60]!r}")
    for name, (form, what), got in zip(("the label", *DENSE_NAMES, *CATEGORY_NAMES), _FORMS, fields, strict=True):
        if not re.fullmatch(form, got):
            raise ValueError(f"{name} must be {what}, got {got[:60]!r}")
    raise AssertionError(f"no field of {line!r} is bad, yet the row is")


def parse_rows(lines: Sequence[bytes], table_sizes: dict[str, int]) -> RecBatch:
    """Return a batch of valid rows: a missing integer counts as 0, a missing category becomes an empty bag.

    An integer x becomes `log1p(max(x, 0))`, a category the id `stable_hash(value, column) mod rows`.
    """
    flat = b"\t".join(lines).split(b"\t")
    labels_B = np.array([field == b"1" for field in flat[::NUM_FIELDS]], dtype=np.float32)
    columns = [flat[column::NUM_FIELDS] for column in range(1, NUM_FIELDS)]
    num_dense = len(DENSE_NAMES)
    integers_DB = np.array([[int(x) if x else 0 for x in column] for column in columns[:num_dense]], dtype=np.int64)
    dense_BD = np.log1p(np.maximum(integers_DB, 0)).T
    lengths_FB = np.array([list(map(bool, column)) for column in columns[num_dense:]], dtype=np.int64)
    # One call decodes all categories: 16 digits are 8 bytes, big-endian.
    digits = b"".join([x.rjust(16, b"0") for column in columns[num_dense:] for x in column if x])
    raw_V = np.frombuffer(bytes.fromhex(digits.decode()), dtype=">u8").astype(np.uint64)
    feature_V = np.repeat(np.arange(len(CATEGORY_NAMES)), lengths_FB.sum(axis=1))
    rows_F = np.array(list(table_sizes.values()), dtype=np.uint64)
    values_V = stable_hash(raw_V, _SALTS_F[feature_V]) % rows_F[feature_V]
    return collate_batch(list(table_sizes), dense_BD, values_V.astype(np.int64), lengths_FB, labels_B)


def resolve_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the sorted files of a path, glob or folder (without hidden files), or of a list of these."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if Path(path).is_dir():
            stands_for = [str(p) for p in Path(path).iterdir() if not p.name.startswith(".")]
            why = "is an empty folder"
        elif glob.has_magic(str(path)) and not Path(path).exists():
            stands_for, why = glob.glob(str(path), recursive=True), "matches no file"
        else:
            stands_for, why = [str(path)], "does not exist, or is not a file"
        files = sorted(p for p in map(Path, stands_for) if p.is_file())
        if not files:
            raise FileNotFoundError(
                f"'{path}' {why}.\n  got: '{path}', looked up in {Path.cwd()}\n"
                "  Pass the path of a .tsv or .gz file, a glob or a folder of such files."
            )
        found += files
    if not found:
        raise FileNotFoundError("No data file was given.\n  got: an empty list of paths\n  Pass at least one path.")
    return found


def read_lines(paths: Sequence[Path]) -> Iterator[Line]:
    """Yield the non-empty lines of all files, plain or `.gz`."""
    for path in paths:
        number = 0
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            try:
                for number, raw in enumerate(file, start=1):
                    if line := raw.rstrip(b"\r\n"):
                        yield path, number, line
            except (EOFError, zlib.error, gzip.BadGzipFile) as err:
                raise ValueError(
                    f"{path}:{number + 1}: the compressed file is damaged.\n  got: {err}\n"
                    "  Download the file again, or remove .gz from its name if it is not compressed."
                ) from err


def parse_lines(lines: Iterable[Line], parse: Callable[[bytes], _T]) -> Iterator[_T]:
    """Yield `parse(line)` for each line; a ValueError of `parse` gets the file and line number as a prefix."""
    for path, number, line in lines:
        try:
            yield parse(line)
        except ValueError as err:
            raise ValueError(f"{path}:{number}: {err}") from err


def check_files(paths: str | Path | Sequence[str | Path], parse: Callable[[bytes], object], expected: str) -> None:
    """Raise if a file cannot be read, is empty, or has a first row for which `parse` raises a ValueError."""
    for file in resolve_paths(paths):
        try:
            if next(parse_lines(read_lines([file]), parse), None) is None:
                raise ValueError(f"{file}:1: the file has no rows")
        except ValueError as err:
            raise ValueError(f"{err}\n  Pass {expected}.") from err


@dataclass(eq=False)
class CriteoStream(IterableDataset[RecBatch]):
    """Streams the batches of one split on one rank; all read the same lines, and hold those of one batch.

    Rank r takes the r-th `batch_size` rows of each batch-group of `world_size * batch_size` rows. Loader processes take
    a split's groups in turn, in the DataLoader's order, so the number of processes does not change the batches.
    """

    paths: Sequence[Path]  # read one after the other
    table_sizes: dict[str, int]
    batch_size: int
    rank: int = 0
    world_size: int = 1
    kept: Sequence[bool] = (True,)  # kept[i % len(kept)]: whether group i belongs to this split

    def __post_init__(self) -> None:
        # Of the next iteration; in shared memory, because persistent loader processes have a copy of this object.
        self.first_batch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[RecBatch]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return self._batches(int(self.first_batch), worker_id, num_workers)

    def _batches(self, start: int, worker_id: int, num_workers: int) -> Iterator[RecBatch]:
        lines = read_lines(self.paths)
        group_size = self.world_size * self.batch_size
        num_rows, num_seen = 0, 0  # complete groups of this split so far
        for is_kept in itertools.cycle(self.kept):
            mine = is_kept and num_seen >= start and (num_seen - start) % num_workers == worker_id
            group = itertools.islice(lines, group_size)
            num_lines = sum(1 for _ in itertools.islice(group, self.rank * self.batch_size if mine else group_size))
            taken = list(itertools.islice(group, self.batch_size))
            num_lines += len(taken) + sum(1 for _ in group)
            num_rows += num_lines
            if num_lines < group_size:
                break
            num_seen += is_kept
            if taken:
                yield parse_rows(list(parse_lines(taken, check_row)), self.table_sizes)
        if num_seen == 0:
            raise ValueError(
                f"The data has no complete batch-group for this split: {self.world_size} ranks x {self.batch_size} "
                f"rows = {group_size} rows.\n  got: {num_rows} rows in {', '.join(map(str, self.paths))}\n"
                "  Lower batch_size, use more rows, or set a separate path for the split."
            )


class CriteoDataModule(RecDataModule):
    """Criteo's raw rows, streamed: label, integers I1 to I13, hexadecimal categories C1 to C26, tab separated.

    Each row goes to one rank and one loader process, in file order (see `CriteoStream`). The rows after the last
    complete batch-group (`world_size * batch_size` rows) are dropped. `parse_rows` turns values into features. A row
    that does not parse is an error with its file and line. The loaders have no length. Without `val_path`, every
    `holdout_every`-th batch-group is held out for validation; without `test_path`, the group before it for test. They
    depend on the batch size and the number of ranks; reading them reads the whole file again.

    Args:
        path: Training data: a file, plain or `.gz`, a glob, a folder, or a list of those. Read in sorted order.
        batch_size: Rows per batch and rank.
        rows_per_table: Rows of every table, or 26 numbers.
        val_path, test_path: Separate validation and test data.
        holdout_every: See above; with 0 a split without a path has no batches.
        num_workers: Loader processes per rank. Each reads the whole data and parses its share.
        persistent_workers: Keep the loader processes between epochs.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        batch_size: int = 512,
        rows_per_table: int | Sequence[int] = 100_000,
        val_path: str | Path | Sequence[str | Path] | None = None,
        test_path: str | Path | Sequence[str | Path] | None = None,
        holdout_every: int = 10,
        num_workers: int = 0,
        persistent_workers: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers, persistent_workers)
        given = {"train": path, "val": val_path, "test": test_path}
        self.paths = {split: paths for split, paths in given.items() if paths is not None}
        if holdout_every != 0 and len(self.paths) < 3:
            check_at_least(4 - len(self.paths), holdout_every=holdout_every)
        check_at_least(0, holdout_every=holdout_every)
        self.table_sizes = table_rows(rows_per_table, CATEGORY_NAMES)
        self.num_dense = len(DENSE_NAMES)
        self.holdout_every = holdout_every

    def check(self) -> None:
        """Raise if a file cannot be read or its first row does not parse."""
        expected = "Criteo's raw rows: label, 13 integers, 26 hexadecimal categories, tab separated"
        for path in self.paths.values():
            check_files(path, check_row, expected)

    def setup(self, stage: str) -> None:
        """Check the files on every rank."""
        self.check()

    def _batches(self, split: str) -> CriteoStream | None:
        every = self.holdout_every
        if split not in self.paths and not every:
            return None
        held = {place: name for place, name in ((every - 1, "val"), (every - 2, "test")) if name not in self.paths}
        whole = split != "train" and split in self.paths
        kept = [whole or held.get(group, "train") == split for group in range(every or 1)]
        paths = resolve_paths(self.paths.get(split, self.paths["train"]))
        return CriteoStream(paths, self.table_sizes, self.batch_size, self.rank, self.world_size, kept)
