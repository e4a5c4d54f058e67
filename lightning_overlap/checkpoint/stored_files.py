"""Files of a store as `torch.distributed.checkpoint` writes and reads them, with their checksums."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase
from typing_extensions import override

from ..storage import FolderStore, HashedFile, Manifest, SavedFile


class _Files(FileSystemBase):
    """Uses each path as it is given."""

    @override
    def init_path(self, path: Any) -> Any:
        return path

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SavedFiles(_Files):
    """Files of one folder of a save, for a writer; `written` has what each was, by name.

    Not torch's own files: those of a store get `os.sync()`, which waits for every disk of the host, and a file whose
    writing fails is completed.

    Args:
        store: Where they are written.
        folder: Their folder in the store, which is there.
        where: The same folder, relative to the name that lists them.
    """

    def __init__(self, store: FolderStore, folder: str, where: str) -> None:
        self.written: dict[str, SavedFile] = {}
        self.folder, self._store, self._where = folder, store, where

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._store.opened(path) as file:
            hashed = HashedFile(file)
            yield hashed
        self.written[path.rpartition("/")[2]] = SavedFile(hashed.size, hashed.checksum, self._where)

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return f"{path}/{suffix}"

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        self._store.rename(path, new_path)
        self.written[new_path.rpartition("/")[2]] = self.written.pop(path.rpartition("/")[2])

    @override
    def mkdir(self, path: Any) -> None:
        """Do nothing: the folder is there."""

    @override
    def exists(self, path: Any) -> bool:
        return self._store.kind(path) is not None

    @override
    def rm_file(self, path: Any) -> None:
        self._store.remove([path])


class CheckedFiles(_Files):
    """Files that a manifest lists, for a reader, each checked before it is read; a path is a name."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._manifest.checked(path) as checked, checked.open(mode) as file:
            yield file

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return suffix

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError("it is only read")

    @override
    def rm_file(self, path: Any) -> None:
        raise NotImplementedError("it is only read")

    @override
    def mkdir(self, path: Any) -> None:
        raise NotImplementedError("it is only read")

    @override
    def exists(self, path: Any) -> bool:
        return path in self._manifest.files
