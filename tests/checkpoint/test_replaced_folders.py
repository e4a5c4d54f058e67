"""What a save finds under its name: a folder of somebody else's stays as it is, and no file of a user's is lost."""

import contextlib
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.storage import (
    DiskStore,
    Manifest,
    ObjectStore,
    Place,
    SavedFile,
    checksum_of,
    disk_store,
    new_save,
    place_at,
)
from lightning_overlap.storage import place as places

from ..support.disk_changes import before_each_change
from ..support.ranks import Ranks
from .checkpoints import save_to
from .replaced_folders import fit_among_files

OWN = ("meta.pt", "increment.pt", ".metadata", "__0_0.distcp", "__1_0.distcp", "rows.json", "rows_1_0.pt")
OTHERS = ("notes.txt", "results/a.csv", "last.ckpt", "epoch=0.ckpt", "model.safetensors", "meta.pt.bak", "base.txt")
NAMES = st.sets(st.sampled_from(OWN + OTHERS), min_size=1)


def save_at(place: Place) -> None:
    """Save a checkpoint without tables."""
    name = new_save()
    folder, _ = place.begin(name, shares=False)
    place.store.put(f"{folder}/meta.pt", [b"saved"])
    files = {"meta.pt": SavedFile(len(b"saved"), checksum_of(b"saved"), name)}
    place.commit(Manifest(place.store, place.name, name, files), folder)


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
    names = ["notes.txt", "results/a.csv", "base/model.bin", f"{uuid.uuid4().hex}/m.csv"]
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
def test_a_file_does_not_replace_a_folder_with_files_of_a_user(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(disk_store, "exchange", lambda one, other: False)
    place = place_at(tmp_path / "last.ckpt")
    save_at(place)
    (place.path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is a folder with notes\.txt"), place.one_file():
        pass
    (place.path / "notes.txt").unlink()
    with place.one_file() as file:
        file.write(b"full")
    assert files_in(tmp_path) == {"last.ckpt": b"full"}
    save_at(place)
    assert place.is_folder()
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_does_not_replace_a_folder_whose_files_another_lists(tmp_path: Path) -> None:
    place, last = place_at(tmp_path / "step=1.ckpt"), place_at(tmp_path / "last.ckpt")
    save_at(place)
    last.lead(place)
    with pytest.raises(FileExistsError), place.one_file():
        pass
    save_at(place)
    place.discard()
    manifest = last.manifest()
    assert manifest is not None
    assert manifest.lacks() == []
    save_at(last)
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("num", range(1, 8))
def test_an_interrupted_removal_leaves_a_name_that_can_be_used(tmp_path: Path, num: int) -> None:
    """A removal is ended before its `num`th change; what is left is whole, or no checkpoint, and is no obstacle."""
    place = place_at(tmp_path / "last.ckpt")
    save_at(place)
    left = num

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), before_each_change(interrupt):
        place.discard()
    manifest = place.manifest()
    assert manifest is None or manifest.lacks() == []
    save_at(place)
    place.discard()
    assert [*tmp_path.iterdir()] == []


def test_what_killed_saves_of_a_name_have_left_is_removed_by_the_next_save(new_folder: Any) -> None:
    address = new_folder()
    place = place_at(f"{address}/last.ckpt")
    for saves_before in range(2):
        for _ in range(3):
            for folder in place.begin(new_save(), shares=True):
                place.store.put(f"{folder}/rows", [b"rows"])
        left = [name for name in files_in(address) if name.endswith("/rows")]
        assert len(left) == 2, saves_before  # of the one that was killed last, and may not be dead
        save_at(place)
        assert not [name for name in files_in(address) if name.endswith("/rows")]


def test_a_neighbour_that_cannot_be_read_keeps_no_old_saves(new_folder: Any, tmp_path: Path) -> None:
    """A damaged checkpoint, another program's folder, and on a disk a folder of another user's."""
    address = new_folder()
    damaged, place = place_at(f"{address}/a.ckpt"), place_at(f"{address}/last.ckpt")
    save_at(damaged)
    content = damaged.store.read("a.ckpt/checksums.json")
    damaged.store.put("a.ckpt/checksums.json", [content[:-20]])
    place.store.put("other/checksums.json", [b'{"notes.txt": "1234"}'])
    with pytest.MonkeyPatch.context() as patch:
        if place.is_on_disk:
            read = DiskStore.read
            patch.setattr(DiskStore, "read", lambda store, name: _refused(name) or read(store, name))
            (tmp_path / address.rpartition("/")[2] / "private").mkdir()
        for _ in range(4):
            save_at(place)
        of_last = [name for name in files_in(address) if name.startswith("last.ckpt/")]
        assert len(of_last) == 2
        place.discard()
    assert not [name for name in files_in(address) if name.startswith("last.ckpt/")]
    assert len([name for name in files_in(address) if name.startswith("a.ckpt/")]) == 2


def _refused(name: str) -> None:
    if name.startswith("private/"):
        raise PermissionError(name)


def test_a_name_that_is_a_file_and_a_folder_of_a_store_is_removed_whole() -> None:
    place = place_at(f"memory://{uuid.uuid4().hex}/a.ckpt")
    save_at(place)
    with pytest.MonkeyPatch.context() as patch:  # as S3 says it
        patch.setattr(ObjectStore, "kind", lambda store, name: "file")
        place.discard()
    assert files_in(str(place)) == {}


@pytest.mark.parametrize("name", ["", "/"])
def test_the_folder_of_a_store_is_not_removed(new_folder: Any, name: str) -> None:
    place = place_at(new_folder())
    save_at(place)
    with pytest.raises(ValueError, match="is not removed"):
        place.store.remove_folder(name)
    assert place.is_folder()


def test_a_checkpoint_that_is_renamed_while_markers_are_read_keeps_its_files(tmp_path: Path) -> None:
    one, other = place_at(tmp_path / "k.ckpt"), place_at(tmp_path / "a.ckpt")
    shared = f"shared_files/{new_save()}"
    for place in (one, other):
        save_at(place)
    one.store.put(f"{shared}/rows", [b"rows"])
    manifest = one.manifest()
    assert manifest is not None
    files = {**manifest.files, "rows": SavedFile(4, checksum_of(b"rows"), f"../{shared}")}
    one.store.put("k.ckpt/checksums.json", [manifest._replace(files=files).encode()])
    with pytest.MonkeyPatch.context() as patch:
        names, read = DiskStore.names, DiskStore.read

        def read_late(store: DiskStore, name: str) -> bytes:
            if name.startswith("a.ckpt") and one.path.exists():
                one.path.rename(tmp_path / "Kept.ckpt")
            return read(store, name)

        patch.setattr(DiskStore, "read", read_late)
        patch.setattr(DiskStore, "names", lambda store, folder="": names(store, folder))
        other.remove_unlisted([shared])
    assert (tmp_path / shared / "rows").exists()
    other.remove_unlisted([shared])
    assert (tmp_path / shared / "rows").exists()
    place_at(tmp_path / "Kept.ckpt").discard()
    assert not (tmp_path / shared).exists()


def test_what_killed_saves_leave_is_swept_once_it_is_old(new_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    above = new_folder()
    place, other = place_at(f"{above}/a.ckpt"), place_at(f"{above}/b.ckpt")
    other.begin(new_save(), shares=True)
    for number, folder in enumerate(other.begin(new_save(), shares=True)):
        other.store.put(f"{folder}/{number}", [b"rows"])
    save_at(place)
    before = files_in(above)
    place.sweep()
    assert files_in(above) == before
    monkeypatch.setattr(places, "LEFT_AFTER_S", -60.0)
    place.sweep()
    other.discard()
    assert [name for name in files_in(above) if not name.startswith("a.ckpt/")] == []


def test_a_folder_of_runs_is_not_replaced(new_folder: Any) -> None:
    """Nobody else's folders have the names of saves."""
    address = new_folder()
    place = place_at(address)
    for _ in range(2):
        place.store.put(f"{place.name}/{uuid.uuid4().hex}/a.csv", [b"mine"])
    before = files_in(address)
    with pytest.raises(FileExistsError):
        save_at(place)
    assert files_in(address) == before


def test_a_users_folder_among_shared_files_stays(new_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    above = new_folder()
    place = place_at(f"{above}/a.ckpt")
    place.store.put(f"shared_files/{uuid.uuid4().hex}/a.csv", [b"mine"])
    monkeypatch.setattr(places, "LEFT_AFTER_S", -60.0)
    save_at(place)
    place.sweep()
    assert [content for name, content in files_in(above).items() if name.endswith("a.csv")] == [b"mine"]


def test_increments_leave_files_of_users_alone(get_ranks: Any, tmp_path: Path) -> None:
    get_ranks(1).run(fit_among_files, str(tmp_path))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) > 3
    assert all((path / "notes.txt").read_text() == "mine" for path in checkpoints[:-1])
    assert not [path for path in tmp_path.glob("shared_files/*/*") if path.name in ("notes.txt", "elsewhere")]


def test_files_beside_a_checkpoint_stay(tmp_path: Path) -> None:
    """Also a copy that the user keeps under a name like this."""
    for name in ("last.old.ckpt", "last.bak.ckpt", "last.ckpt.old", "last"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        save_at(place_at(tmp_path / "last.ckpt"))
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_file()) == [
        *("last", "last.bak.ckpt", "last.ckpt.old", "last.old.ckpt")
    ]


def test_a_link_does_not_take_the_place_of_somebody_elses_folder(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes.txt").write_text("mine")
    save_at(place_at(tmp_path / "step=1.ckpt"))
    with pytest.raises(FileExistsError, match="is a folder with notes"):
        place_at(tmp_path / "last.ckpt").lead(place_at(tmp_path / "step=1.ckpt"))


@pytest.mark.parametrize("options", [{"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}], ids=str)
def test_every_rank_says_so(two_ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for said in two_ranks.run(partial(save_to, **options), str(tmp_path)):
        assert said.startswith(f"could not write the checkpoint {tmp_path}: ")
        assert "is a folder with notes.txt" in said
    assert files_in(tmp_path) == {"notes.txt": b"mine"}
