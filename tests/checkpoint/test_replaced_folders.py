"""What a save finds under its name: a folder of somebody else's stays as it is, and no file of a user's is lost."""

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.checkpoint import LocalPlace, place_at
from lightning_overlap.checkpoint.atomic import lead
from lightning_overlap.checkpoint.checksums import Checksums

from ..support.ranks import Ranks
from .checkpoints import save_to

OWN = ("meta.pt", "increment.pt", ".metadata", "__0_0.distcp", "__1_0.distcp", "rows.json", "rows_1_0.pt")
OTHERS = ("notes.txt", "results/a.csv", "last.ckpt", "epoch=0.ckpt", "model.safetensors", "meta.pt.bak", "base.txt")
NAMES = st.sets(st.sampled_from(OWN + OTHERS), min_size=1)


def save_at(place: Any) -> None:
    """Save a checkpoint without tables."""
    name = uuid.uuid4().hex
    place.begin(name)
    place.write(name, "meta.pt", b"saved")
    place.commit(Checksums(place, name, {}), None)


def files_in(folder: Any) -> dict[str, bytes]:
    files, path = fsspec.core.url_to_fs(str(folder))
    return {name.removeprefix(path).lstrip("/"): files.cat_file(name) for name in files.find(path)}


@pytest.fixture(params=["local", "memory"])
def new_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that returns another address of a folder each time."""
    above = tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return lambda: f"{above}/{uuid.uuid4().hex}.ckpt"


def test_a_folder_of_somebody_else_is_not_replaced(new_folder: Any) -> None:
    """Of another program's checkpoint, too, whose files have the names of ours; also with checksums of its own."""

    @given(NAMES, st.booleans())
    def refuse(names: set[str], has_checksums: bool) -> None:
        address = new_folder()
        if has_checksums:
            names = {*names, "notes.txt", "checksums.json"}
        for name in names:
            files, path = fsspec.core.url_to_fs(f"{address}/{name}")
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            files.pipe_file(path, b'{"notes.txt": "1234"}')
        before = files_in(address)
        with pytest.raises(FileExistsError, match="which no checkpoint of this strategy is: a save would replace it"):
            save_at(place_at(address))
        assert files_in(address) == before

    refuse()


def test_what_a_user_has_put_into_a_checkpoint_stays(new_folder: Any) -> None:
    address = new_folder()
    save_at(place_at(address))
    files, path = fsspec.core.url_to_fs(address)
    files.makedirs(f"{path}/results", exist_ok=True)
    for name in ("notes.txt", "results/a.csv"):
        files.pipe_file(f"{path}/{name}", b"mine")
    for _ in range(2):
        before = files_in(address)
        save_at(place_at(address))
        after = files_in(address)
        assert (after["notes.txt"], after["results/a.csv"]) == (b"mine", b"mine")
        assert after["checksums.json"] != before["checksums.json"]


def test_files_beside_a_checkpoint_stay(tmp_path: Path) -> None:
    """Also a copy that the user keeps under a name like this."""
    for name in ("last.old.ckpt", "last.bak.ckpt", "last.ckpt.old", "last"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        save_at(LocalPlace(tmp_path / "last.ckpt"))
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_file()) == [
        *("last", "last.bak.ckpt", "last.ckpt.old", "last.old.ckpt")
    ]


def test_a_link_does_not_take_the_place_of_somebody_elses_folder(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes.txt").write_text("mine")
    save_at(LocalPlace(tmp_path / "step=1.ckpt"))
    with pytest.raises(FileExistsError, match="is a folder with notes"):
        lead(tmp_path / "last.ckpt", tmp_path / "step=1.ckpt")


@pytest.mark.parametrize("options", [{"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}], ids=str)
def test_every_rank_says_so(two_ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for said in two_ranks.run(partial(save_to, **options), str(tmp_path)):
        assert said.startswith(f"could not write the checkpoint {tmp_path}: ")
        assert "is a folder with notes.txt" in said
    assert files_in(tmp_path) == {"notes.txt": b"mine"}
