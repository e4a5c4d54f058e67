"""What a save finds under its name: a folder of somebody else's stays as it is, and no file of a user's is lost."""

import uuid
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.checkpoint import LocalPlace, atomic, incremental, place_at
from lightning_overlap.checkpoint.atomic import lead
from lightning_overlap.checkpoint.checksums import Checksums

from ..support.ranks import Ranks
from .checkpoints import save_to
from .replaced_folders import fit_among_files

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
        with pytest.raises(FileExistsError, match="which this strategy has not written: a save would replace it"):
            save_at(place_at(address))
        assert files_in(address) == before

    refuse()


def test_what_a_user_has_put_into_a_checkpoint_stays(new_folder: Any) -> None:
    address = new_folder()
    save_at(place_at(address))
    files, path = fsspec.core.url_to_fs(address)
    names = ["notes.txt", "results/a.csv"]
    if not address.startswith("memory"):  # in a store these are names of ours
        names += [f"{uuid.uuid4().hex}/m.csv", "base/model.bin"]
    for name in names:
        files.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{path}/{name}", b"mine")
    for _ in range(2):
        before = files_in(address)
        save_at(place_at(address))
        after = files_in(address)
        assert {name: after[name] for name in names} == dict.fromkeys(names, b"mine")
        assert after["checksums.json"] != before["checksums.json"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_it_stays_after_a_kill_between_the_renames(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalPlace(tmp_path / "last.ckpt")
    save_at(place)
    (place.path / "notes.txt").write_text("mine")
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
    with monkeypatch.context() as killed:
        killed.setattr(atomic, "sync_folder", Mock(side_effect=[None, KeyboardInterrupt]))
        killed.setattr(atomic, "_keep_others", lambda old, new: None)
        with pytest.raises(KeyboardInterrupt):
            save_at(place)
    assert not (place.path / "notes.txt").exists()
    save_at(place)
    assert (place.path / "notes.txt").read_text() == "mine"


def test_a_folder_of_runs_is_not_replaced(tmp_path: Path) -> None:
    """Their names are those of saves, which have such folders in a store alone."""
    for _ in range(2):
        (tmp_path / "runs" / uuid.uuid4().hex).mkdir(parents=True)
    with pytest.raises(FileExistsError):
        save_at(LocalPlace(tmp_path / "runs"))


def test_a_save_over_a_checkpoint_is_another_one(tmp_path: Path) -> None:
    """What stands on the newest checkpoint knows it by this; file systems use numbers of removed files again."""
    place, known = LocalPlace(tmp_path / "last.ckpt"), set()
    for _ in range(40):
        save_at(place)
        known.add(incremental._identity(place))
    assert len(known) == 40


def test_increments_leave_files_of_users_alone(get_ranks: Any, tmp_path: Path) -> None:
    get_ranks(1).run(fit_among_files, str(tmp_path))
    bases = [*tmp_path.glob("*.ckpt/base")]
    assert len(bases) > 1
    assert not [path for base in bases for path in base.iterdir() if path.name in ("notes.txt", "elsewhere")]


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
