"""UCI Adult (census income). Shapes: N rows of a split, B rows of a batch, D dense features (6), F sparse (10)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .batch import Batches, RecBatch, RecDataModule, check_at_least, collate_batch
from .criteo import check_files, parse_lines, read_lines, resolve_paths

COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
NUMERICAL = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
# Extra sparse features: (column, width of a bucket, number of buckets).
BUCKETS = {"age-bucket": ("age", 5, 20), "hours-bucket": ("hours-per-week", 5, 20)}
# The values from the data set's description (adult.names), comma separated.
_VALUES = {
    "workclass": "Private,Self-emp-not-inc,Self-emp-inc,Federal-gov,Local-gov,State-gov,Without-pay,Never-worked",
    "education": "Bachelors,Some-college,11th,HS-grad,Prof-school,Assoc-acdm,Assoc-voc,9th,7th-8th,12th,Masters,"
    "1st-4th,10th,Doctorate,5th-6th,Preschool",
    "marital-status": "Married-civ-spouse,Divorced,Never-married,Separated,Widowed,Married-spouse-absent,"
    "Married-AF-spouse",
    "occupation": "Tech-support,Craft-repair,Other-service,Sales,Exec-managerial,Prof-specialty,Handlers-cleaners,"
    "Machine-op-inspct,Adm-clerical,Farming-fishing,Transport-moving,Priv-house-serv,Protective-serv,Armed-Forces",
    "relationship": "Wife,Own-child,Husband,Not-in-family,Other-relative,Unmarried",
    "race": "White,Asian-Pac-Islander,Amer-Indian-Eskimo,Other,Black",
    "sex": "Female,Male",
    "native-country": "United-States,Cambodia,England,Puerto-Rico,Canada,Germany,Outlying-US(Guam-USVI-etc),India,"
    "Japan,Greece,South,China,Cuba,Iran,Honduras,Philippines,Italy,Poland,Jamaica,Vietnam,Mexico,Portugal,Ireland,"
    "France,Dominican-Republic,Laos,Ecuador,Taiwan,Haiti,Columbia,Hungary,Guatemala,Nicaragua,Scotland,Thailand,"
    "Yugoslavia,El-Salvador,Trinadad&Tobago,Peru,Hong,Holand-Netherlands",
}
MISSING_ID = 0  # of '?' in every categorical table; the values of `adult.names` have ids from 1 on
CATEGORY_IDS = {
    name: {"?": MISSING_ID} | {value: place for place, value in enumerate(values.split(","), start=1)}
    for name, values in _VALUES.items()
}
TABLE_SIZES = {name: len(ids) for name, ids in CATEGORY_IDS.items()} | {name: b[2] for name, b in BUCKETS.items()}


def parse_row(line: bytes) -> list[int]:
    """Return a line's label (1 above 50K), `NUMERICAL`, and ids as in `TABLE_SIZES`; a ValueError names a bad field."""
    fields = [field.strip() for field in line.decode("utf-8", "backslashreplace").split(",")]
    if len(fields) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} comma-separated fields, got {len(fields)}: {line[:60]!r}")
    row = dict(zip(COLUMNS, fields, strict=True))
    income = row["income"].removesuffix(".")  # as in the original `adult.test`
    if income not in ("<=50K", ">50K"):
        raise ValueError(f"income must be '<=50K' or '>50K', got {row['income']!r}")
    for name in NUMERICAL:
        if not (row[name].isascii() and row[name].isdecimal() and len(row[name]) <= 15):
            raise ValueError(f"{name} must be a non-negative integer, got {row[name]!r}")
    for name, known in CATEGORY_IDS.items():
        if row[name] not in known:
            raise ValueError(f"{name} must be '?' or one of the {len(known) - 1} known values, got {row[name]!r}")
    return [
        int(income == ">50K"),
        *(int(row[name]) for name in NUMERICAL),
        *(known[row[name]] for name, known in CATEGORY_IDS.items()),
        *(min(int(row[column]) // width, number - 1) for column, width, number in BUCKETS.values()),
    ]


@dataclass(frozen=True)
class AdultRows:
    """The rows of one split."""

    dense_ND: NDArray[np.float32]
    ids_NF: NDArray[np.int64]
    labels_N: NDArray[np.int64]

    def batch(self, deal: Callable[..., Sequence[NDArray[np.int64]]], epoch: int, index: int) -> RecBatch:
        """Return a batch with one id per bag; `deal(epoch)` returns the row numbers of each batch."""
        rows_B = deal(epoch)[index]
        ids_FB, dense_BD, labels_B = self.ids_NF[rows_B].T, self.dense_ND[rows_B], self.labels_N[rows_B]
        return collate_batch(list(TABLE_SIZES), dense_BD, ids_FB.reshape(-1), np.ones_like(ids_FB), labels_B)


@lru_cache(maxsize=4)
def dealt_out(
    num_rows: int, batch_size: int, rank: int, world_size: int, seed: int | None, epoch: int
) -> Sequence[NDArray[np.int64]]:
    """Return the row numbers of each of a rank's batches, equally many on every rank; a seed shuffles each epoch."""
    if seed is None:  # each row once, in sizes that differ by at most one row; no batch is empty
        num_batches = max(1, min(-(-num_rows // (world_size * batch_size)), num_rows // world_size))
        return np.array_split(np.arange(num_rows), num_batches * world_size)[rank::world_size]
    num_batches = num_rows // (world_size * batch_size)
    order = np.random.default_rng([seed, epoch]).permutation(num_rows)[: num_batches * world_size * batch_size]
    return list(order.reshape(num_batches, world_size, batch_size)[:, rank])


class AdultDataModule(RecDataModule):
    """UCI Adult in memory: eight categorical columns and two buckets as bags of one id, six standardised numbers.

    Non-empty lines are numbered from 0: `row % 5 == 4` is the test set, `row % 20 == 3` the validation set, the rest
    the training set, whose mean and deviation standardise the numbers. Training drops rows that do not fill a batch
    on every rank; evaluation covers each row exactly once. A row that does not parse is an error with file and line.

    Args:
        path: `adult.data`, plain or `.gz`.
        batch_size: Rows per batch and rank.
        seed: Seed of the shuffle, which differs in each epoch; non-negative.
        num_workers, persistent_workers: As for `RecDataModule`.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int = 256,
        seed: int = 0,
        num_workers: int = 0,
        persistent_workers: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers, persistent_workers)
        check_at_least(0, seed=seed)
        self.table_sizes, self.num_dense = dict(TABLE_SIZES), len(NUMERICAL)
        self.path, self.seed = path, seed
        self._splits: dict[str, AdultRows] = {}

    def check(self) -> None:
        """Raise if the file cannot be read or its first row does not parse."""
        check_files(self.path, parse_row, "the original adult.data")

    def setup(self, stage: str) -> None:
        """Read the file; raise a ValueError if a row does not parse, or there is no batch for each rank."""
        if not self._splits:
            self.check()
            self._splits = self._read()
        for split, rows in self._splits.items():
            needed = self.world_size * (self.batch_size if split == "train" else 1)
            if len(rows.labels_N) < needed:
                raise ValueError(
                    f"The {split} set is too small for one batch on each of {self.world_size} ranks.\n"
                    f"  got: {len(rows.labels_N)} rows, batch_size={self.batch_size}\n  Lower batch_size to "
                    f"{max(1, len(rows.labels_N) // self.world_size)} or less, or use more rows."
                )

    def _read(self) -> dict[str, AdultRows]:
        rows_NC = np.array(list(parse_lines(read_lines(resolve_paths(self.path)), parse_row)))
        number_N = np.arange(len(rows_NC))
        labels_N, numbers_ND, ids_NF = np.split(rows_NC, [1, 1 + len(NUMERICAL)], axis=1)
        dense_ND = numbers_ND.astype(np.float64)
        capital = [NUMERICAL.index("capital-gain"), NUMERICAL.index("capital-loss")]  # 0 or large
        dense_ND[:, capital] = np.log1p(dense_ND[:, capital])
        dense_ND = dense_ND.astype(np.float32)
        test_N, val_N = number_N % 5 == 4, number_N % 20 == 3
        train_N = ~(test_N | val_N)
        mean_D, std_D = (of(dense_ND[train_N], axis=0, dtype=np.float64).astype(np.float32) for of in (np.mean, np.std))
        dense_ND = (dense_ND - mean_D) / np.maximum(std_D, np.float32(1e-6))
        return {
            split: AdultRows(dense_ND[those_N], ids_NF[those_N], labels_N[those_N, 0])
            for split, those_N in (("train", train_N), ("val", val_N), ("test", test_N))
        }

    def _batches(self, split: str) -> Batches:
        self.setup(split)
        rows = self._splits[split]
        seed = self.seed if split == "train" else None
        deal = partial(dealt_out, len(rows.labels_N), self.batch_size, self.rank, self.world_size, seed)
        return Batches(len(deal(0)), partial(rows.batch, deal), anew=split == "train")
