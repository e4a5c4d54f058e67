"""A name in a store: a folder of files that are whole or nothing, by a marker that is written last, or one file.

    DIR/NAME/checksums.json        the marker: NAME is what it lists, and there is none without it
    DIR/NAME/SAVE/...              the files of a save; nobody reads them before a marker lists them
    DIR/shared_files/SAVE/...      those that markers of later saves may list, too

A new save of NAME replaces the marker, which is atomic, and then the old save's files are removed. A save is removed
once no marker in DIR lists its files. On a disk, where NAME is a folder or a file, a new folder is made under another
name, and gets its name with the marker in it: so a listing has no NAME that is not whole.
"""

import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec

from ..text import some, without_secrets
from .addresses import is_address, without_protocol
from .checksums import About, DamagedError
from .disk_store import DiskStore, whole_file
from .manifest import MARKER, SAVE_NAME, SHARED, FolderStore, Manifest, read_manifest
from .object_store import ObjectStore
from .sealed_file import read_seal

READ_ONLY = ("http://", "https://")
LEFT_AFTER_S = 3600.0
"""What a killed save has left is removed once nothing of it was written for so long: others may be at work."""

_MOST_LISTINGS = 4
_UNFINISHED = re.compile(r"\.(.+)\.(?:save-)?[0-9a-f]{32}\.unfinished")
"""The names of files and folders that are not complete, or not removed yet."""
_IS_OURS = re.compile(rb'"save": *"(?:save-)?[0-9a-f]{32}"')  # in a marker

# A save may go on in a thread while another name is removed. Who reads the markers, to remove what none of them lists,
# has to see all of them.
_one_change = threading.RLock()
_held: dict[int, set[tuple[str, str]]] = {}  # saves that are to stay, though perhaps no marker lists them


def can_hold_folders(path: object) -> bool:
    """Return whether a path is an address at which folders may be: of fsspec, and written to."""
    if not is_address(path) or str(path).startswith(READ_ONLY) or "::" in str(path):
        return False
    with suppress(ImportError):
        try:
            fsspec.get_filesystem_class(str(path).partition("://")[0])
        except ValueError:
            return False  # perhaps a CheckpointIO of the user's knows it
    return True


def is_unfinished(name: str) -> bool:
    """Return whether a file or folder of this name is not complete, or not removed yet."""
    return _UNFINISHED.fullmatch(name) is not None


def place_at(path: Any, storage_options: Mapping[str, Any] | None = None) -> "Place":
    """Return the place of a local path, or of an address of fsspec (`s3://bucket/run/last.ckpt`).

    Raises:
        ImportError: The package that fsspec needs for the address is not installed.
        ValueError: There is no such kind of address, or it cannot have folders of checkpoints.
    """
    text = os.fspath(path)
    if not is_address(text):
        local = Path(without_protocol(text))
        return Place(DiskStore(local.parent), local.name)
    address = text.rstrip("/")
    if "::" in text or text.startswith(READ_ONLY):
        raise ValueError(
            f"a sharded checkpoint cannot be at {without_secrets(text)}: the address must be one that is written to, "
            "as s3://bucket/folder/name, and not http or a chain of addresses."
        )
    folder, _, name = address.rpartition("/")
    return Place(ObjectStore(f"{folder}/", storage_options), name)


def or_warn(action: Callable[[], None]) -> None:
    """Call a function that is not needed for a whole checkpoint; a warning if the store fails: training goes on."""
    try:
        action()
    except OSError as err:
        warnings.warn(f"the checkpoint is whole, but old files may be left: {err}", stacklevel=2)


class _Replaced(NamedTuple):
    """What a name had before a change of its marker."""

    saves: set[str]  # that its marker listed, as "NAME/SAVE"
    files: set[str]  # in its folder itself, where former versions kept them on disks


