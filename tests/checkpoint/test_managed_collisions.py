"""Checkpoints of managed collision modules: ids keep their rows and states, on as many ranks and on others."""

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_overlap.consolidate import main as consolidate

from ..support.draws import few
from ..support.pairs import in_turn
from ..support.ranks import RankError, Ranks
from ..support.saved import is_increment
from . import collisions
from .collisions import EPOCH, Setting, drawn_settings
from .test_consolidate import differences


def test_a_resumed_fit_equals_one_that_was_not_stopped(two_ranks: Ranks) -> None:
    """With any interval between evictions; dropout draws from the generator that evictions draw from."""

    @few(max_examples=6)
    @given(
        setting=drawn_settings(),
        stop=st.integers(0, 2 * EPOCH - 1),
        num_val=st.sampled_from([0, 2]),
        form=st.sampled_from(["sharded", "incremental", "full"]),
        async_checkpoint=st.booleans(),
    )
    @example(setting=Setting(interval=5), stop=3, num_val=0, form="sharded", async_checkpoint=False)
    @example(setting=Setting("lru", interval=4), stop=0, num_val=2, form="sharded", async_checkpoint=False)
    @example(setting=Setting(interval=1), stop=8, num_val=0, form="incremental", async_checkpoint=True)
    def holds(setting: Setting, stop: int, num_val: int, form: str, async_checkpoint: bool) -> None:
        options = {"checkpoint_format": form, "async_checkpoint": async_checkpoint and form != "full"}
        with TemporaryDirectory() as folder:
            found = two_ranks.run(collisions.resume_differs, setting, folder, stop, num_val=num_val, **options)
            has_rows_only = is_increment(Path(folder, f"step={stop}.ckpt" if stop else "epoch=0.ckpt"))
        assert found == [[], []]
        assert has_rows_only == (form == "incremental" and stop != 1)

    holds()


def test_a_fit_resumed_from_any_hook_equals_one_that_was_not_stopped(ranks: Ranks) -> None:
    """The loaders of validations draw from the generator that evictions draw from."""

    @few(max_examples=5)
    @given(
        setting=drawn_settings(),
        hook=st.sampled_from(collisions.HOOKS),
        nth=st.integers(1, 2),
        form=st.sampled_from(["sharded", "incremental", "full"]),
        pipeline=st.sampled_from(["base", "fused_sparse_dist"]),
    )
    @example(setting=Setting(), hook="on_validation_start", nth=2, form="sharded", pipeline="base")
    @example(setting=Setting(), hook="on_validation_batch_end", nth=3, form="full", pipeline="fused_sparse_dist")
    def holds(setting: Setting, hook: str, nth: int, form: str, pipeline: str) -> None:
        with TemporaryDirectory() as folder:
            found = ranks.run(collisions.resume_from_hook, setting, folder, hook, nth, form, pipeline)
        assert found == [[]] * ranks.world_size

    holds()


@pytest.mark.parametrize(("hook", "form"), in_turn(collisions.MID_STEP, ["sharded", "incremental", "full"]))
def test_a_save_in_the_middle_of_a_step_is_refused(two_ranks: Ranks, hook: str, form: str, tmp_path: Path) -> None:
    for said, is_there in two_ranks.run(collisions.refused_in_step, Setting(), str(tmp_path), hook, form):
        assert "cannot be saved in the middle of a step" in said
        assert "on_train_batch_end" in said
        assert not is_there


