"""Checkpoints keep every shard and the fused optimizers' state; going on from one equals not stopping."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.storage import SHARED

from ..support.cases import ADAGRAD, MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case, Model, TableSpec
from ..support.pairs import in_turn
from ..support.ranks import RankError, Ranks
from ..support.saved import files_of, is_increment, manifest_of, saves_of_rows
from . import checkpoints, saves
from .checkpoints import EPOCH, DenseAdam, Keyed, Scheduled, Trained, train, whole

FORMATS = ("sharded", "full", "incremental")


def test_tables_written_while_rows_are_copied(two_ranks: Ranks, tmp_path: Path) -> None:
    """An asynchronous increment cannot have their old values: it is an error, and the checkpoint before is there."""
    for said, steps in two_ranks.run(saves.write_after_a_save, str(tmp_path)):
        assert "step=3.ckpt: tables were written other than by their backward while the changed rows were" in said
        assert steps == ["step=1.ckpt", "step=2.ckpt"]


def test_what_training_stands_for_while_an_increment_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    """They exchange the path and a vote, and rank 0 gets what each has; no file is written until the next backward."""
    exchanges = ["broadcast_object_list", "all_gather_object", "gather_object"] if ranks.world_size > 1 else []
    for found, largest_to_all in ranks.run(saves.save_beside_training, str(tmp_path)):
        assert [what for what, _ in found] == ["whole", "rows", "rows"]
        assert [seen for what, seen in found if what == "rows"] == [exchanges] * 2
        assert largest_to_all < saves.STATE_BYTES, "the loader's state goes to rank 0 alone"


def test_a_loader_state_that_one_rank_cannot_send(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks.run(saves.save_what_cannot_be_sent, str(tmp_path / "a.ckpt")):
        assert said == "TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize("others", [False, True], ids=["", "weights, too"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("most", "rows"),
    [(0, [set(), {"1"}, set(), {"2"}, set()]), (10, [set(), {"1"}, {"1", "2"}, {"1", "2", "3"}, {"1", "2", "3", "4"}])],
    ids=["whole again", "increments"],
)
def test_a_checkpoint_is_whole_once_rows_are_many(
    two_ranks: Ranks, most: float, rows: list[set[str]], asynchronous: bool, others: bool, tmp_path: Path
) -> None:
    save = partial(saves.save_each_step, asynchronous=asynchronous, most=most, others=others)
    first, second = two_ranks.run(save, str(tmp_path))
    assert [one.saves_of_rows for one in first] == rows
    assert all(one.is_exact for one in [*first, *second])
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"{step}.ckpt" for step in range(1, 6)), SHARED]


def test_increments_of_one_name_keep_nothing_that_no_checkpoint_lists(two_ranks: Ranks, tmp_path: Path) -> None:
    save = partial(saves.save_each_step, asynchronous=False, most=0, name="a.ckpt")
    two_ranks.run(save, str(tmp_path))
    listed = {save for save in manifest_of(tmp_path / "a.ckpt").saves() if save.startswith(SHARED)}
    assert {f"{SHARED}/{path.name}" for path in (tmp_path / SHARED).iterdir()} == listed


def test_how_many_rows_are_many(two_ranks: Ranks, tmp_path: Path) -> None:
    save = partial(saves.save_each_step, asynchronous=False)
    (whole, first, second, *_), _ = two_ranks.run(save, str(tmp_path / "a"), most=10)
    most = (first.num_bytes + second.num_bytes) / 2 / whole.num_bytes  # between the rows of one and of both
    found, _ = two_ranks.run(save, str(tmp_path / "b"), most=most)
    assert [one.saves_of_rows for one in found] == [set(), {"1"}, {"1", "2"}, set(), {"3"}]
    assert all(one.is_exact for one in found)


@pytest.fixture(params=FORMATS)
def checkpoint_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_same_tables(loaded: list[Trained], saved: list[Trained]) -> None:
    before, after = whole(saved), whole(loaded)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def goes_on(ranks: Ranks, case: Case, folder: Path, **kwargs: Any) -> list[Trained]:
    all_at_once = ranks.run(train, case, str(folder / "a"), epochs=2, **kwargs)
    path = str(folder / "a" / "epoch=0.ckpt")
    resumed = ranks.run(train, case, str(folder / "b"), epochs=2, resume=path, **kwargs)
    assert_goes_on(all_at_once, resumed)
    return resumed


def assert_goes_on(expected: list[Trained], resumed: list[Trained]) -> None:
    for rank, other in zip(resumed, expected, strict=True):
        assert len(rank.result.losses) == EPOCH
        other.result.losses = other.result.losses[-EPOCH:]
        assert rank.result.differences(other.result) == []
        assert torch.equal(rank.whole["kernels"][0][1], other.whole["kernels"][0][1])


@pytest.mark.parametrize(
    ("case", "model_class"),
    [*((case, Scheduled) for case in (ROWWISE_ADAGRAD, MIXED, SEQUENCE)), (ROWWISE_ADAGRAD, Keyed)],
    ids=["rowwise_adagrad", "mixed", "sequence", "keyed"],
)
def test_resume_equals_not_stopping(
    ranks: Ranks, case: Case, model_class: type[Model], checkpoint_format: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint_format": checkpoint_format, "most_increments": 10}
    goes_on(ranks, case, tmp_path, model_class=model_class, **options)
    assert (tmp_path / "a" / "epoch=0.ckpt").is_dir() == (checkpoint_format != "full")
    assert checkpoint_format == "full" or is_increment(tmp_path / "a" / "epoch=0.ckpt") == (
        checkpoint_format == "incremental"
    )


def test_a_hook_after_training_loads_the_state_of_fused_optimizers(
    two_ranks: Ranks, checkpoint_format: str, tmp_path: Path
) -> None:
    both = two_ranks.run(saves.load_at_the_end, ROWWISE_ADAGRAD, str(tmp_path / "a.ckpt"), checkpoint_format)
    assert_same_tables([loaded for _, loaded in both], [saved for saved, _ in both])


def test_a_folder_above_one_rank_and_a_plain_file_on_one(ranks: Ranks, tmp_path: Path) -> None:
    [first, *_] = ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path))
    path = Path(first.checkpoint)
    assert path.is_dir() == (ranks.world_size > 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # nothing unfinished left


@pytest.mark.parametrize("case", [ROWWISE_ADAGRAD, MIXED], ids=lambda case: case.name)
def test_a_full_file_serves(ranks: Ranks, get_ranks: Any, case: Case, tmp_path: Path) -> None:
    trained = ranks.run(train, case, str(tmp_path), checkpoint_format="full")
    [weights] = get_ranks(1).run(checkpoints.load_unsharded, case, trained[0].checkpoint)
    tables = whole(trained)
    for table in case.tables:
        assert torch.equal(weights[f"ebc.embedding_bags.{table.name}.weight"], tables[table.name])
    for name, value in trained[0].result.dense.items():
        assert torch.equal(weights[name], value)


PLANS = ("1 0", "cw cw", "rw rw")


@pytest.mark.parametrize(
    ("first", "checkpoint_format", "case"),
    [
        ("cw cw", "sharded", ROWWISE_ADAGRAD),  # whose state of a column has no exact counterpart
        ("cw cw", "full", ROWWISE_ADAGRAD),
        ("cw cw", "incremental", ROWWISE_ADAGRAD),
        ("rw rw", "incremental", ROWWISE_ADAGRAD),
        ("1 0", "sharded", ADAGRAD),
        ("cw cw", "incremental", ADAGRAD),
        ("rw rw", "full", ROWWISE_ADAGRAD),
        ("cw cw", "full", ADAGRAD),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_another_plan(two_ranks: Ranks, first: str, checkpoint_format: str, case: Case, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_format": checkpoint_format, "most_increments": 10}
    saved = two_ranks.run(train, case, str(tmp_path / first), plan=first, **options)
    if checkpoint_format == "incremental":
        assert len(saves_of_rows(saved[0].checkpoint)) == 2
    before = whole(saved)
    for second in PLANS:
        loaded = two_ranks.run(train, case, str(tmp_path / "_"), plan=second, resume=saved[0].checkpoint)
        averaged = case is ROWWISE_ADAGRAD and first == "cw cw" and second != "cw cw"
        after = whole(loaded)
        assert after.keys() == before.keys()
        for name, value in after.items():
            expected = before[name]
            if averaged and "momentum" in name:
                expected = expected.double().mean(1, keepdim=True).float().expand_as(expected)
            assert torch.equal(value, expected), (first, second, name)
        assert any("averaged over them" in said for rank in loaded for said in rank.warnings) == averaged


def test_tables_that_change_ranks_train_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path) -> None:
    all_at_once = two_ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path / "a"), epochs=2, plan="0 1")
    path = str(tmp_path / "a" / "epoch=0.ckpt")
    swapped = two_ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path / "b"), epochs=2, plan="1 0", resume=path)
    for mine, theirs in zip(swapped, all_at_once, strict=True):
        assert torch.equal(mine.result.losses, theirs.result.losses[EPOCH:])
    assert_same_tables(swapped, all_at_once)


@pytest.mark.parametrize(("save_on", "load_on"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(
    get_ranks: Any, save_on: int, load_on: int, checkpoint_format: str, tmp_path: Path
) -> None:
    for case in (ROWWISE_ADAGRAD, MIXED):
        folder = str(tmp_path / case.name)
        saved = get_ranks(save_on).run(train, case, folder, checkpoint_format=checkpoint_format)
        loaded = get_ranks(load_on).run(train, case, str(tmp_path / "_"), resume=saved[0].checkpoint)
        assert_same_tables(loaded, saved)
        for name, value in saved[0].result.dense_state.items():
            assert torch.equal(loaded[0].result.dense_state[name], value)
        assert torch.equal(loaded[0].whole["kernels"][0][1], saved[0].whole["kernels"][0][1])
        assert [rank.warnings for rank in loaded] == [[]] * load_on


def test_ranks_without_a_row_of_a_table(get_ranks: Any) -> None:
    assert get_ranks(3).run(checkpoints.copy_one_row) == [[(1, 4)], [(0, 4)], [(0, 4)]]


def test_a_table_that_changes_its_trainer(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    run = partial(two_ranks.run, train, ROWWISE_ADAGRAD, model_class=DenseAdam)
    for first, second in (("0 1", "0 dp"), ("0 dp", "0 1")):
        saved = run(str(tmp_path / first), plan=first, checkpoint_format=checkpoint_format)
        loaded = run(str(tmp_path / "_"), plan=second, resume=saved[0].checkpoint)
        before, after = whole(saved), whole(loaded)
        assert torch.equal(after["t1"], before["t1"])
        assert torch.equal(after["t0 momentum1"], before["t0 momentum1"])
        said = " ".join(loaded[0].warnings)
        assert "ebc.embedding_bags.t1.weight: " in said
        assert "ebc.embedding_bags.t0.weight" not in said
        assert ("it is reset" if second == "0 1" else "the dense optimizer trains these tables now") in said
        if second == "0 1":
            assert after["t1 momentum1"].eq(0).all()


def test_tables_may_be_called_anything(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    """Dense kernels of two of them keep the state of their shards in the dense optimizer."""
    names = ("user/id", "a/b/c d", "t[0]", "t[1]", "ü [:, 0:4]")
    tables = tuple(TableSpec(name, (f"f{index}",)) for index, name in enumerate(names))
    case = Case("names", tables, optimizer=ROWWISE_ADAGRAD.optimizer)
    kwargs: dict[str, Any] = {"plan": "dense dense cw cw cw", "model_class": DenseAdam}
    resumed = goes_on(two_ranks, case, tmp_path, checkpoint_format=checkpoint_format, **kwargs)
    assert "a/b/c d exp_avg" in resumed[1].result.dense_state


def test_another_fused_optimizer_is_named(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    path = two_ranks.run(train, ADAGRAD, str(tmp_path), plan="0 0", checkpoint_format=checkpoint_format)[0].checkpoint
    for said in two_ranks.run(checkpoints.load_from, ROWWISE_ADAGRAD, path):
        assert "was saved with momentum1, this run's has momentum1 (row-wise)" in said
        assert "(saved with Adagrad, this run has RowWiseAdagrad): load with the fused optimizer that" in said
        assert "was saved with, fused_optimizer=(Adagrad, ...). Or keep only the weights: " in said
    assert two_ranks.run(checkpoints.load_from, ADAGRAD, path) == ["loaded"] * 2


def test_a_schedule_that_only_the_checkpoint_has(two_ranks: Ranks, tmp_path: Path) -> None:
    run = partial(two_ranks.run, train, ROWWISE_ADAGRAD, model_class=checkpoints.SteppedAtFirst)
    path = run(str(tmp_path / "a"))[0].checkpoint
    first, second = run(str(tmp_path / "b"), epochs=2, resume=path)
    [said] = first.warnings
    assert said.startswith("the checkpoint has 1 learning-rate scheduler(s), this run has none: ")
    assert second.warnings == []


def test_validate_test_and_predict(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    trained = two_ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path), checkpoint_format=checkpoint_format)
    tables = {f"ebc.embedding_bags.{name}.weight": value for name, value in whole(trained).items() if " " not in name}
    weights = tables | trained[0].result.dense
    expected = two_ranks.run(checkpoints.evaluate, ROWWISE_ADAGRAD, None, "validate", weights)
    for fn in ("validate", "test", "predict"):
        losses = two_ranks.run(checkpoints.evaluate, ROWWISE_ADAGRAD, trained[0].checkpoint, fn)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(losses, expected, strict=True))


def test_a_checkpoint_has_the_buffers_of_rank_0_and_the_entries_of_the_user(
    two_ranks: Ranks, checkpoint_format: str, tmp_path: Path
) -> None:
    results = two_ranks.run(checkpoints.save_and_load_state, str(tmp_path / "a.ckpt"), checkpoint_format)
    of_ranks = [trained for trained, _, _ in results]
    assert not torch.equal(of_ranks[0][0], of_ranks[1][0])
    for _, loaded, entries in results:
        assert torch.equal(torch.stack(loaded), torch.stack(of_ranks[0]))
        assert entries == checkpoints.ENTRIES


def test_lightnings_consolidate_command(two_ranks: Ranks, get_ranks: Any, tmp_path: Path) -> None:
    all_at_once = two_ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path / "a"), epochs=2)
    path = str(files_of(tmp_path / "a" / "epoch=0.ckpt")["meta.pt"].parent)
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", path]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    [weights] = get_ranks(1).run(checkpoints.load_unsharded, ROWWISE_ADAGRAD, f"{path}.consolidated")
    assert weights["ebc.embedding_bags.t1.weight"].shape == (120, 8)
    resumed = two_ranks.run(train, ROWWISE_ADAGRAD, str(tmp_path / "b"), epochs=2, resume=f"{path}.consolidated")
    assert_goes_on(all_at_once, resumed)


@pytest.mark.parametrize(("how", "save_last"), in_turn(["sharded", "full", "async"], [True, "link"]))
def test_model_checkpoint(two_ranks: Ranks, how: str, save_last: Any, tmp_path: Path) -> None:
    options = {"async_checkpoint": True} if how == "async" else {"checkpoint_format": how}
    reports = two_ranks.run(checkpoints.train_with_savers, str(tmp_path), save_last, **options)
    # Rank 0 removes old ones.
    kept = ["epochs/epoch=1", "epochs/epoch=2", "steps/last", "steps/step=16"]
    assert reports[0]["there"] == [f"{name}.ckpt" for name in kept]
    for report in reports:
        assert (report["best"], report["steps"], report["trained"]) == ("epoch=2.ckpt", 4 * EPOCH, 4 * EPOCH - 16)
    said = "lightning_overlap: training continues after step 16"
    assert [report["said"] for report in reports] == [[said], *[[] for _ in reports[1:]]]


@pytest.mark.parametrize("case", [ROWWISE_ADAGRAD, MIXED], ids=lambda case: case.name)
def test_an_asynchronous_save_holds_the_state_of_its_step(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saved = ranks.run(saves.save_while_training, case, str(path))
    assert not any(whole_at_once for _, whole_at_once in saved)
    trained = [rank for rank, _ in saved]
    assert_same_tables(ranks.run(train, case, str(tmp_path / "_"), resume=str(path), max_steps=2), trained)
    now = trained[0].result.tables["t0 [0, 0]"]
    assert not torch.equal(now, whole(trained)["t0"]), "nothing was trained meanwhile"


def test_a_save_in_an_evaluation_ends_there(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(saves.save_in_an_evaluation, str(tmp_path / "a.ckpt")) == [True] * 2


def test_an_asynchronous_save_that_fails_is_an_error_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    for message in two_ranks.run(saves.fail_while_training, str(tmp_path / "a.ckpt")):
        assert re.search("could not write the checkpoint .*no space left", message)
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_an_error_beside_an_asynchronous_save(get_ranks: Any, disk_is_full: bool, tmp_path: Path) -> None:
    """It is the one that is raised; a callback may broadcast while it is handled."""
    ranks = get_ranks(2)
    path = tmp_path / "a.ckpt"
    for said, notes, heard in ranks.run(saves.fail_beside_a_save, str(path), disk_is_full=disk_is_full):
        assert (said, heard) == ("the same on all ranks", 0)
        assert any("in the background has failed as well: no space left" in note for note in notes) == disk_is_full
    assert path.exists() != disk_is_full
    ranks.close()  # a run that failed leaves process groups behind


def test_a_failure_keeps_the_old_checkpoint(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for form in (*FORMATS, checkpoint_format):
        assert two_ranks.run(checkpoints.save_to, str(path), checkpoint_format=form) == ["saved"] * 2
    assert {entry.name for entry in tmp_path.iterdir()} <= {"last.ckpt", SHARED}
    for message in two_ranks.run(saves.save_and_fail, str(path), checkpoint_format):
        assert message == f"could not write the checkpoint {path}: OSError: no space left"
    assert two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path)) == ["loaded"] * 2


def test_a_killed_rank_keeps_the_old_checkpoint(get_ranks: Any, checkpoint_format: str, tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    get_ranks(2).run(checkpoints.save_to, path, checkpoint_format=checkpoint_format)
    with pytest.raises(RankError):
        get_ranks(2).run(saves.kill_while_saving, path, checkpoint_format)
    assert get_ranks(2).run(checkpoints.load_from, TABLE_WISE, path) == ["loaded"] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux")
def test_what_saving_holds(get_ranks: Any, tmp_path: Path) -> None:
    """In tables: each rank has three in one kernel. New processes, as malloc keeps freed memory of other tests."""
    get_ranks(2).close()
    two_ranks = get_ranks(2)
    for rank in two_ranks.run(saves.memory_of_saving, str(tmp_path / "sharded"), "sharded"):
        assert rank < 1.4
    first, second = two_ranks.run(saves.memory_of_saving, str(tmp_path / "full"), "full")
    assert first < 3.4  # those of rank 1
    assert second < 0.4


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"unknown checkpoint_format 'shard'. Did you mean 'sharded'\? Known: shard"):
        OverlapEmbeddingStrategy(checkpoint_format="shard")
    with pytest.raises(ValueError, match="async_checkpoint=True needs checkpoint_format='sharded'"):
        OverlapEmbeddingStrategy(checkpoint_format="full", async_checkpoint=True)


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        (
            "memory://me:secret@bucket/a.ckpt",
            None,
            "at memory://me:***@bucket/a.ckpt: each rank has a memory",
        ),
        ("{}/a.ckpt", {"option": 1}, "{}/a.ckpt is local, and storage_options are for an object store"),
        ("objects://bucket/a.ckpt", 1, "storage_options are options of fsspec's file system, by name, got a int"),
        ("http://bucket/a.ckpt", None, "cannot be at http://bucket/a.ckpt: the address must be one that is written to"),
        ("simplecache::memory://b/a.ckpt", None, "cannot be at simplecache::memory://b/a.ckpt: the address must be"),
        ("nonsense://b/a.ckpt", None, "cannot open nonsense://b/: ValueError: Protocol not known: nonsense"),
    ],
)
def test_where_no_folder_can_be(two_ranks: Ranks, address: str, options: Any, words: str, tmp_path: Path) -> None:
    for message in two_ranks.run(checkpoints.save_to, address.format(tmp_path), options):
        assert words.format(tmp_path) in message


def test_a_store_that_cannot_be_is_refused_before_training(two_ranks: Ranks) -> None:
    for said in two_ranks.run(checkpoints.fit_with_checkpoints_at, "memory://me:secret@bucket/runs"):
        assert said[0] == 0
        assert "cannot be at memory://me:***@bucket/runs" in said[1]
    for said in two_ranks.run(checkpoints.fit_with_checkpoints_at, "memory://bucket/runs", checkpoint_format="full"):
        assert said == [2, "trained"]


@pytest.mark.parametrize(
    ("full_on", "options"),
    [(0, {"checkpoint_format": "full"}), (0, {}), (1, {}), (1, {"async_checkpoint": True})],
    ids=str,
)
def test_every_rank_says_that_a_disk_is_full(
    two_ranks: Ranks, tmp_path: Path, full_on: int, options: dict[str, Any]
) -> None:
    """Here by a limit of the size of files, which has an error number of its own."""
    for said in two_ranks.run(checkpoints.save_on_a_full_disk, str(tmp_path), full_on, **options):
        assert re.search(r"could not write the checkpoint .*File too large", said), said


def test_loading_what_is_something_else(two_ranks: Ranks, tmp_path: Path) -> None:
    def load(name: str, case: Case = TABLE_WISE) -> str:
        first, second = two_ranks.run(checkpoints.load_from, case, str(tmp_path / name))
        assert first == second
        return first

    assert load("nothing.ckpt").startswith(f"FileNotFoundError: Checkpoint file not found: {tmp_path / 'nothing.ckpt'}")
    (tmp_path / (left := f".a.ckpt.{'0' * 32}.unfinished")).mkdir()
    assert f"an unfinished save left {left}" in load("a.ckpt")
    assert "is the leftover of an unfinished save" in load(left)
    for checkpoint_format in FORMATS:
        two_ranks.run(checkpoints.save_to, str(tmp_path / checkpoint_format), checkpoint_format=checkpoint_format)
        assert "ebc.embedding_bags.t2.weight" in load(checkpoint_format, ROWWISE_ADAGRAD)
        fused = replace(TABLE_WISE, optimizer=ADAGRAD.optimizer)
        assert "was saved with no state, this run's has momentum1" in load(checkpoint_format, fused)
        narrow = tuple(replace(table, dim=4) for table in TABLE_WISE.tables)
        said = load(checkpoint_format, replace(TABLE_WISE, tables=narrow))
        assert re.search(r"\b8.*\b4.*Was (it|the checkpoint) saved from other tables", said)
        assert re.search(r"ebc\.embedding_bags\.t\d\.weight", said)


def test_weights_only(two_ranks: Ranks, checkpoint_format: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plain")
    two_ranks.run(checkpoints.save_to, path, checkpoint_format=checkpoint_format)
    for fn in ("fit", "validate"):
        assert two_ranks.run(checkpoints.load_from, TABLE_WISE, path, fn, weights_only=True) == ["loaded"] * 2
