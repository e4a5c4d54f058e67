"""Criteo's raw rows: what a row becomes, which rank and process gets it, and what bad rows and files lead to."""

import gzip
import math
import re
import traceback
from itertools import islice, zip_longest
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_overlap.data import CriteoDataModule, RecBatch
from lightning_overlap.data.criteo import CATEGORY_NAMES, CriteoStream, check_row, parse_rows, resolve_paths

BIG = dict.fromkeys(CATEGORY_NAMES, 2**40)  # so big that hashes do not collide in a test
integers = st.one_of(st.none(), st.integers(-3, 5), st.integers(-(10**17), 10**17))
categories = st.one_of(st.none(), st.integers(0, 2**32 - 1))
rows = st.tuples(
    st.integers(0, 1), st.lists(integers, min_size=13, max_size=13), st.lists(categories, min_size=26, max_size=26)
)


class FakeTrainer:
    def __init__(self, rank: int, world_size: int, epoch: int = 0) -> None:
        self.global_rank, self.world_size, self.current_epoch = rank, world_size, epoch


def write(path: Path, lines: list[bytes]) -> Path:
    """Write lines, compressed if the name says so; return the path."""
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def line_of(label, numbers, ids) -> bytes:
    fields = [str(label), *("" if x is None else str(x) for x in numbers)]
    return "\t".join(fields + ["" if x is None else f"{x:08x}" for x in ids]).encode()


def numbered(number: int) -> bytes:
    """A good row that says its number, in I1."""
    return line_of(number % 2, [number] + [None] * 12, [number] * 26)


def numbers_of(batch: RecBatch) -> list[int]:
    return [round(math.expm1(x)) for x in batch.dense[:, 0].double().tolist()]


def batches(loader) -> list[list[int]]:
    return [numbers_of(batch) for batch in loader]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_rows_survive_the_way_through_text(given_rows):
    lines = [line_of(*row) for row in given_rows]
    for line in lines:
        check_row(line)
    batch = parse_rows(lines, BIG)
    assert batch.labels.tolist() == [row[0] for row in given_rows]
    expected = torch.tensor([[math.log1p(max(x or 0, 0)) for x in numbers] for _, numbers, _ in given_rows])
    assert torch.allclose(batch.dense, expected, rtol=1e-6)
    for column, name in enumerate(CATEGORY_NAMES):
        bags = [bag.tolist() for bag in batch.sparse[name].to_dense()]
        assert [len(bag) for bag in bags] == [int(ids[column] is not None) for _, _, ids in given_rows]
        by_value = {}
        for bag, (_, _, ids) in zip(bags, given_rows, strict=True):
            assert by_value.setdefault(ids[column], bag) == bag  # one value, one id
        assert len({tuple(bag) for bag in by_value.values()}) == len(by_value)  # other values, other ids
    small = {name: 1 + place for place, name in enumerate(CATEGORY_NAMES)}
    sparse = parse_rows(lines, small).sparse
    assert all(0 <= value < size for name, size in small.items() for value in sparse[name].values().tolist())


def test_the_hash_is_the_same_for_ever_and_differs_between_columns():
    batch = parse_rows([line_of(0, [None] * 13, [0x68FD1E64] * 26)], dict.fromkeys(CATEGORY_NAMES, 100_000))
    ids = batch.sparse.values().tolist()
    assert len(set(ids)) == 26
    assert ids[:3] == [49113, 240, 21753]  # by a scalar SplitMix64, seeds 0x68fd1e64 + column * its increment


@pytest.mark.parametrize(
    ("field", "got", "message"),
    [
        (0, b"2", "the label must be 0 or 1, got '2'"),
        (1, b"1.5", "I1 must be an integer of at most 18 digits or empty, got '1.5'"),
        (13, b"1_0", "I13 must be an integer"),
        (5, b"9" * 19, "I5 must be an integer of at most 18 digits"),
        (14, b"0xff", "C1 must be a hexadecimal number of at most 16 digits or empty, got '0xff'"),
        (39, b"\xff\x00", "C26 must be a hexadecimal number"),
        (4, b"1\t2", "expected 40 tab-separated fields, got 41"),
    ],
)
def test_a_bad_field_is_named_with_what_was_got(field, got, message):
    fields = numbered(7).split(b"\t")
    fields[field] = got
    with pytest.raises(ValueError, match=re.escape(message)):
        check_row(b"\t".join(fields))


