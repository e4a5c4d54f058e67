"""Users rename, remove and replace checkpoints at any time: the fit goes on, and what it saves is whole."""

from pathlib import Path

import pytest
import torch

from lightning_overlap.checkpoint import DamagedError, read_folder

from ..support.pairs import pairwise
from ..support.ranks import Ranks
from . import moved
from .moved import DONE, WHEN, Draw, Found

DRAWS = [Draw(done, when, bool(is_async)) for done, when, is_async in pairwise(DONE, WHEN, (0, 1))]


def wrong(draw: Draw, found: Found, folder: Path) -> list[str]:
    """Name the checkpoints that are there and do not have the tables of their step."""
    names = []
    for name, tables in found.tables.items():
        path = folder / ("kept.ckpt" if name == draw.victim and (folder / "kept.ckpt").exists() else name)
        if not path.exists() or (name == draw.victim and draw.done == "remove_a_file"):
            continue
        state = {key.split(".")[-2]: value for key, value in read_folder(path, weights_only=True)["state_dict"].items()}
        if not all(torch.equal(state[table], value) for table, value in tables.items()):
            names.append(name)
    return names


@pytest.mark.slow
def test_the_fit_goes_on_and_every_checkpoint_is_right(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(moved.fit_all, DRAWS, str(tmp_path), timeout_s=300)
    for number, draw in enumerate(DRAWS):
        folder, found = tmp_path / str(number), of_ranks[0][number]
        assert wrong(draw, found, folder) == [], draw
        assert all((folder / f"{step}.ckpt").exists() for step in (6, 8, 10) if f"{step}.ckpt" != draw.victim), draw
        if draw.done == "remove_a_file" and draw.when in ("before", "in_thread"):
            with pytest.raises(DamagedError, match="is missing"):
                read_folder(folder / draw.victim, weights_only=True)
        lost = (
            {"before": "6", "committed": "8"}.get(draw.when) if draw.done in ("rename", "remove", "replace") else None
        )
        if lost is not None:
            told = [text for text in found.warned if f"{folder}/{draw.victim}" in text]
            assert any("this checkpoint is whole" in text for text in told), draw
            assert not (folder / f"{lost}.ckpt" / "base").exists(), draw
        assert (folder / "10.ckpt" / "base").exists(), draw


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("removed", "when"), [("4", "before"), ("2", "in_thread"), ("4", "in_thread")])
def test_a_checkpoint_of_a_store_is_never_a_part_of_one(
    two_ranks: Ranks, tmp_path: Path, removed: str, when: str, is_async: bool
) -> None:
    """Files in a store cannot be held: a save that would list what is gone is whole, or dropped with a warning."""
    found, _ = two_ranks.run(moved.fit_in_store, Draw(removed, when, is_async), str(tmp_path / "store"))
    gone = {removed, "6"} if is_async and when == "in_thread" else {removed}
    assert found.there == [f"{step}.ckpt" for step in (2, 4, 6, 8, 10) if str(step) not in gone]
    assert set(found.wrong) <= ({"4.ckpt"} if removed == "2" else set())  # whose base the user has removed
    what = "6.ckpt was not saved with it" if when == "in_thread" else "this checkpoint is whole"
    assert any(what in text for text in found.warned)
