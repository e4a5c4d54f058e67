"""Batch, loader, base class. Shapes: B batch size per rank, D dense features, F sparse features, V ids in a batch."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass(eq=False)
class RecBatch(Pipelineable):  # type: ignore[misc]  # untyped in TorchRec
    """One batch of a click model, on one device."""

    dense: Tensor  # `(B, D)`, float32
    # Ids of `F` features, `B` bags each: values `(V,)`, lengths `(F * B,)`, int64; perhaps weights `(V,)`, float32.
    sparse: KeyedJaggedTensor
    labels: Tensor  # 0 or 1, `(B,)`, float32

    def __len__(self) -> int:
        """The number of samples `B`, without a host-device sync."""
        return self.labels.shape[0]

    def _parts(self) -> tuple[Any, Any, Any]:
        return self.dense, self.sparse, self.labels

    def to(self, device: torch.device, non_blocking: bool = False) -> "RecBatch":
        """Return the batch on `device`; keeps the KJT's lengths per key on the host, without a sync."""
        return RecBatch(*(part.to(torch.device(device), non_blocking=non_blocking) for part in self._parts()))

    def pin_memory(self) -> "RecBatch":
        """Return the batch in page-locked host memory, for non-blocking copies."""
        return RecBatch(*(part.pin_memory() for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the caching allocator that `stream` reads these tensors."""
        for part in self._parts():
            part.record_stream(stream)


def num_ids(batch: RecBatch) -> Tensor:
    """Return how many ids each sample has, `(B,)`, int64, on the batch's device: a cost for `Balance`."""
    num_ids_B: Tensor = batch.sparse.lengths().view(len(batch.sparse.keys()), -1).sum(dim=0)
    return num_ids_B


def collate_batch(
    features: Sequence[str],
    dense_BD: NDArray[Any],
    values_V: NDArray[Any],
    lengths_FB: NDArray[Any],
    labels_B: NDArray[Any],
    weights_V: NDArray[Any] | None = None,
) -> RecBatch:
    """Return a batch from host arrays; computes the KJT's lengths per key, so that later reads need no sync.

    Args:
        features: Names of the `F` sparse features, in the order of `lengths_FB`.
        dense_BD: `(B, D)`, any real dtype.
        values_V: Ids, feature by feature and bag by bag, `(sum(lengths),)`, integer.
        lengths_FB: Bag sizes, `(F, B)`, integer; 0 is an empty bag.
        labels_B: 0 or 1, `(B,)`.
        weights_V: Weights of the ids, `(sum(lengths),)`, any real dtype; None: ids without weights.

    Raises:
        ValueError: The shapes do not match.
    """
    num_features, batch_size, num_values = len(features), len(labels_B), int(lengths_FB.sum())
    got = lengths_FB.shape, len(dense_BD), len(values_V)
    num_weights = num_values if weights_V is None else len(weights_V)
    if (*got, num_weights) != ((num_features, batch_size), batch_size, num_values, num_values):
        raise ValueError(
            f"A batch of {batch_size} labels and {num_features} features needs lengths of shape ({num_features}, "
            f"{batch_size}), {batch_size} dense rows, and {num_values} values, the sum of the lengths.\n"
            f"  got: dense {dense_BD.shape}, values {values_V.shape}, lengths {lengths_FB.shape}"
            f"{'' if weights_V is None else f', weights {weights_V.shape}'}\n"
            "  Pass one row of lengths per feature, one dense row per label, and one value per id in a bag."
        )

    def tensor(array: NDArray[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))

    values, lengths = tensor(values_V, np.int64), tensor(lengths_FB, np.int64).reshape(-1)
    weights = None if weights_V is None else tensor(weights_V, np.float32)
    sparse = KeyedJaggedTensor(list(features), values, weights, lengths, stride=batch_size)
    return RecBatch(tensor(dense_BD, np.float32), sparse.sync(), tensor(labels_B, np.float32))


class Batches(Dataset[RecBatch]):
    """One rank's batches of a split: `make(epoch, index)`, or `make(0, index)` if not `anew`."""

    def __init__(self, num_batches: int, make: Callable[[int, int], RecBatch], *, anew: bool) -> None:
        self._num_batches, self._make, self._anew = num_batches, make, anew

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, key: int | tuple[int, int]) -> RecBatch:
        epoch, index = key if isinstance(key, tuple) else (0, key)  # other samplers give an index alone
        return self._make(epoch if self._anew else 0, index)


class EpochSampler(DistributedSampler[Any]):  # this base class keeps Lightning from sharding the loader again
    """Yields the keys `(epoch, index)` of one rank's batches, as persistent worker processes do not know the epoch."""

    def __init__(self, dataset: Dataset[RecBatch], rank: int, world_size: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=False)
        self.num_samples = len(dataset)  # type: ignore[arg-type]  # the dataset has only this rank's batches
        self.first_batch = torch.zeros((), dtype=torch.int64)  # of the next iteration

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, index) for index in range(int(self.first_batch), self.num_samples)])


