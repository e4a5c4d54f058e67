"""The visits of a shop, read from Parquet: an ordinary LightningDataModule."""

from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

try:
    import pyarrow.parquet as pq
except ImportError as err:
    raise ImportError(f"Parquet files need pyarrow ({err}): pip install pyarrow") from err


class Visits(LightningDataModule):
    """Batches of visits: `ids`, a KeyedJaggedTensor of user, item and history, and `clicked`, `(B,)` float32.

    Args:
        folder: Has `train.parquet`, `val.parquet` and `test.parquet`.
        num_users: Users are numbered from 0; the model makes a table with so many rows.
        num_items: The same for items.
        batch_size: Samples per rank.
        num_workers: Loader processes per rank.
    """

    def __init__(self, folder: str, num_users: int, num_items: int, batch_size: int = 128, num_workers: int = 0):
        super().__init__()
        self.folder, self.batch_size, self.num_workers = folder, batch_size, num_workers

    def setup(self, stage: str) -> None:
        self.columns = {split: read(f"{self.folder}/{split}.parquet") for split in ("train", "val", "test")}

    def loader(self, split: str) -> DataLoader:
        columns = self.columns[split]
        return DataLoader(
            range(len(columns["clicked"])),  # a sample is a row number; `collate` reads its row
            batch_size=self.batch_size,
            shuffle=split == "train",
            num_workers=self.num_workers,
            collate_fn=partial(collate, columns),
        )

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.loader("test")


def read(path: str) -> dict[str, np.ndarray]:
    """Return the columns as arrays; `history` as its values and, in `offsets`, where each row's begin."""
    table = pq.read_table(path)
    history = table["history"].combine_chunks()
    flat = {name: table[name].to_numpy() for name in ("user", "item", "clicked")}
    return flat | {"history": history.values.to_numpy(), "offsets": history.offsets.to_numpy()}


def collate(columns: dict[str, np.ndarray], rows: list[int]) -> dict[str, Any]:
    """Return the batch of some rows."""
    one_each = np.ones(len(rows), dtype=np.int64)
    starts, ends = columns["offsets"][rows], columns["offsets"][np.array(rows) + 1]
    histories = [columns["history"][start:end] for start, end in zip(starts, ends, strict=True)]
    ids = KeyedJaggedTensor(
        keys=["user", "item", "history"],
        values=torch.from_numpy(np.concatenate([columns["user"][rows], columns["item"][rows], *histories])),
        lengths=torch.from_numpy(np.concatenate([one_each, one_each, ends - starts])),
    )
    return {"ids": ids, "clicked": torch.from_numpy(columns["clicked"][rows].astype(np.float32))}
