"""The synthetic stream: what is drawn, from what it depends, and how the loader resumes. Also the batch itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_overlap.data import BatchLoader, RecBatch, SyntheticDataModule, collate_batch
from lightning_overlap.models.dlrm import BinnedAUC

from ..support.fits import QUIET
from .test_criteo import FakeTrainer

SMALL = {"num_tables": 3, "rows_per_table": 50, "num_dense": 4, "batch_size": 8, "num_batches": 6}


def same(left: RecBatch, right: RecBatch) -> bool:
    parts = [(batch.dense, batch.labels, batch.sparse.values(), batch.sparse.lengths()) for batch in (left, right)]
    return left.sparse.keys() == right.sparse.keys() and all(map(torch.equal, *parts))


def all_same(left: list[RecBatch], right: list[RecBatch]) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def epoch_of(data: SyntheticDataModule, epoch: int) -> list[RecBatch]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def test_a_batch_has_the_promised_shapes_and_dtypes_and_is_synced_on_the_host():
    batch = collate_batch(["a", "b"], np.zeros((2, 3)), np.array([7, 8, 9]), np.array([[1, 0], [0, 2]]), np.ones(2))
    assert (batch.dense.dtype, batch.dense.shape) == (torch.float32, (2, 3))
    assert (batch.labels.dtype, batch.labels.shape) == (torch.float32, (2,))
    assert batch.sparse.values().dtype == batch.sparse.lengths().dtype == torch.int64
    assert batch.sparse["a"].to_dense()[0].tolist() == [7]
    assert [bag.tolist() for bag in batch.sparse["b"].to_dense()] == [[], [8, 9]]
    assert batch.sparse.length_per_key_or_none() == [1, 2]
    assert len(batch) == 2


def test_a_moved_batch_is_a_batch_and_keeps_the_lengths_per_key():
    batch = next(iter(SyntheticDataModule(**SMALL).train_dataloader()))
    moved = batch.to(torch.device("meta"), non_blocking=True)  # a device from which nothing can be read back
    assert all(part.is_meta for part in (moved.dense, moved.labels, moved.sparse.values()))
    assert moved.sparse.length_per_key() == batch.sparse.length_per_key()


def test_arrays_that_do_not_belong_together_are_refused():
    message = r"4 values, the sum of the lengths\.\n  got: dense \(2, 3\), values \(3,\)"
    with pytest.raises(ValueError, match=message):
        collate_batch(["a", "b"], np.zeros((2, 3)), np.array([7, 8, 9]), np.ones((2, 2), dtype=int), np.ones(2))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    skew=st.sampled_from([0.0, 0.5, 1.0, 1.05, 2.5]),
    pooling=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**40),
)
def test_ids_are_rows_of_their_table_for_any_tables(rows, skew, pooling, seed):
    drawn = {"zipf_skew": skew, "pooling": pooling, "seed": seed, "batch_size": 16, "num_batches": 1}
    data = SyntheticDataModule(len(rows), rows, **drawn)
    (batch,) = data.train_dataloader()
    assert batch.sparse.keys() == list(data.table_sizes)
    for feature, num_rows in data.table_sizes.items():
        ids = batch.sparse[feature].values()
        assert bool(((ids >= 0) & (ids < num_rows)).all())


@pytest.mark.parametrize(("skew", "expected"), [(0.0, 1 / 1000), (1.0, np.log(2) / np.log(1001))])
def test_rows_lengths_and_frequencies_are_as_asked(skew, expected):
    rows = {"rows_per_table": 30, "rows_of": {"cat_1": 1000}}
    data = SyntheticDataModule(num_tables=3, batch_size=20_000, num_batches=1, pooling=3.0, zipf_skew=skew, **rows)
    (batch,) = data.train_dataloader()
    assert data.table_sizes == {"cat_0": 30, "cat_1": 1000, "cat_2": 30}
    lengths = batch.sparse.lengths().double()
    assert lengths.mean().item() == pytest.approx(3.0, rel=0.03)
    assert 0.08 < (lengths == 0).double().mean().item() < 0.1  # 0.05 on purpose, others as a Poisson draw
    counts = [torch.bincount(batch.sparse[name].values(), minlength=size) for name, size in data.table_sizes.items()]
    assert all(bool((of_table > 0).all()) for of_table in counts[::2])
    assert (counts[1].max() / counts[1].sum()).item() == pytest.approx(expected, rel=0.05, abs=7e-4)


def test_seeds_epochs_ranks_and_splits_differ():
    data = SyntheticDataModule(**SMALL)
    other_rank = SyntheticDataModule(**SMALL)
    other_rank.trainer = FakeTrainer(1, 2)
    draws = [
        epoch_of(data, 0)[0],
        epoch_of(data, 0)[1],
        epoch_of(data, 1)[0],
        epoch_of(SyntheticDataModule(**SMALL, seed=1), 0)[0],
        epoch_of(other_rank, 0)[0],
        next(iter(data.val_dataloader())),
        next(iter(data.test_dataloader())),
    ]
    for place, left in enumerate(draws):
        assert not any(same(left, right) for right in draws[place + 1 :])


def test_validation_is_the_same_in_every_epoch_and_an_empty_split_has_no_loader():
    data = SyntheticDataModule(**SMALL, num_val_batches=2, num_test_batches=0)
    loader = data.val_dataloader()
    first = list(loader)
    loader.sampler.set_epoch(5)
    assert all_same(first, list(loader))
    assert (len(data.train_dataloader()), len(loader), data.test_dataloader()) == (6, 2, [])


def test_the_state_counts_the_batches_handed_out_and_one_of_another_epoch_skips_nothing():
    data = SyntheticDataModule(**SMALL)
    data.trainer = FakeTrainer(0, 1, epoch=1)
    loader = data.train_dataloader()
    loader.load_state_dict({"epoch": 0, "num_batches": 6})
    assert [loader.state_dict()["num_batches"] for _ in loader] == [1, 2, 3, 4, 5, 6]
    assert loader.state_dict() == {"epoch": 1, "num_batches": 0}


class Recorder(BoringModel):
    def __init__(self, save_to: Path | None = None) -> None:
        super().__init__()
        self.save_to = save_to
        self.seen: list[RecBatch] = []

    def training_step(self, batch: RecBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return self.layer.weight.sum()

    def on_train_batch_end(self, *_: object) -> None:
        if self.save_to is not None and len(self.seen) == 8:
            self.trainer.save_checkpoint(self.save_to)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are fewer cores
@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_keeps_the_loader_and_its_batches_and_resumes_in_the_middle_of_an_epoch(tmp_path, num_workers):
    saved, kwargs = tmp_path / "middle.ckpt", {**QUIET, "use_distributed_sampler": True, "limit_val_batches": 0}
    first, second = (Trainer(accelerator="cpu", max_epochs=3, **kwargs) for _ in range(2))
    straight, resumed, plain = Recorder(saved), Recorder(), SyntheticDataModule(**SMALL)
    first.fit(straight, datamodule=SyntheticDataModule(**SMALL, num_workers=num_workers))
    assert type(first.train_dataloader) is BatchLoader
    assert all_same(straight.seen, [batch for epoch in range(3) for batch in epoch_of(plain, epoch)])
    assert all(batch.sparse.length_per_key_or_none() is not None for batch in straight.seen)
    second.fit(resumed, datamodule=SyntheticDataModule(**SMALL, num_workers=num_workers), ckpt_path=saved)
    assert all_same(resumed.seen, straight.seen[8:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"num_dense": 0}, "num_dense must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_tables": 2, "rows_per_table": [5]}, "each of the 2 tables"),
        ({"num_tables": 2, "rows_of": {"cat_2": 5}}, "rows_of names a table that does not exist.\n  got: 'cat_2'"),
        ({"num_tables": 2, "rows_of": {"cat_1": 0}}, r"rows_of\[cat_1\] must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyntheticDataModule(**arguments)


def test_the_label_can_be_learned_from_dense_features_and_ids_together() -> None:
    data = SyntheticDataModule(num_tables=4, rows_per_table=100, batch_size=20_000, num_batches=1)
    (batch,) = data.train_dataloader()
    lengths = batch.sparse.lengths().reshape(4, -1).numpy()
    feature = np.repeat(np.arange(4), lengths.sum(axis=1))
    ids = batch.sparse.values().numpy()

    def area(dense: np.ndarray, kept_lengths: np.ndarray, kept: slice) -> float:
        metric = BinnedAUC()
        logits = data.model.logits(dense, feature[kept], ids[kept], kept_lengths)
        metric.update(torch.from_numpy(logits), batch.labels)
        return metric.compute().item()

    both = area(batch.dense.numpy(), lengths, slice(None))
    only_dense = area(batch.dense.numpy(), np.zeros_like(lengths), slice(0, 0))
    only_ids = area(np.zeros_like(batch.dense.numpy()), lengths, slice(None))
    assert both > 0.8
    assert 0.6 < only_dense < both - 0.04
    assert 0.6 < only_ids < both - 0.04
    assert 0.2 < batch.labels.mean().item() < 0.45


def test_weights_of_ids_are_drawn_last_and_change_nothing_else():
    plain, weighted = SyntheticDataModule(**SMALL), SyntheticDataModule(**SMALL, weighted=True)
    for left, right in zip(epoch_of(plain, 0), epoch_of(weighted, 0), strict=True):
        assert same(left, right)
        assert left.sparse.weights_or_none() is None
        weights = right.sparse.weights()
        assert (weights.dtype, weights.shape) == (torch.float32, right.sparse.values().shape)
        assert 0 <= float(weights.min()) < float(weights.max()) < 1
    with pytest.raises(ValueError, match=r"lengths \(1, 2\), weights \(1,\)"):
        collate_batch(["a"], np.zeros((2, 1)), np.array([7, 8]), np.ones((1, 2), dtype=int), np.ones(2), np.ones(1))