def test_ids_move_to_other_ranks(get_ranks: Callable[..., Ranks]) -> None:
    """Every id that fits has its row, its optimizer state and what the policy knows of it; lookups are equal."""

    @few(max_examples=4)
    @given(
        setting=drawn_settings(),
        sizes=st.sampled_from([(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2)]),
        forms=st.tuples(
            st.sampled_from(["full", "sharded", "incremental"]), st.sampled_from(["full", "sharded", "incremental"])
        ),
    )
    @example(setting=Setting("distance", interval=3), sizes=(1, 2), forms=("sharded", "full"))
    @example(setting=Setting("lru", interval=1), sizes=(2, 1), forms=("full", "sharded"))
    @example(setting=Setting(interval=1), sizes=(2, 1), forms=("incremental", "incremental"))
    def holds(setting: Setting, sizes: tuple[int, int], forms: tuple[str, str]) -> None:
        before, after = map(get_ranks, sizes)
        with TemporaryDirectory() as folder:
            [(saved, looked_up), *_] = before.run(collisions.save, setting, folder, forms[0])
            assert is_increment(Path(folder, "step=8.ckpt")) == (forms[0] == "incremental")
            [(moved, looked_up_there), *_] = after.run(collisions.load, setting, folder, forms[1])
            [(back, _), *_] = before.run(collisions.load, setting, folder, forms[1], "two", "three")
        for table, rows in saved.rows.items():
            evicted = rows.keys() - moved.rows[table].keys()
            said = sum(f" {len(evicted)} of the checkpoint's {len(rows)} ids" in text for text in moved.warned)
            assert said == bool(evicted)
            for found, older in ((moved, saved), (back, moved)):
                assert found.rows[table].items() <= older.rows[table].items()
                assert found.metadata[table].items() <= older.metadata[table].items()
            assert moved.seen == back.seen == saved.seen
            assert moved.numbers == back.numbers == saved.numbers
            assert len(moved.places[table]) == len(rows) - len(evicted)
            assert looked_up_there[table].items() <= looked_up[table].items()
            if sizes[0] == 1:
                assert moved.unknown[table] == saved.unknown[table] * sizes[1]
            if sizes[1] == 1:
                means = [sum(column) / sizes[0] for column in zip(*saved.unknown[table], strict=True)]
                assert moved.unknown[table] == [pytest.approx(means, rel=1e-6)]
            assert {one: row[: collisions.DIM] for one, row in rows.items()} == looked_up[table]

    holds()


def test_a_consolidated_folder_is_a_full_file(get_ranks: Callable[..., Ranks]) -> None:
    """Of the same step, entry by entry; the unsharded module looks known ids up as the ranks do."""

    @few(max_examples=3)
    @given(
        setting=drawn_settings(),
        size=st.integers(1, 3),
        form=st.sampled_from(["sharded", "incremental"]),
        step=st.integers(EPOCH + 1, 2 * EPOCH),
    )
    @example(setting=Setting(interval=1), size=2, form="sharded", step=8)
    @example(setting=Setting("lru", interval=2), size=2, form="incremental", step=9)
    def holds(setting: Setting, size: int, form: str, step: int) -> None:
        with TemporaryDirectory() as folder:
            [looked_up, *_] = get_ranks(size).run(collisions.save_both, setting, folder, form, step)
            assert is_increment(Path(folder, f"folder={step}.ckpt")) == (form == "incremental")
            one, other = f"{folder}/one.ckpt", f"{folder}/full.ckpt"
            assert consolidate([f"{folder}/folder={step}.ckpt", one]) == 0
            assert differences(*(torch.load(path, weights_only=True) for path in (one, other))) == []
            ids = {table: sorted(rows) for table, rows in looked_up.items()}
            assert all(ids.values())
            assert collisions.load_unsharded(setting, one, ids) == looked_up

    holds()


def test_rows_that_a_table_has_not_are_an_error_on_every_rank(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    setting = Setting(interval=1)
    get_ranks(1).run(collisions.save, setting, str(tmp_path), "full")
    checkpoint = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    [rows] = [value for key, value in checkpoint["state_dict"].items() if key.endswith("t1._mch_remapped_ids_mapping")]
    rows[0] = 24
    torch.save(checkpoint, tmp_path / "step=8.ckpt")
    with pytest.raises(RankError, match=r"ids of the table mc\.\S+t1\.weight rows outside of its 24 rows"):
        get_ranks(2).run(collisions.load, setting, str(tmp_path), "full", timeout_s=40)


def test_hashed_ids_are_refused_in_increments(two_ranks: Ranks) -> None:
    for said, num_steps in two_ranks.run(collisions.refused_increments):
        assert re.match(r"mc\.\S+ \(HashZch\w+\): checkpoint_format='incremental' holds .* Use .*'sharded'", said)
        assert num_steps == 0
