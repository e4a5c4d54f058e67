"""Law 12 in object stores: a crash between any two changes of a store leaves whole checkpoints, and "last" is one."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.storage import is_address, place_at

from ..support.ranks import Ranks
from . import stores
from .crashes import NUM_STEPS, check


@pytest.mark.parametrize("how", ["sharded", "async", "incremental", "renewed, async"])
def test_a_crash_at_any_change(get_ranks: Any, how: str, tmp_path: Path) -> None:
    num_steps = NUM_STEPS + how.startswith("renewed")
    [(left, names, began, lost)] = get_ranks(1).run(stores.fit_and_crash, str(tmp_path), how, 3, num_steps)
    check(left)
    assert len(left) > 20
    assert names == ["last.ckpt", f"step={num_steps}.ckpt"]
    assert len(began) == 3
    assert all(began.values())
    assert not lost


@pytest.mark.parametrize("how", ["sharded", "async", "incremental", "renewed"])
def test_a_fit_resumes_from_a_store(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    for whole, resumed in two_ranks.run(stores.fit_and_resume, str(tmp_path), how):
        assert torch.equal(whole.losses[-len(resumed.losses) :], resumed.losses)


@pytest.mark.parametrize("how", ["sharded", "async", "full"])
def test_every_rank_says_that_a_store_refuses(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    """Wherever it happens: the ranks raise alike, and go on from a whole checkpoint."""

    @settings(max_examples=4, database=None)
    @given(st.integers(0, 1 - (how == "full")), st.integers(1, 40 if how != "full" else 6))
    def refuse(rank: int, num: int) -> None:
        folder = str(tmp_path / uuid.uuid4().hex)
        (said, began), (said_too, began_too) = two_ranks.run(stores.fail_a_change, folder, rank, num, how)
        assert said == said_too
        assert began == began_too
        assert said.startswith("could not write the checkpoint objects://bucket/run/") or began == 3
        assert "this store has had enough" in said or (began == 3 and how != "full")

    refuse()


@pytest.mark.parametrize("how", ["sharded", "incremental"])
def test_folders_that_are_copied_by_hand(get_ranks: Any, how: str, tmp_path: Path) -> None:
    """From a store, in a folder of any name, to a disk, and from a disk to it."""
    get_ranks(1).run(stores.copy_by_hand, tmp_path, how, "objects://bucket/a b+c=0.1,(x)&y;z@w:!50%_%2F ü表[1]*?#~")


@pytest.mark.parametrize("formats", [("incremental", "full", "sharded"), ("sharded", "full", "incremental")], ids=str)
def test_another_format_in_the_same_folder(get_ranks: Any, formats: tuple[str, ...], tmp_path: Path) -> None:
    """What one fit removes, in any format, is what no checkpoint of an earlier one needs."""
    [names] = get_ranks(1).run(stores.change_the_format, str(tmp_path), formats)
    assert names == ["last.ckpt", "step=8.ckpt", "step=9.ckpt"]


@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_store_that_needs_a_key(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    """fsspec's configuration gives it to saves, removals, "last" and loads; messages do not show it."""
    for told in two_ranks.run(stores.fit_with_keys, str(tmp_path / "store"), how):
        keys = ["''", "''", "'***'", "'***'"]
        assert [key for key, one in zip(keys, told, strict=True) if f"{key} does not open bucket/run" in one] == keys


def test_a_store_that_does_not_answer(two_ranks: Ranks, tmp_path: Path) -> None:
    """This is an error, and does not mean that there is no checkpoint."""
    for told in two_ranks.run(stores.resume_without_an_answer, str(tmp_path / "store")):
        assert [one for one in told if "ConnectionError: no answer about bucket/run/last.ckpt" not in one] == []


def test_addresses_of_a_plugin(two_ranks: Ranks, tmp_path: Path) -> None:
    """A CheckpointIO of the user's keeps full files where only it can."""
    for told in two_ranks.run(stores.save_load_and_remove_elsewhere, str(tmp_path)):
        assert told == ["0 ['a.ckpt']", "2 ['a.ckpt']", "[]"]


characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.sampled_from(["s3", "gs", "memory", "objects"]), characters, characters)
def test_what_is_an_address(protocol: str, start: str, rest: str) -> None:
    """A path without "://" is one of a disk, whatever else is in it; with fsspec's name of a disk too."""
    assert is_address(f"{protocol}://bucket/{rest}")
    path = f"{start}/{rest}".replace("://", "")
    for prefix in ("", "/", "./", "file://", "local://"):
        assert not is_address(prefix + path)
        assert str(place_at(prefix + path)) == str(Path(prefix.partition("://")[0] * ("://" not in prefix) + path))


def test_a_store_that_keeps_everything(get_ranks: Any, tmp_path: Path) -> None:
    """Training goes on."""
    [said] = get_ranks(1).run(stores.refuse_removals, str(tmp_path / "store"))
    assert len(said) > 3
    assert all(
        one.startswith("the checkpoint is whole, but old files may be left: cannot remove files") for one in said
    )