class BatchLoader(DataLoader[RecBatch]):
    """A DataLoader over whole batches that can resume in the middle of an epoch.

    Its state counts the batches yielded in the current epoch, which `epoch_of` returns. After `load_state_dict`, the
    first iteration in that epoch skips them without making them. Other arguments are as for `DataLoader`.
    """

    def __init__(self, *args: Any, epoch_of: Callable[[], int] = lambda: 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch_of = epoch_of
        self._num_handed_out = 0
        self._resumed_epoch: int | None = None

    def __iter__(self) -> Iterator[RecBatch]:  # type: ignore[override]
        # A generator: the first `next()` uses up a resume, `iter()` does not.
        start = self._num_handed_out if self._resumed_epoch == self.epoch_of() else 0
        self._resumed_epoch = None
        for source in (self.dataset, self.sampler):
            if hasattr(source, "first_batch"):  # the source skips earlier batches itself
                source.first_batch.fill_(start)
        self._num_handed_out = start
        for batch in super().__iter__():
            self._num_handed_out += 1
            yield batch
        self._num_handed_out = 0

    def state_dict(self) -> dict[str, int]:
        """Return the current epoch and the number of its batches that were yielded."""
        return {"epoch": self.epoch_of(), "num_batches": self._num_handed_out}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Resume after the batches that `state_dict` counts."""
        self._resumed_epoch, self._num_handed_out = state_dict["epoch"], state_dict["num_batches"]


class RecDataModule(LightningDataModule):
    """Base class of the data modules: the sizes that a model needs before `setup`, and loaders sharded by rank.

    Args:
        batch_size: Samples per batch and rank.
        num_workers: Loader processes per rank; 0 makes the batches in the training process.
        persistent_workers: Keep the loader processes between epochs.
    """

    table_sizes: dict[str, int]  # feature name -> rows of its table, in the order of the KJT's keys
    num_dense: int  # dense features per sample, `D`

    def __init__(self, batch_size: int, num_workers: int = 0, persistent_workers: bool = True) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_workers=num_workers)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers

    @property
    def rank(self) -> int:
        """The trainer's global rank, or 0."""
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def world_size(self) -> int:
        """The trainer's number of ranks, or 1."""
        return self.trainer.world_size if self.trainer is not None else 1

    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0

    @abstractmethod
    def _batches(self, split: str) -> Dataset[RecBatch] | None:
        """Return this rank's batches of a split (`train`, `val` or `test`); None if the split is empty."""

    def _loader(self, split: str) -> BatchLoader | list[Any]:
        dataset = self._batches(split)
        if dataset is None:
            return []
        return BatchLoader(
            dataset,
            batch_size=None,
            sampler=None if isinstance(dataset, IterableDataset) else EpochSampler(dataset, self.rank, self.world_size),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            epoch_of=self._epoch,
        )

    def train_dataloader(self) -> BatchLoader | list[Any]:
        """The training batches."""
        return self._loader("train")

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """The validation batches, the same in every epoch, or an empty list."""
        return self._loader("val")

    def test_dataloader(self) -> BatchLoader | list[Any]:
        """The test batches, the same in every epoch, or an empty list."""
        return self._loader("test")


def check_at_least(lowest: int, **arguments: float) -> None:
    """Raise a ValueError that names the first argument below a limit."""
    for name, got in arguments.items():
        if got < lowest:
            raise ValueError(f"{name} must be at least {lowest}.\n  got: {name}={got}\n  Raise it to {lowest} or more.")


def table_rows(rows_per_table: int | Sequence[int], features: Sequence[str]) -> dict[str, int]:
    """Return feature name -> rows of its table, from one number for all tables or one number per table."""
    rows = [rows_per_table] * len(features) if isinstance(rows_per_table, int) else [int(r) for r in rows_per_table]
    if len(rows) != len(features):
        raise ValueError(
            f"rows_per_table needs one number, or one for each of the {len(features)} tables.\n"
            f"  got: {len(rows)} numbers: {rows}\n  Pass {len(features)} numbers, or one for all tables."
        )
    sizes = dict(zip(features, rows, strict=True))
    check_at_least(1, **{f"rows_per_table[{name}]": num_rows for name, num_rows in sizes.items()})
    return sizes


def check_tables(name: str, values: Mapping[str, int], features: Sequence[str]) -> None:
    """Raise a ValueError if an argument gives a value to an unknown table, or a value below 1."""
    if unknown := [table for table in values if table not in features]:
        raise ValueError(
            f"{name} names a table that does not exist.\n  got: {unknown[0]!r}\n"
            f"  Name tables of {', '.join(features[:8])}{', ...' if len(features) > 8 else ''}."
        )
    check_at_least(1, **{f"{name}[{table}]": value for table, value in values.items()})
