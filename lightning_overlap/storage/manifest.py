"""The manifest of what was saved under a name: its files with sizes and checksums, and the identity of the save."""

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from .checksums import About, DamagedError, checksum_of, checksum_of_part, damaged_part, is_another
from .disk_store import DiskStore
from .object_store import ObjectStore

FolderStore: TypeAlias = DiskStore | ObjectStore
"""Stores whose names may lead into folders."""

MARKER = "checksums.json"
"""The file that has the manifest. It is written last, and without it nothing has the name."""

SAVE_NAME = re.compile(r"save-[0-9a-f]{32}")
"""The identity of a save, and the name of its folder: nobody else gives it to a folder that is removed."""
_FORMER_SAVE = re.compile(r"[0-9a-f]{32}")

SHARED = "shared_files"
"""The folder beside names with the files that several manifests list: those of a save in the folder SAVE of it."""


class SavedFile(NamedTuple):
    """What a file was when it was saved."""

    size: int  # in bytes
    checksum: str  # XXH3
    where: str  # its folder, relative to the name that lists it: SAVE, or ../OTHER/SAVE


class Manifest(NamedTuple):
    """What the files of a name were when they were saved."""

    store: FolderStore
    name: str  # the name that lists them
    save: str  # identity of the save
    files: Mapping[str, SavedFile]  # by their own names
    base: "Manifest | None" = None  # of the earlier save on which this one stands
    about: About = About()

    @property
    def shown(self) -> str:
        """The name with what leads to it, for messages."""
        return self.store.shown(self.name)

    def path(self, name: str) -> str:
        """Return where a file is in the store."""
        where = self.files[name].where
        folder = where[len(_BESIDE) :] if where.startswith(_BESIDE) else f"{self.name}/{where}"
        return "/".join(part for part in (folder.rstrip("/"), name) if part)

    def check_size(self, name: str) -> int:
        """Return the size of a file; raise a DamagedError if it is missing, empty, too short or too long."""
        if name not in self.files:
            raise DamagedError(damaged_part(self.shown, name, "is not of this save"))
        expected = self.files[name].size
        try:
            size = self.store.size(self.path(name))
        except FileNotFoundError:
            raise DamagedError(damaged_part(self.shown, name, f"is missing{self._elsewhere(name)}")) from None
        if size < expected:
            what = f"is truncated: it has {size} of {expected} bytes" if size else "is empty"
            raise DamagedError(damaged_part(self.shown, name, what))
        if size > expected:
            raise DamagedError(damaged_part(self.shown, name, f"has {size} bytes, and was saved with {expected}"))
        return size

    def _elsewhere(self, name: str) -> str:
        where = self.files[name].where
        if not where.startswith(_BESIDE):
            return ""
        place = self.store.shown(where[len(_BESIDE) :])
        return f" in {place}, where it has to be: move or copy it together with this one"

    @contextmanager
    def checked(self, name: str) -> Iterator[Path]:
        """Return where on this host a file is; raise a DamagedError unless it has the bytes that were saved."""
        size, checksum = self.check_size(name), self.files[name].checksum
        with self.store.on_disk(self.path(name)) as path:
            if path.stat().st_size != size or checksum_of_part(path, 0, size) != checksum:
                raise DamagedError(damaged_part(self.shown, name, is_another("has")))
            yield path

    def lacks(self) -> list[str]:
        """Return the saves of shared files, "shared_files/SAVE", that are gone, by one listing of the folder."""
        shared = {save for save in self.saves() if save.startswith(f"{SHARED}/")}
        return sorted(shared - {f"{SHARED}/{name}" for name in self.store.names(SHARED)}) if shared else []

    def gone(self) -> list[str]:
        """Return the paths of all files that are gone."""
        paths = [self.path(name) for name in self.files]
        names = {folder: set(self.store.names(folder)) for folder in {path.rpartition("/")[0] for path in paths}}
        gone = [path for path in paths if path.rpartition("/")[2] not in names[path.rpartition("/")[0]]]
        return gone + (self.base.gone() if self.base is not None else [])

    def saves(self) -> set[str]:
        """Return the saves that the files are of, as "NAME/SAVE" with NAME beside this one or itself."""
        own = {self.path(name).rpartition("/")[0] for name, file in self.files.items() if file.where}
        return own if self.base is None else own | self.base.saves()

    def seen_from(self, other: str) -> "Manifest":
        """Return the same files as another name beside this one lists them."""

        def seen(file: SavedFile) -> SavedFile:
            beside = file.where if file.where.startswith(_BESIDE) else f"{_BESIDE}{self.name}/{file.where}"
            return file._replace(where=beside.removeprefix(f"{_BESIDE}{other}/"))

        files = {name: seen(file) for name, file in self.files.items()}
        base = None if self.base is None else self.base.seen_from(other)
        return self._replace(name=other, files=files, base=base)

    def shared(self) -> "Manifest":
        """Return the part of it whose files several manifests may list."""
        files = {name: file for name, file in self.files.items() if file.where.startswith(f"{_BESIDE}{SHARED}/")}
        return self._replace(files=files, base=None)

    def encode(self) -> bytes:
        """Return the content of the marker."""
        content = {**self._content(), "about": {**self.about._asdict(), "stands_for": list(self.about.stands_for)}}
        if self.base is not None:
            content["base"] = self.base._content()
        return json.dumps({**content, "checksum": _checksum_of(content)}, indent=0).encode()

    def _content(self) -> dict[str, Any]:
        return {"save": self.save, "files": {name: list(file) for name, file in self.files.items()}}


