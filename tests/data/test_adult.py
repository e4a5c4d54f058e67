"""UCI Adult: what a row becomes, which rank gets it in which epoch, and that a DLRM learns it."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_overlap.data import AdultDataModule, RecBatch
from lightning_overlap.data.adult import MISSING_ID, NUMERICAL, TABLE_SIZES, parse_row
from lightning_overlap.models import DLRM

from .test_criteo import FakeTrainer, write

FIRST_ROW = (
    b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    b"United-States, <=50K"
)


def numbered(number: int) -> bytes:
    """A good row that says its number, in age and fnlwgt."""
    return FIRST_ROW.replace(b"77516", str(number).encode())


def module_of(path: Path, rank: int = 0, world_size: int = 1, **kwargs) -> AdultDataModule:
    data = AdultDataModule(path, **kwargs)
    data.trainer = FakeTrainer(rank, world_size)
    return data


def numbers_of(batch: RecBatch, train: list[int]) -> list[int]:
    """The numbers of `numbered` rows, from the standardised fnlwgt and the training rows it was standardised with."""
    column = torch.tensor(train, dtype=torch.float64)
    numbers = batch.dense[:, NUMERICAL.index("fnlwgt")].double() * column.std(correction=0) + column.mean()
    return numbers.round().int().tolist()


def train_rows(num_rows: int) -> list[int]:
    return [n for n in range(num_rows) if n % 5 != 4 and n % 20 != 3]


def test_what_rows_become():
    label, *numbers = parse_row(FIRST_ROW)
    assert label == 0
    assert numbers[:6] == [39, 77516, 13, 2174, 0, 40]
    assert dict(zip(TABLE_SIZES, numbers[6:], strict=True)) == {
        **{"workclass": 6, "education": 1, "marital-status": 3, "occupation": 9, "relationship": 4, "race": 1},
        **{"sex": 2, "native-country": 1, "age-bucket": 7, "hours-bucket": 8},
    }
    other = FIRST_ROW.replace(b"39", b"130").replace(b"State-gov", b"?").replace(b"<=50K", b">50K.")
    assert parse_row(other) == [1, 130, *numbers[1:6], MISSING_ID, *numbers[7:-2], 19, numbers[-1]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"<=50K", b"50K", "income must be '<=50K' or '>50K', got '50K'"),
        (b"39", b"-39", "age must be a non-negative integer, got '-39'"),
        (b"77516", b"?", r"fnlwgt must be a non-negative integer, got '\?'"),
        (b"State-gov", b"Pirate", "workclass must be '\\?' or one of the 8 known values, got 'Pirate'"),
        (b", <=50K", b"", "expected 15 comma-separated fields, got 14"),
    ],
)
def test_a_bad_field_is_named_with_what_was_got(old, new, message):
    with pytest.raises(ValueError, match=message):
        parse_row(FIRST_ROW.replace(old, new))


@given(st.binary(max_size=80))
def test_noise_is_refused_and_not_a_crash(noise):
    with pytest.raises(ValueError, match=r"expected 15|must be"):
        parse_row(noise)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_rows=st.integers(60, 140), batch_size=st.integers(1, 7), world_size=st.integers(1, 3))
def test_training_deals_every_row_out_once_and_evaluation_covers_every_row(tmp_path, num_rows, batch_size, world_size):
    path = write(tmp_path / "adult.data", [numbered(n) for n in range(num_rows)])
    modules = [module_of(path, rank, world_size, batch_size=batch_size) for rank in range(world_size)]
    train = train_rows(num_rows)
    expected = {"test": {n for n in range(num_rows) if n % 5 == 4}, "val": {n for n in range(num_rows) if n % 20 == 3}}
    for split, held_out in expected.items():
        loaders = [getattr(data, f"{split}_dataloader")() for data in modules]
        got = [[numbers_of(batch, train) for batch in loader] for loader in loaders]
        assert len({len(batches) for batches in got}) == 1
        sizes = {len(batch) for batches in got for batch in batches}
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
        assert max(sizes) <= batch_size or min(sizes) == 1
        assert sorted(n for batches in got for batch in batches for n in batch) == sorted(held_out)
    seen = [n for data in modules for batch in data.train_dataloader() for n in numbers_of(batch, train)]
    assert len(set(seen)) == len(seen) == len(train) // (batch_size * world_size) * batch_size * world_size
    assert set(seen) <= set(train)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_fixes(tmp_path):
    path = write(tmp_path / "adult.data", [numbered(n) for n in range(100)])

    def order(epoch: int, seed: int) -> list[int]:
        loader = module_of(path, batch_size=5, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return [n for batch in loader for n in numbers_of(batch, train_rows(100))]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(epoch, seed)) for epoch in (0, 1) for seed in (0, 1)}) == 4
    assert sorted(order(0, 0)) == sorted(order(1, 1)) == train_rows(100)


def test_a_bad_row_is_an_error_with_its_place(tmp_path):
    lines = [numbered(n) for n in range(100)]
    lines[7] = b"what?"
    data = module_of(write(tmp_path / "adult.data.gz", lines), batch_size=4)
    data.check()
    with pytest.raises(ValueError, match=r"adult\.data\.gz:8: expected 15 comma-separated fields, got 1"):
        data.setup("fit")
    data = module_of(write(tmp_path / "adult.data", [b"", b"1,2"]))
    with pytest.raises(ValueError, match=r"adult\.data:2: expected 15 comma-separated fields, got 2"):
        data.check()


def test_too_few_rows_for_the_ranks_say_what_batch_size_would_do(tmp_path):
    path = write(tmp_path / "adult.data", [FIRST_ROW] * 40)
    with pytest.raises(ValueError, match=r"train set is too small .* 2 ranks.\n  got: 30 rows, batch_size=16\n .* 15 "):
        module_of(path, 0, 2, batch_size=16).setup("fit")


def test_the_real_file_has_standardised_numbers_and_a_small_dlrm_learns_it(data_path):
    torch.manual_seed(0)
    data = AdultDataModule(data_path / "adult.data.gz", batch_size=256)
    batches = {split: list(getattr(data, f"{split}_dataloader")()) for split in ("train", "val", "test")}
    assert [sum(map(len, of_split)) for of_split in batches.values()] == [24_320, 1_628, 6_512]
    dense = torch.cat([batch.dense for batch in batches["train"]])
    assert torch.allclose(dense.mean(0), torch.zeros(6), atol=0.02)
    assert torch.allclose(dense.std(0), torch.ones(6), atol=0.05)
    model = DLRM(data.table_sizes, data.num_dense, learning_rate=2e-3, table_learning_rate=0.05, table_device="cpu")
    model.log = lambda *args, **kwargs: None  # no trainer here
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(batches["train"] * 2):
        optimizer.zero_grad()
        model.training_step(batch, index).backward()
        optimizer.step()
    with torch.no_grad():
        for index, batch in enumerate(batches["test"]):
            model.test_step(batch, index)
    assert model.test_auc.compute().item() >= 0.90
    assert model.test_ne.compute().item() < 0.60
