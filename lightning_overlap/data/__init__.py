"""Data modules with batches for TorchRec, sharded by rank and pinned."""

from .adult import AdultDataModule as AdultDataModule
from .batch import BatchLoader as BatchLoader
from .batch import RecBatch as RecBatch
from .batch import RecDataModule as RecDataModule
from .batch import check_tables as check_tables
from .batch import collate_batch as collate_batch
from .batch import num_ids as num_ids
from .criteo import CriteoDataModule as CriteoDataModule
from .synthetic import SyntheticDataModule as SyntheticDataModule
