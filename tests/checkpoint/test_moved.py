"""Users rename, remove and replace checkpoints at any time: the fit goes on, and what it saves is whole."""

from pathlib import Path

import pytest
import torch

from lightning_overlap.checkpoint import read_folder
from lightning_overlap.storage import SHARED, DamagedError

from ..support.pairs import pairwise
from ..support.ranks import Ranks
from ..support.saved import is_increment
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
        try:
            saved = read_folder(path, weights_only=True)["state_dict"]
        except DamagedError as err:
            # What is gone is named; checkpoints that are saved later have no need of it.
            is_earlier = draw.done == "remove_shared" and int(path.stem) <= int(draw.victim.removesuffix(".ckpt"))
            if not is_earlier or f"is missing in {folder}/{SHARED}/" not in str(err):
                names.append(f"{name}: {err}")
            continue
        state = {key.split(".")[-2]: value for key, value in saved.items()}
        if not all(torch.equal(state[table], value) for table, value in tables.items()):
            names.append(name)
    return names


@pytest.mark.slow
def test_the_fit_goes_on_and_every_checkpoint_is_right(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(moved.fit_all, DRAWS, str(tmp_path), timeout_s=300)
    for number, draw in enumerate(DRAWS):
        folder, found = tmp_path / str(number), of_ranks[0][number]
        assert wrong(draw, found, folder) == [], draw
        loses_shared = draw.done == "remove_shared"
        dropped = {"6"} if loses_shared and draw.is_async and draw.when == "in_thread" else set()
        for step in {"6", "8", "10"} - dropped - {draw.victim.removesuffix(".ckpt")}:
            assert (folder / f"{step}.ckpt").exists(), draw
        assert not (folder / "6.ckpt").exists() or not dropped, draw
        if draw.done == "remove_a_file":
            with pytest.raises(DamagedError, match="is missing"):
                read_folder(folder / draw.victim, weights_only=True)
        # Only the shared files count: nothing that is done to a checkpoint is heard of by another.
        assert bool(found.warned) == loses_shared, draw
        whole = {step for step in (6, 8, 10) if (folder / f"{step}.ckpt").exists()}
        whole = {step for step in whole if not is_increment(folder / f"{step}.ckpt")}
        lost = {"before": 6, "in_thread": 8 if draw.is_async else 6, "committed": 8}[draw.when]
        assert whole - {int(draw.victim.removesuffix(".ckpt"))} == ({lost} if loses_shared else set()), draw


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("removed", ["2.ckpt", "4.ckpt", SHARED])
@pytest.mark.parametrize("when", ["before", "in_thread"])
def test_a_checkpoint_of_a_store_is_never_a_part_of_one(
    two_ranks: Ranks, tmp_path: Path, removed: str, when: str, is_async: bool
) -> None:
    """A save that would list what is gone is whole, or dropped with a warning."""
    found, _ = two_ranks.run(moved.fit_in_store, Draw(removed, when, is_async), str(tmp_path / "store"))
    loses_shared = removed == SHARED
    gone = {removed, "6.ckpt"} if loses_shared and is_async and when == "in_thread" else {removed}
    assert found.there == [f"{step}.ckpt" for step in (2, 4, 6, 8, 10) if f"{step}.ckpt" not in gone]
    assert set(found.wrong) == ({"2.ckpt", "4.ckpt"} if loses_shared else set())
    what = "6.ckpt was not saved with it" if when == "in_thread" else "this checkpoint is whole"
    assert any(what in text for text in found.warned) == loses_shared