_BESIDE = "../"


def read_manifest(store: FolderStore, name: str) -> Manifest | None:
    """Return the manifest of a name; None if it has none. Raises a DamagedError if its own checksum is wrong."""
    try:
        data = store.read(f"{name}/{MARKER}")
    except FileNotFoundError:
        return None
    if not data.endswith(b"}"):
        raise DamagedError(damaged_part(store.shown(name), MARKER, "is truncated" if data else "is empty"))
    try:
        content = json.loads(data)
        if content.pop("checksum") == _checksum_of(content):
            base = _parsed(store, name, content["base"], None) if "base" in content else None
            return _parsed(store, name, content, base)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the bytes may be anything
        pass
    raise DamagedError(damaged_part(store.shown(name), MARKER, is_another("has")))


def _parsed(store: FolderStore, name: str, content: Any, base: Manifest | None) -> Manifest:
    files = {
        str(file): SavedFile(int(size), str(checksum), "".join(map(str, where)))
        for file, (size, checksum, *where) in content["files"].items()
    }
    if not all(is_plain_name(file) and _is_where(one.where) for file, one in files.items()):
        raise ValueError("a file lies elsewhere")
    save = str(content["save"])
    if re.fullmatch(f"(?:{SAVE_NAME.pattern}|{_FORMER_SAVE.pattern})", save) is None:
        raise ValueError("its save has another name")
    return Manifest(store, name, save, files, base, About.parse(content["about"]) if "about" in content else About())


def is_plain_name(name: str) -> bool:
    """Return whether a name leads to no other folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _is_where(where: str) -> bool:
    """Return whether a file may lie in this folder, relative to the name that lists it."""
    if where == "":  # in the name's folder itself, as former versions kept files on disks
        return True
    *above, save = where.split("/")
    leads_beside = len(above) == 2 and above[0] == ".." and is_plain_name(above[1])
    is_save = SAVE_NAME.fullmatch(save) or _FORMER_SAVE.fullmatch(save)
    return is_save is not None and (not above or leads_beside)


def new_save() -> str:
    """Return the identity of a new save."""
    return f"save-{uuid.uuid4().hex}"


def _checksum_of(content: Any) -> str:
    return checksum_of(json.dumps(content, sort_keys=True).encode())