class Place:
    """A name in a store, of a folder or of one file; `str()` of it is shown in messages and has no secrets.

    A save of a folder calls `begin`, writes files into the folders that it returns, and ends with `commit`, which alone
    makes the save the one of that name: until then the place has what it had. Methods that write or remove are called
    on one rank. All raise an OSError if the disk or store fails.
    """

    def __init__(self, store: FolderStore, name: str) -> None:
        self.store, self.name = store, name

    def __str__(self) -> str:
        return self.store.shown(self.name)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, str]:
        return self.store.address, self.name

    @property
    def path(self) -> Path:
        """The local path of a name on a disk."""
        assert isinstance(self.store, DiskStore)
        return self.store.folder / self.name

    @property
    def is_on_disk(self) -> bool:
        """Whether it is on a local disk, or on a file system that hosts share."""
        return isinstance(self.store, DiskStore)

    def beside(self, name: str) -> "Place":
        """Return the place of another name in the same folder."""
        return Place(self.store, name)

    def is_in(self, folder: str) -> bool:
        """Return whether this name is in a folder, given as a path or address."""
        if isinstance(self.store, DiskStore):
            return not is_address(folder) and Path(without_protocol(folder)).absolute() == self.store.folder
        return folder.rstrip("/") == self.store.address.rstrip("/")

    # -- what is there

    def manifest(self) -> Manifest | None:
        """Return the manifest; None without a marker. Raises a DamagedError for a damaged one."""
        return read_manifest(self.store, self.name)

    def is_folder(self) -> bool:
        """Return whether this is a whole folder."""
        return self.store.kind(self._marker) == "file"

    def is_file(self) -> bool:
        """Return whether this is one file, or a link to one."""
        return self.store.kind(self.name) == "file"

    def holds_files(self) -> bool:
        """Return whether this name is a folder, whole or not."""
        return self.store.kind(self.name) == "directory"

    def exists(self) -> bool:
        """Return whether there is a whole folder, or a file."""
        return self.is_folder() or self.is_file()

    def about(self) -> About:
        """Return what its save says of itself; of a file that does not, when it was written."""
        manifest = self.manifest()
        if manifest is not None:
            return manifest.about
        seal = read_seal(self.path) if self.is_on_disk else None
        found = About() if seal is None else seal.about
        return found if found.time else found._replace(time=self.store.modified(self.name))

    def names_beside(self, stem: str, suffix: str) -> list[str]:
        """Return the names in the same folder that begin with `stem` and end with `suffix`, of what exists."""
        names = [name for name in self.store.names() if name.startswith(stem) and name.endswith(suffix)]
        return [name for name in names if self.beside(name).exists()]

    def leaning(self, is_one: Callable[[str], bool]) -> list["Place"]:
        """Return the places with names of this kind that need this one: links to it, or those that list its files."""
        inside, found = self._saves_inside(), []
        for other in [self.beside(name) for name in self.store.names() if is_one(name)]:
            leans = False
            if self.store.is_link(other.name):
                leans = other.path.resolve() == self.path.resolve()
            elif inside:
                with suppress(DamagedError):
                    manifest = other.manifest()
                    leans = manifest is not None and bool(inside & manifest.saves())
            if other != self and leans:
                found.append(other)
        return found

    def unfinished(self) -> list[str]:
        """Return the names of what killed saves of this name have left on a disk."""
        if not self.is_on_disk:
            return []
        found = {name: _UNFINISHED.fullmatch(name) for name in self.store.names()}
        return [name for name, match in found.items() if match and match[1] == self._hidden]

    @property
    def _marker(self) -> str:
        return f"{self.name}/{MARKER}"

    @property
    def _hidden(self) -> str:
        # Lightning's search for the checkpoints of requeued jobs takes every name with "hpc_ckpt_" in it.
        return self.name.replace("hpc_ckpt_", "hpc_")

    @property
    def _is_own_folder(self) -> bool:
        """Whether it is a folder, also beside a file of this name in a store; not a link to one."""
        if self.store.holds_both:
            return bool(self._inside())
        return self.holds_files() and not self.store.is_link(self.name)

    @property
    def _takes_folder(self) -> bool:
        """Whether a folder of this name can be written into, and need not be made under another name."""
        return self.store.holds_both or bool(self._inside())

    def _inside(self) -> list[str]:
        """Return the names in its folder."""
        return self.store.names(self.name) if self.store.holds_both or self._is_own_folder else []

    def _saves_inside(self) -> set[str]:
        return {f"{self.name}/{name}" for name in self._inside() if SAVE_NAME.fullmatch(name)}

    def _before(self) -> _Replaced:
        try:
            manifest = self.manifest()
        except DamagedError:
            manifest = None
        if manifest is None:
            return _Replaced(set(), set())
        return _Replaced(manifest.saves(), {name for name, file in manifest.files.items() if not file.where})

    def _unlisted(self, saves: set[str], *, apart_from: str = "") -> set[str]:
        """Return those saves, "NAME/SAVE", that no marker lists and nobody holds.

        The marker of the name `apart_from` does not count. If a marker cannot be read, only saves of this name may be
        among them: nobody knows what that lists.
        """
        unused = {save for save in saves if not any((self.store.address, save) in held for held in _held.values())}
        if self.store.holds_both:  # without links, a save in a name's own folder is in no other's marker
            shared = {save for save in unused if save.startswith(f"{SHARED}/")}
            return unused if not shared else unused - shared | self._unlisted_among(shared, apart_from)
        return self._unlisted_among(unused, apart_from)

    def _unlisted_among(self, unused: set[str], apart_from: str) -> set[str]:
        names: list[str] | None = None
        is_known = True
        for _ in range(_MOST_LISTINGS if unused else 0):
            listed = self.store.names()
            if listed == names:
                break
            names, is_known = listed, True  # else somebody has renamed something, which was perhaps not read
            for name in names:
                if name == apart_from or _UNFINISHED.fullmatch(name):
                    continue
                try:
                    manifest = read_manifest(self.store, name)
                except DamagedError:
                    is_known &= not self.beside(name)._is_ours()
                except PermissionError:
                    is_known &= self.is_on_disk  # a folder of somebody else's
                else:
                    unused -= set() if manifest is None else manifest.saves()
        else:
            is_known = False
        return unused if is_known else {save for save in unused if save.startswith(f"{self.name}/")}

    def _is_ours(self) -> bool:
        """Whether the marker, perhaps a damaged one, is of this strategy."""
        content = self.store.read(self._marker)
        return _IS_OURS.search(content) is not None or not content.lstrip().startswith(b"{")

    # -- writing

    def check_replaceable(self, *, by_file: bool = False) -> None:
        """Raise a FileExistsError if this is somebody else's folder: a save would remove some of its files.

        Also if a file would replace a folder that has other files as well, or whose files others list.
        """
        if not (names := self._inside()):
            return
        others = self._others(names)
        if MARKER not in names and not others:  # what a killed save or removal has left
            return
        is_ours = MARKER in names and self._is_ours()
        if is_ours and by_file and not others and self._is_needed():
            raise FileExistsError(
                f"{self} is a checkpoint folder whose files another checkpoint lists ('last' with save_last='link'): a "
                "file cannot take its place. Save under another name."
            )
        if is_ours and not (by_file and others):
            return
        has = some(others or names)
        raise FileExistsError(
            f"{self} is a folder with {has}, which this strategy has not written: a save would replace it. Save under "
            "another name, or move the folder away."
        )

    def _others(self, names: Iterable[str]) -> list[str]:
        """Return those of the names in its folder that no save has given."""
        others = [name for name in names if not (_UNFINISHED.fullmatch(name) or SAVE_NAME.fullmatch(name))]
        former = self._before().files if set(others) - {MARKER} else set()
        return sorted(set(others) - {MARKER} - former)

    def _is_needed(self) -> bool:
        """Whether files of others are in its folder, or others list its files."""
        inside = self._saves_inside()
        return bool(self._others(self._inside())) or self._unlisted(inside, apart_from=self.name) != inside

    def begin(self, save: str, *, shares: bool) -> tuple[str, str]:
        """Return the store's folders for a save's own files, and for those that others may list (with `shares`).

        Removes what killed saves of this name have left. A FileExistsError if it is a folder of somebody else's.
        """
        self.check_replaceable()
        own, shared = f"{self._above(save)}/{save}", f"{SHARED}/{save}"
        with _one_change, self.store.keeping_time(self.name):
            left = self.unfinished()
            inside = self._saves_inside() - self._before().saves
            ids = [name.split(".")[-2] for name in left] + [name.rpartition("/")[2] for name in inside]
            or_warn(partial(self._remove, left))
            or_warn(partial(self.remove_unlisted, inside | {f"{SHARED}/{one}" for one in ids}))
            for folder in (shared, own) if shares else (own,):
                self.store.make_folder(folder)
        return own, shared

    def commit(self, manifest: Manifest, folder: str) -> list[str]:
        """Write the marker, and then remove what it replaces; a warning if that is not possible.

        `folder` is that of the save's own files. Returns the saves of shared files that it lists and that are gone;
        then nothing has changed.
        """
        above = folder.rpartition("/")[0]
        of_shared = (f"{SHARED}/{manifest.save}", SHARED) if manifest.shared().files else ()
        for one in (folder, above, *of_shared, ""):
            self.store.sync(one)
        with _one_change:
            gone = manifest.lacks()
            if not gone:
                self._mark(manifest, above)
            return gone

    def lead(self, to: "Place") -> None:
        """Let this name on a disk be another one of its folder, too: list its files, or be a link to its file."""
        if self.beside(to.name) != to or not self.is_on_disk:
            raise FileNotFoundError(f"{to} is not beside {self}, or not on a disk: a store has no links")
        with _one_change:
            before, manifest = self._before(), to.manifest()
            if manifest is not None:
                above = self._above(manifest.save)
                self.store.make_folder(above)
                self._mark(manifest.seen_from(self.name), above)
                return
            if not isinstance(self.store, DiskStore) or not to.is_file():
                raise FileNotFoundError(f"{to} is no whole checkpoint")
            self.check_replaceable(by_file=True)
            self.store.link(self.name, to.name)
            or_warn(partial(self._remove_replaced, before, set()))

    def _mark(self, manifest: Manifest, above: str) -> None:
        """Write the marker; `above` is this folder, or the one that is to get this name."""
        store, before = self.store, self._before()
        self.check_replaceable()
        store.put(f"{above}/{MARKER}", [manifest.encode()])
        if above != self.name:
            assert isinstance(store, DiskStore)
            store.sync(above)
            self.check_replaceable()
            store.publish(above, self.name)
        if store.holds_both and self.is_file():  # a full file of this name
            or_warn(partial(store.remove, [self.name]))
        store.tell_of_changes()
        or_warn(partial(self._remove_replaced, before, manifest.saves()))

    @contextmanager
    def one_file(self) -> Iterator[IO[bytes]]:
        """Open a local file to write, which gets this name at the end of the context.

        A FileExistsError as `check_replaceable` raises.
        """
        self.check_replaceable(by_file=True)
        or_warn(lambda: self._remove(self.unfinished()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self._before()
        with whole_file(self.path) as file:
            yield file
        with _one_change:
            or_warn(partial(self._remove_replaced, before, set()))

    def _above(self, save: str) -> str:
        """Return the folder of a save's folder and its marker: this one, or one that gets its name when it is whole."""
        return self.name if self._takes_folder else f".{self._hidden}.{save}.unfinished"

    # -- removing

    def discard(self) -> None:
        """Remove a file or link, or a marker and then the saves that it lists and that no other marker has.

        Other files in a folder stay. A FileExistsError if it is somebody else's folder.
        """
        if self._is_own_folder:
            self.discard_folder()
        if self.store.holds_both or not self.holds_files() or self.store.is_link(self.name):
            self.store.remove([self.name])
        self._remove(self.unfinished())
        self.store.tell_of_changes()

    def discard_folder(self) -> None:
        """Do as `discard` does, without a full file of this name."""
        self.check_replaceable()
        with _one_change:
            before = self._before()
            if isinstance(self.store, DiskStore) and not self._is_needed():
                self.store.remove_folder(self.store.hide(self.name))
            else:
                self.store.remove([self._marker])
                self.store.tell_of_changes()
            self._remove_replaced(before, set())
            self._remove_if_empty()

    def drop(self, folders: Iterable[str]) -> None:
        """Remove the folders of a save that gets no marker."""
        for folder in folders:
            self.store.remove_folder(folder)
            self.store.remove_empty_folder(folder.rpartition("/")[0])

    def remove_unlisted(self, saves: Iterable[str]) -> None:
        """Remove those of these saves, "NAME/SAVE", that no marker lists and nobody holds."""
        with _one_change:
            self._remove(self._unlisted({*saves}))

    def sweep(self) -> None:
        """Remove what killed saves left beside this name, and shared files that no marker lists, if they are old."""
        shared = {f"{SHARED}/{save}" for save in self.store.names(SHARED) if SAVE_NAME.fullmatch(save)}
        left = [name for name in self.store.names() if _UNFINISHED.fullmatch(name)]
        with _one_change:
            for name in [*left, *sorted(self._unlisted(shared))]:
                if time.time() - max(self._changes_in(name), default=0.0) > LEFT_AFTER_S:
                    self._remove([name])

    def _changes_in(self, name: str) -> Iterator[float]:
        if self.beside(name).holds_files():
            for inside in self.store.names(name):
                yield from self._changes_in(f"{name}/{inside}")
        with suppress(OSError):  # a store has no times of folders
            yield self.store.changed(name)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if self.beside(name).holds_files() and not self.store.is_link(name):
                self.store.remove_folder(name)
            else:
                self.store.remove([name])

    def _remove_replaced(self, before: _Replaced, kept: set[str]) -> None:
        """Remove what this name had, and saves in its folder, as far as no marker lists it: this one lists `kept`."""
        for save in sorted(self._unlisted((before.saves | self._saves_inside()) - kept)):
            self.store.remove_folder(save)
            self.beside(save.rpartition("/")[0])._remove_if_empty()
        names = self._inside()
        left = [name for name in names if name in before.files or (MARKER in names and _UNFINISHED.fullmatch(name))]
        self.store.remove(f"{self.name}/{name}" for name in left)

    def _remove_if_empty(self) -> None:
        """Remove a folder in which at most leftovers are; only some stores have such folders."""
        names = self.store.names(self.name) if self.is_on_disk else []
        if all(_UNFINISHED.fullmatch(name) for name in names):
            self.store.remove(f"{self.name}/{name}" for name in names)
            self.store.remove_empty_folder(self.name)


class Held:
    """Saves that stay, though perhaps no marker lists them: a save to come stands on them."""

    def __init__(self) -> None:
        self._saves: set[tuple[str, str]] = set()
        _held[id(self)] = self._saves

    def hold(self, manifest: Manifest | None) -> list[str]:
        """Hold what a manifest lists, and nothing else; return what is not held any more."""
        now = set() if manifest is None else {(manifest.store.address, save) for save in manifest.saves()}
        before = self._saves - now
        self._saves.clear()
        self._saves |= now
        return sorted(save for _, save in before)

    def release(self) -> None:
        """Hold nothing any more."""
        _held.pop(id(self), None)