@given(
    rows,
    st.sampled_from([0, 1, 13, 14, 39]) | st.integers(0, 39),
    st.binary(max_size=4).filter(lambda noise: not set(noise) & set(b"\r\n")),
    st.booleans(),
)
def test_what_is_not_called_bad_parses(row, field, noise, in_front):
    fields = line_of(*row).split(b"\t")
    changed = noise + fields[field] if in_front else fields[field] + noise
    line = b"\t".join([*fields[:field], changed, *fields[field + 1 :]])
    try:
        check_row(line)
    except ValueError:
        return
    assert len(parse_rows([line], BIG)) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(0, 90),
    cuts=st.lists(st.integers(0, 90), max_size=3),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    num_workers=st.integers(1, 3),
    holdout_every=st.integers(3, 6),
)
def test_every_row_goes_to_one_rank_one_process_and_one_split(
    tmp_path, num_rows, cuts, batch_size, world_size, num_workers, holdout_every
):
    """All groups but the last incomplete one are covered once, and the ranks have equally many batches."""
    group_size = batch_size * world_size
    num_groups = num_rows // group_size
    ends = sorted(min(cut, num_rows) for cut in cuts)
    pieces = zip([0, *ends], [*ends, num_rows], strict=True)
    paths = [
        write(tmp_path / f"part{i}{'.gz' if i % 2 else ''}", [numbered(n) for n in range(*piece)])
        for i, piece in enumerate(pieces)
    ]
    held = {holdout_every - 1, holdout_every - 2}
    splits = [{remainder} for remainder in held] + [set(range(holdout_every)) - held]
    seen: list[int] = []
    for remainders in splits:
        kept = [place in remainders for place in range(holdout_every)]
        num_split = sum(group % holdout_every in remainders for group in range(num_groups))
        for rank in range(world_size):
            stream = CriteoStream(paths, BIG, batch_size, rank, world_size, kept)
            if num_split == 0:
                said = rf"no complete batch-group .* {group_size} rows\.\n  got: {num_rows} rows"
                with pytest.raises(ValueError, match=said):
                    list(stream._batches(0, 0, 1))
                continue
            parts = [batches(stream._batches(0, worker, num_workers)) for worker in range(num_workers)]
            in_turn = [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]
            assert in_turn == batches(stream._batches(0, 0, 1))  # processes change nothing
            assert [len(batch) for batch in in_turn] == [batch_size] * num_split
            seen += [number for batch in in_turn for number in batch]
    assert sorted(seen) == list(range(num_groups * group_size))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are fewer cores
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_read_in_file_order_and_resume(tmp_path, num_workers):
    path = write(tmp_path / "day_0.gz", [numbered(n) for n in range(47)])
    data = CriteoDataModule(path, batch_size=3, num_workers=num_workers, holdout_every=0)
    whole = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(15)]
    loader = data.train_dataloader()
    assert batches(loader) == whole
    stopped = data.train_dataloader()
    assert batches(islice(stopped, 5)) == whole[:5]
    loader.load_state_dict(stopped.state_dict())
    assert batches(loader) == whole[5:]
    assert batches(loader) == whole  # and the processes that persist forget it


