"""Law 12, once for all kinds of stores: a crash at any change leaves each name with what it had, or with what it gets.

Saves, increments, links and removals are drawn, on a disk and in an object store. Before each change that they make,
all that is there is copied, as a crash would leave it. No training is needed for this.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_overlap.storage import (
    SHARED,
    About,
    DamagedError,
    Held,
    Manifest,
    ObjectStore,
    Place,
    SavedFile,
    checksum_of,
    new_save,
    place_at,
)
from lightning_overlap.storage import place as places

from ..support.disk_changes import before_each_change

NAMES = ("last.ckpt", "a.ckpt", "b.ckpt")
OPERATIONS = ("save", "increment", "lead", "discard", "file", "by hand")

Content = str | None  # the identity of what a name has; None for nothing


@dataclass
class Run:
    """What a run does to checkpoints in a folder, and what each name has then."""

    folder: str
    held: Held = field(default_factory=Held)
    now: dict[str, Content] = field(default_factory=lambda: dict.fromkeys(NAMES))
    newest: Manifest | None = None  # on which an increment stands

    def place(self, name: str) -> Place:
        return place_at(f"{self.folder}/{name}")

    def save(self, name: str, base: Manifest | None = None) -> None:
        place, save = self.place(name), new_save()
        own, shared = place.begin(save, shares=True)
        files = {}
        for folder, where, file in ((own, save, "meta.pt"), (shared, f"../{shared}", f"rows_{save}.arrow")):
            content = f"{file} of {save}".encode()
            with place.store.opened(f"{folder}/{file}") as opened:
                opened.write(content)
            files[file] = SavedFile(len(content), checksum_of(content), where)
        earlier = {} if base is None else {key: one for key, one in base.files.items() if key != "meta.pt"}
        manifest = Manifest(place.store, name, save, {**earlier, **files}, None, About(1.0))
        assert place.commit(manifest, own) == []
        self.newest = manifest.shared()
        place.remove_unlisted(self.held.hold(self.newest))
        self.now[name] = save

    def increment(self, name: str) -> None:
        self.save(name, self.newest)

    def lead(self, name: str) -> None:
        place = self.place("a.ckpt")
        if place.is_on_disk and place.is_folder() and name != "a.ckpt":
            self.place(name).lead(self.place("a.ckpt"))
            self.now[name] = self.now["a.ckpt"]

    def discard(self, name: str) -> None:
        for other in self.place(name).leaning(lambda one: one == "last.ckpt"):
            other.discard()
            self.now[other.name] = None
        self.place(name).discard()
        self.now[name] = None

    def file(self, name: str) -> None:
        """Write one file under the name, as rank 0 does; a folder of which another one needs files stays."""
        place, content = self.place(name), new_save()
        if place.is_on_disk and not place.leaning(lambda one: one in NAMES):
            with place.one_file() as file:
                file.write(content.encode())
            self.now[name] = content

    def by_hand(self, name: str) -> None:
        """Remove a checkpoint as users do, with no regard to others; on a disk."""
        place = self.place(name)
        if place.is_on_disk and place.path.is_dir() and not place.leaning(lambda one: one in NAMES):
            shutil.rmtree(place.path)
            self.now[name] = None


def content_of(place: Place) -> Content:
    """Return what a name has, which has to be whole."""
    if place.is_file():
        return place.store.read(place.name).decode()
    manifest = place.manifest()
    if manifest is None:
        return None
    for file in manifest.files:
        with manifest.checked(file):
            pass
    return manifest.save


@contextmanager
def copying(folder: str, copies: Path, kept: list[Any]) -> Iterator[None]:
    """Keep a copy of all files before each change."""
    if "://" not in folder:

        def copy() -> None:
            if Path(folder).exists():
                shutil.copytree(folder, to := copies / str(len(kept)), symlinks=True)
                kept.append(str(to))

        with before_each_change(copy):
            yield
        return

    def changing(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: ObjectStore, *args: Any, **kwargs: Any) -> Any:
            kept.append(dict(MemoryFileSystem.store))
            return own(store, *args, **kwargs)

        return call

    changes = ("put", "opened", "remove", "remove_folder", "rename")
    patches = {name: changing(getattr(ObjectStore, name)) for name in changes}
    with mock.patch.multiple(ObjectStore, **patches):
        yield


@contextmanager
def crashed(copy: Any, folder: str) -> Iterator[str]:
    """Within this context the folder is what a crash has left; return where it is."""
    if isinstance(copy, str):
        yield copy
        return
    with mock.patch.object(MemoryFileSystem, "store", dict(copy)):
        yield folder


def left_in(folder: str) -> list[str]:
    """Return the names of files that are there when all checkpoints are removed and what is left is swept."""
    run = Run(folder)
    run.save("z.ckpt")
    with mock.patch.object(places, "LEFT_AFTER_S", -60.0):
        run.place("z.ckpt").sweep()
    for name in (*NAMES, "z.ckpt"):
        run.place(name).discard()
    run.held.release()
    assert run.newest is not None
    run.place("z.ckpt").remove_unlisted(run.newest.saves())
    store = run.place("_").store
    return [*(name for name in store.names() if name != SHARED), *store.names(SHARED)]


def check(folder: str, copies: Path, operations: list[tuple[str, str]]) -> None:
    run, kept = Run(folder), list[Any]()
    copies.mkdir()
    steps: list[tuple[int, dict[str, Content], dict[str, Content]]] = []
    with copying(folder, copies, kept):
        for operation, name in operations:
            before = dict(run.now)
            getattr(run, operation.replace(" ", "_"))(name)
            steps.append((len(kept), before, dict(run.now)))
    assert {name: content_of(run.place(name)) for name in NAMES} == run.now
    run.held.release()
    step = 0
    for number, copy in enumerate(kept):
        while number >= steps[step][0]:
            step += 1
        _, before, after = steps[step]
        with crashed(copy, folder) as there:
            found = {}
            for name in NAMES:
                try:
                    found[name] = content_of(place_at(f"{there}/{name}"))
                except DamagedError as err:
                    if operations[step] == ("by hand", name):  # half of it: a load says what is missing
                        found[name] = after[name]
                        continue
                    raise AssertionError(f"{operations[step]} left {name} damaged: {err}") from err
            wrong = {name: one for name, one in found.items() if one not in (before[name], after[name])}
            assert not wrong, (operations[step], wrong, before, after)
            if number % 9 == 0:
                assert left_in(there) == [], operations[step]


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_crash_at_any_change_leaves_each_name_whole(kind: str, tmp_path_factory: Any) -> None:
    # Without shrinking, which takes minutes: a failure names the operation.
    @settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
    @given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.sampled_from(NAMES)), min_size=2, max_size=7))
    def holds(operations: list[tuple[str, str]]) -> None:
        above: Path = tmp_path_factory.mktemp("run")
        check(str(above / "run") if kind == "disk" else f"memory://{uuid.uuid4().hex}", above / "copies", operations)

    holds()
