"""Synthetic clicks. Shapes: B batch size per rank, D dense features, F sparse features, V ids in a batch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import Batches, RecBatch, RecDataModule, check_at_least, check_tables, collate_batch, table_rows
from .criteo import stable_hash

EMPTY_BAG_RATE = 0.05  # share of bags that are empty on purpose; a Poisson draw of 0 adds more
_SPLITS = ("train", "val", "test")
_HIDDEN_MODEL = len(_SPLITS)  # its seed stream, after the splits' streams
_DENSE_STD, _SPARSE_STD, _BASE_LOGIT = 1.0, 1.5, -1.0


@dataclass
class ClickModel:
    """Draws ids, and labels from a hidden logistic model; an id's hidden weight is a hash, which needs no memory."""

    table_sizes: dict[str, int]
    num_dense: int
    pooling: float
    zipf_skew: float
    seed: int
    weighted: bool = False

    def __post_init__(self) -> None:
        weights_D = np.random.default_rng([self.seed, _HIDDEN_MODEL]).standard_normal(self.num_dense)
        self._dense_weights_D = weights_D * (_DENSE_STD / max(float(np.linalg.norm(weights_D)), 1e-12))
        sizes = list(self.table_sizes.values())
        self._rows_F = np.array(sizes, dtype=np.int64)
        self._strides_F = np.array([_coprime_stride(rows) for rows in sizes], dtype=np.int64)

    def draw(self, batch_size: int, *stream: int) -> RecBatch:
        """Return a batch of `batch_size` samples, determined by the seed and `stream` (split, rank, epoch, index)."""
        rng = np.random.default_rng([self.seed, *stream])
        num_features = len(self.table_sizes)
        dense_BD = rng.standard_normal((batch_size, self.num_dense))
        lengths_FB = rng.poisson(self.pooling / (1 - EMPTY_BAG_RATE), (num_features, batch_size))
        lengths_FB[rng.random((num_features, batch_size)) < EMPTY_BAG_RATE] = 0
        feature_V = np.repeat(np.arange(num_features), lengths_FB.sum(axis=1))
        values_V = self._draw_ids(feature_V, rng)
        logits_B = self.logits(dense_BD, feature_V, values_V, lengths_FB)
        labels_B = rng.random(batch_size) < 1 / (1 + np.exp(-logits_B))
        weights_V = rng.random(len(values_V)) if self.weighted else None
        return collate_batch(list(self.table_sizes), dense_BD, values_V, lengths_FB, labels_B, weights_V)

    def logits(
        self, dense_BD: NDArray[Any], feature_V: NDArray[Any], values_V: NDArray[Any], lengths_FB: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Return the true log odds of a click; ids come by feature (its number is in `feature_V`), then by sample."""
        num_features, batch_size = lengths_FB.shape
        bits_V = stable_hash(values_V.astype(np.uint64), feature_V.astype(np.uint64) + np.uint64(self.seed << 16))
        unit_V = ((bits_V >> np.uint64(11)).astype(np.float64) / 2**53 - 0.5) * math.sqrt(12)  # variance 1
        sample_V = np.repeat(np.tile(np.arange(batch_size), num_features), lengths_FB.reshape(-1))
        sparse_B = np.bincount(sample_V, weights=unit_V, minlength=batch_size)
        scale = _SPARSE_STD / math.sqrt(max(num_features * self.pooling, 1e-12))
        return np.asarray(dense_BD @ self._dense_weights_D + scale * sparse_B + _BASE_LOGIT, dtype=np.float64)

    def _draw_ids(self, feature_V: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return Zipf ids, `(V,)`, by inverting the distribution function of a bounded Pareto law."""
        rows_V = self._rows_F[feature_V]
        uniform_V = rng.random(len(feature_V))
        power = 1 - self.zipf_skew
        if abs(power) < 1e-6:
            place_V = np.exp(uniform_V * np.log(rows_V + 1.0))
        else:
            place_V = (uniform_V * ((rows_V + 1.0) ** power - 1) + 1) ** (1 / power)
        rank_V = np.clip(place_V.astype(np.int64) - 1, 0, rows_V - 1)
        # A stride coprime to the table's rows, a bijection, spreads the frequency ranks over the table.
        return np.asarray(rank_V * self._strides_F[feature_V] % rows_V, dtype=np.int64)


def _coprime_stride(num_rows: int) -> int:
    """Return a stride near the golden section of the table that visits each row once."""
    strides = itertools.count(max(1, int(num_rows * 0.6180339887)))
    return next(stride for stride in strides if math.gcd(stride, num_rows) == 1)


class SyntheticDataModule(RecDataModule):
    """Clicks with Zipf ids, bags of several ids (some empty) and a label that a DLRM can learn.

    The labels come from a hidden logistic model, the same for all splits. A batch depends on `seed`, split, rank, epoch
    (in training) and index, not on the number of loader processes or a resume.

    Args:
        num_tables: Number of sparse features `cat_0`, `cat_1`, ..., each with its own table.
        rows_per_table: Rows of every table, or one number per table.
        num_dense: Dense features per sample.
        batch_size: Samples per batch and rank.
        num_batches: Training batches per epoch and rank.
        num_val_batches, num_test_batches: Validation and test batches per rank.
        pooling: Mean number of ids per bag.
        zipf_skew: Exponent of the id frequencies; 0 is uniform.
        seed: Non-negative.
        num_workers, persistent_workers: As for `RecDataModule`.
        rows_of: Rows of single tables, by name, that differ from `rows_per_table`.
        weighted: Give every id a weight, between 0 and 1, which no label depends on.
    """

    def __init__(
        self,
        num_tables: int = 8,
        rows_per_table: int | Sequence[int] = 10_000,
        num_dense: int = 13,
        batch_size: int = 512,
        num_batches: int = 200,
        num_val_batches: int = 20,
        num_test_batches: int = 20,
        pooling: float = 2.0,
        zipf_skew: float = 1.05,
        seed: int = 0,
        num_workers: int = 0,
        persistent_workers: bool = True,
        rows_of: Mapping[str, int] | None = None,
        weighted: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, persistent_workers)
        check_at_least(1, num_tables=num_tables, num_dense=num_dense, num_batches=num_batches)
        check_at_least(0, num_val_batches=num_val_batches, num_test_batches=num_test_batches)
        check_at_least(0, pooling=pooling, zipf_skew=zipf_skew, seed=seed)
        self.table_sizes = table_rows(rows_per_table, [f"cat_{index}" for index in range(num_tables)])
        rows_of = {str(name): int(num_rows) for name, num_rows in (rows_of or {}).items()}
        check_tables("rows_of", rows_of, list(self.table_sizes))
        self.table_sizes |= rows_of
        self.model = ClickModel(self.table_sizes, num_dense, pooling, zipf_skew, seed, weighted)
        self.num_dense = num_dense
        self.num_batches = {"train": num_batches, "val": num_val_batches, "test": num_test_batches}

    def _batches(self, split: str) -> Batches | None:
        draw = partial(self.model.draw, self.batch_size, _SPLITS.index(split), self.rank)
        num_batches = self.num_batches[split]
        return Batches(num_batches, draw, anew=split == "train") if num_batches else None