def test_validation_and_test_are_held_out_groups_where_they_have_no_paths(tmp_path):
    path = write(tmp_path / "rows.tsv", [numbered(n) for n in range(20)])
    data = CriteoDataModule(path, batch_size=2, holdout_every=4)
    assert batches(data.val_dataloader()) == [[6, 7], [14, 15]]
    assert batches(data.test_dataloader()) == [[4, 5], [12, 13]]
    assert batches(data.train_dataloader()) == [[0, 1], [2, 3], [8, 9], [10, 11], [16, 17], [18, 19]]
    own = write(tmp_path / "val.tsv", [numbered(n) for n in range(100, 104)])
    data = CriteoDataModule(path, batch_size=2, val_path=own, holdout_every=2)
    data.trainer = FakeTrainer(1, 2)  # the second of two ranks
    assert batches(data.val_dataloader()) == [[102, 103]]
    assert batches(data.test_dataloader()) == [[2, 3], [10, 11], [18, 19]]
    assert batches(data.train_dataloader()) == [[6, 7], [14, 15]]
    assert CriteoDataModule(path, batch_size=2, holdout_every=0).val_dataloader() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_is_an_error_with_its_place(tmp_path, num_workers):
    path = write(tmp_path / "rows.tsv", [numbered(0), numbered(1), numbered(2), b"7" + numbered(3)[1:]])
    data = CriteoDataModule(path, 2, num_workers=num_workers, holdout_every=0, persistent_workers=False)
    loader = iter(data.train_dataloader())
    assert numbers_of(next(loader)) == [0, 1]
    with pytest.raises(ValueError, match=r"rows\.tsv:4: the label must be 0 or 1, got '7'") as caught:
        next(loader)
    traceback.clear_frames(caught.tb)  # ends a loader process now; the garbage collector would wait for it


def test_a_folder_a_glob_and_a_list_stand_for_their_files(tmp_path):
    files = [write(tmp_path / name, [numbered(0)]) for name in ("day_0.gz", "day_1.gz", "notes.tsv")]
    write(tmp_path / ".hidden", [])
    assert resolve_paths(tmp_path) == files
    assert resolve_paths(str(tmp_path / "day_*")) == files[:2]
    assert resolve_paths([files[2], str(tmp_path / "*.gz")]) == [files[2], *files[:2]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="is an empty folder"):
        resolve_paths(tmp_path / "empty")


def test_a_folder_that_may_not_be_read_is_not_called_empty(tmp_path):
    refuses = {"side_effect": PermissionError}
    with mock.patch("os.listdir", **refuses), mock.patch("os.scandir", **refuses), pytest.raises(PermissionError):
        resolve_paths(tmp_path)


def test_empty_lines_and_windows_line_ends_are_no_trouble(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_bytes(numbered(0) + b"\r\n\n" + numbered(1) + b"\r\n\n")
    assert batches(CriteoStream([path], BIG, batch_size=2)) == [[0, 1]]


@pytest.mark.parametrize(
    ("which", "name", "content", "error", "message"),
    [
        ("path", "absent.tsv", None, FileNotFoundError, "absent.tsv' does not exist"),
        ("val_path", "absent*.tsv", None, FileNotFoundError, r"absent\*.tsv' matches no file"),
        ("test_path", "empty.tsv", b"", ValueError, "empty.tsv:1: the file has no rows"),
        ("path", "comma.csv", b"1,2,3\n", ValueError, "comma.csv:1: expected 40 tab-separated fields, got 1: '1,2,3'"),
        ("val_path", "plain.gz", numbered(0), ValueError, "plain.gz:1: the compressed file is damaged"),
        (
            "test_path",
            "c.gz",
            gzip.compress(numbered(0), mtime=0)[:-20],
            ValueError,
            "c.gz:1: the compressed file is damaged",
        ),
    ],
)
def test_check_names_what_cannot_be_read(tmp_path, which, name, content, error, message):
    good = write(tmp_path / "good.tsv", [numbered(0)])
    CriteoDataModule(good, val_path=tmp_path).check()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    data = CriteoDataModule(**{"path": good, which: str(tmp_path / name)})
    for check in (data.check, lambda: data.setup("fit")):
        with pytest.raises(error, match=message):
            check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows_per_table": [10] * 25}, "each of the 26 tables"),
        ({"holdout_every": 2}, "holdout_every must be at least 3"),
        ({"holdout_every": -1, "val_path": "a", "test_path": "b"}, "holdout_every must be at least 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CriteoDataModule("rows.tsv", **arguments)
