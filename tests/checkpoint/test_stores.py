"""Law 12 in object stores: a crash between any two changes of a store leaves whole checkpoints, and "last" is one."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.checkpoint import is_address, place_at

from ..support.ranks import Ranks
from . import stores
from .test_crashes import NUM_STEPS, check


@pytest.mark.parametrize("how", ["sharded", "async", "incremental"])
def test_a_crash_at_any_change(get_ranks: Any, how: str, tmp_path: Path) -> None:
    [(left, names, began, lost)] = get_ranks(1).run(stores.fit_and_crash, str(tmp_path), how, 3)
    check(left)
    assert len(left) > 20
    assert names == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert len(began) == 3
    assert all(began.values())
    assert not lost


@pytest.mark.parametrize("how", ["sharded", "async", "incremental"])
def test_a_fit_resumes_from_a_store(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    for whole, resumed in two_ranks.run(stores.fit_and_resume, str(tmp_path), how):
        assert torch.equal(whole.losses[-len(resumed.losses) :], resumed.losses)


@pytest.mark.parametrize("how", ["sharded", "async"])
def test_every_rank_says_that_a_store_refuses(two_ranks: Ranks, how: str, tmp_path: Path) -> None:
    """Wherever it happens: the ranks raise alike, and go on from a whole checkpoint."""

    @settings(max_examples=4, database=None)
    @given(st.integers(0, 1), st.integers(1, 40))
    def refuse(rank: int, num: int) -> None:
        folder = str(tmp_path / uuid.uuid4().hex)
        (said, began), (said_too, began_too) = two_ranks.run(stores.fail_a_change, folder, rank, num, how)
        assert said == said_too
        assert began == began_too
        assert said.startswith("could not write the checkpoint objects://bucket/run/") or began == 3
        assert "this store has had enough" in said or began == 3

    refuse()


@pytest.mark.parametrize("how", ["sharded", "incremental"])
def test_folders_that_are_copied_by_hand(get_ranks: Any, how: str, tmp_path: Path) -> None:
    """From a store, in a folder of any name, to a disk, and from a disk to it."""
    get_ranks(1).run(stores.copy_by_hand, tmp_path, how, "objects://bucket/a b+c=0.1,(x)&y;z@w:!50%_%2F ü表[1]*?#~")


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
