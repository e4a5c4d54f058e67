"""A store of objects for tests, `objects://bucket/key`: whole puts, no folders, no renames; all processes share it."""

import datetime
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

_actions: list[Callable[[str, str], None]] = []


@contextmanager
def store_in(folder: str | Path) -> Iterator[None]:
    """Let this process keep the objects of `objects://` in a folder, each in a file."""
    fsspec.register_implementation("objects", Objects, clobber=True)
    Path(folder).mkdir(exist_ok=True)
    before, Objects.root = Objects.root, Path(folder)
    Objects.clear_instance_cache()
    try:
        yield
    finally:
        Objects.root = before


@contextmanager
def before_each_change(action: Callable[[str, str], None]) -> Iterator[None]:
    """Call `action("put" | "remove", path)` before an object is written or removed."""
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


_one_change = threading.RLock()  # threads of a process change one after the other, and see it before their own


def _tell(what: str, path: str) -> None:
    for action in list(_actions):
        action(what, path)


@contextmanager
def needing(key: str) -> Iterator[None]:
    """Let the store refuse whoever does not give it this key, by an error that says the one that was given."""
    Objects.needed = key
    try:
        yield
    finally:
        Objects.needed = ""


class Objects(AbstractFileSystem):
    protocol = "objects"
    root = Path()
    needed = ""
    unknown = ""  # how the path ends of which the store says nothing

    def __init__(self, key: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.key = key

    def _file(self, path: str) -> Path:
        if self.needed not in ("", self.key):
            raise PermissionError(f"{self.key!r} does not open {path}")
        return self.root / quote(self._strip_protocol(path), safe="")

    def _keys(self) -> list[str]:
        return sorted(unquote(name) for name in os.listdir(self.root) if not name.endswith("~"))

    def put_object(self, path: str, content: bytes) -> None:
        with _one_change:
            _tell("put", path)
            file = self._file(path)
            half = file.with_name(f"{os.getpid()}~")
            half.write_bytes(content)
            half.replace(file)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self._file(path).is_file():
            found = [self._info_of(path)]
        else:
            below = [key[len(path) + 1 :] for key in self._keys() if key.startswith(f"{path}/")]
            names = {f"{path}/{rest.partition('/')[0]}": "/" in rest for rest in below}
            found = [
                {"name": name, "size": 0, "type": "directory"} if is_folder else self._info_of(name)
                for name, is_folder in names.items()
            ]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def _info_of(self, path: str) -> dict[str, Any]:
        stat = self._file(path).stat()
        return {"name": path, "size": stat.st_size, "type": "file", "modified": stat.st_mtime}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if self.unknown and path.endswith(self.unknown):
            raise ConnectionError(f"no answer about {path}")
        if self._file(path).is_file():
            return self._info_of(path)
        self.ls(path)
        return {"name": path, "size": 0, "type": "directory"}

    def modified(self, path: str) -> datetime.datetime:
        if (info := self.info(path))["type"] == "directory":
            raise IsADirectoryError(path)
        return datetime.datetime.fromtimestamp(int(info["modified"]), datetime.UTC)  # whole seconds, as S3 has it

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **kwargs: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self._file(path).read_bytes())
        return _Upload(self, path, autocommit)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.put_object(path, value)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.put_object(path2, self._file(path1).read_bytes())

    def _rm(self, path: str) -> None:
        with _one_change:
            _tell("remove", path)
            self._file(path).unlink()

    rm_file = _rm

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        for key in self.find(path):
            self._rm(key)

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def rmdir(self, path: str) -> None:
        raise NotImplementedError


class _Upload(io.BytesIO):
    """Becomes an object when it is closed, in a transaction of fsspec when that ends."""

    def __init__(self, files: Objects, path: str, autocommit: bool) -> None:
        super().__init__()
        self._files, self._path, self._autocommit = files, path, autocommit
        self._content = b""
        self._dropped = False

    def discard(self) -> None:
        self._dropped = True

    def commit(self) -> None:
        self._files.put_object(self._path, self._content)

    def close(self) -> None:
        if not self.closed and not self._dropped:
            self._content = self.getvalue()
            if self._autocommit:
                self.commit()
        super().close()
