"""Checksums of checkpoints: computed while a file is written, compared before anything that it has is used.

A folder has `checksums.json`: the identity of the save, which `meta.pt` has too, and size, checksum and folder of every
other file. A full file has the checksums of its pieces in the comment of its zip archive, which other readers skip.
XXH3 finds damage and mixtures; it is no signature, as anybody can compute it.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from typing_extensions import override
from xxhash import xxh3_64, xxh3_64_hexdigest

from .not_checkpoints import CHECKSUMS_NAME, SAVE_NAME, DamagedError, damaged_part, is_another, zip_comment
from .places import Place, as_place

_SEAL = "lightning_overlap xxh3_64 "  # how the comment of a full file begins; the checksums of its pieces follow
# A comment has 64 KiB at most: 512 pieces of 16 MiB, then 512 of twice the size, and so on, 7 times.
_SMALLEST_PIECE, _OF_ONE_SIZE, _SIZES = 1 << 24, 512, 7
_NO_COMMENT = b"\0\0"  # the length of the comment: the end of an archive as torch.save writes it


class HashedFile:
    """An open file, for writing from its start to its end; has size and checksum of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxh3_64()
        self.size = 0

    @property
    def checksum(self) -> str:
        """The XXH3 of what was written so far, as 16 hexadecimal digits."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Write bytes, or an object with the buffer protocol; return their number."""
        self._hash.update(data)
        written = self._file.write(data)
        self.size += written
        return written

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.size

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CheckpointFiles(FileSystemBase):
    """Files of a checkpoint for `torch.distributed.checkpoint`, which uses each path as it is given."""

    @override
    def init_path(self, path: Any) -> Any:
        return path

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class HashingFiles(CheckpointFiles):
    """Files for a writer of `torch.distributed.checkpoint`; `written` has what each was, by name.

    Args:
        files: Where they are written.
        where: The folder of the files, relative to the checkpoint.
    """

    def __init__(self, files: FileSystemBase, where: str) -> None:
        self.written: dict[str, SavedFile] = {}
        self._files, self._where = files, where
        self.is_local = isinstance(files, FileSystem)

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self._files.create_stream(path, mode) as file:
            hashed = HashedFile(file)  # type: ignore[arg-type]
            yield hashed
        self.written[PurePath(path).name] = SavedFile(hashed.size, hashed.checksum, self._where)

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        self._files.rename(path, new_path)
        self.written[PurePath(new_path).name] = self.written.pop(PurePath(path).name)

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return self._files.concat_path(path, suffix)

    @override
    def mkdir(self, path: Any) -> None:
        self._files.mkdir(path)

    @override
    def exists(self, path: Any) -> bool:
        return self._files.exists(path)

    @override
    def rm_file(self, path: Any) -> None:
        self._files.rm_file(path)


class SavedFile(NamedTuple):
    """What a file of a folder was when it was saved."""

    size: int  # in bytes; the least one if `checksum` is ""
    checksum: str  # "" if unknown
    where: str = ""  # its folder, relative to the checkpoint: "", SAVE, or ../OTHER/SAVE with OTHER beside it


class Checksums(NamedTuple):
    """What the files of a folder were when they were saved."""

    place: Place
    save: str  # identity of the save; "" if unknown
    files: Mapping[str, SavedFile]  # by name
    base: "Checksums | None" = None  # of the base of an incremental checkpoint in an object store

    def check_size(self, name: str) -> int:
        """Return the size of a file; raise a DamagedError if it is missing, empty, too short or too long."""
        if name not in self.files:
            raise DamagedError(damaged_part(self.place, name, "is not of this save"))
        expected, checksum, where = self.files[name]
        try:
            size = self.place.size(name, where)
        except FileNotFoundError:
            raise DamagedError(damaged_part(self.place, name, "is missing")) from None
        if size < expected:
            what = f"is truncated: it has {size} of {expected} bytes" if size else "is empty"
            raise DamagedError(damaged_part(self.place, name, what))
        if size > expected and checksum:
            raise DamagedError(damaged_part(self.place, name, f"has {size} bytes, and was saved with {expected}"))
        return size

    @contextmanager
    def checked(self, name: str) -> Iterator[Path]:
        """Return where on this host a file is; raise a DamagedError unless it has the bytes that were saved."""
        size, (_, checksum, where) = self.check_size(name), self.files[name]
        with self.place.on_disk(name, where) as path:
            if checksum and (path.stat().st_size != size or _checksum(path, 0, size) != checksum):
                raise DamagedError(damaged_part(self.place, name, is_another("has")))
            yield path

    def saves(self) -> set[str]:
        """Return the saves that the files are of, as "NAME/SAVE" with NAME beside the checkpoint or itself."""
        folders = {file.where for file in self.files.values() if file.where}
        own = {one.removeprefix("../") if "/" in one else f"{self.place.name}/{one}" for one in folders}
        return own if self.base is None else own | self.base.saves()

    def seen_from(self, place: Place) -> "Checksums":
        """Return the same files as a checkpoint at another place beside this one lists them."""
        above, own = "../", f"{place.name}/"

        def seen(file: SavedFile) -> SavedFile:
            where = file.where if "/" in file.where else f"{above}{self.place.name}/{file.where}"
            return file._replace(where=where.removeprefix(above + own))

        base = None if self.base is None else self.base.seen_from(place)
        return Checksums(place, self.save, {name: seen(file) for name, file in self.files.items()}, base)

    def encode(self) -> bytes:
        """Return the content of `checksums.json`."""
        content = self._content()
        if self.base is not None:
            content["base"] = self.base._content()
        return json.dumps({**content, "checksum": _json_checksum(content)}, indent=0).encode()

    def _content(self) -> dict[str, Any]:
        files = {name: list(file if file.where else file[:2]) for name, file in self.files.items()}
        return {"save": self.save, "files": files}


def is_plain_name(name: str) -> bool:
    """Return whether a name leads to no other folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def is_where(where: str) -> bool:
    """Return whether a file may lie in this folder, relative to its checkpoint: "", SAVE or ../OTHER/SAVE."""
    *above, save = where.split("/")
    leads_beside = len(above) == 2 and above[0] == ".." and is_plain_name(above[1])
    return where == "" or (SAVE_NAME.fullmatch(save) is not None and (not above or leads_beside))


def read_checksums(place: Path | Place) -> Checksums | None:
    """Return the checksums of a folder; None if it has none. Raises a DamagedError if their own checksum is wrong."""
    place = as_place(place)
    try:
        data = place.read(CHECKSUMS_NAME)
    except FileNotFoundError:
        return None
    if not data.endswith(b"}"):
        raise DamagedError(damaged_part(place, CHECKSUMS_NAME, "is truncated" if data else "is empty"))
    try:
        content = json.loads(data)
        if content.pop("checksum") == _json_checksum(content):
            base = _parsed(place, content["base"], None) if "base" in content else None
            return _parsed(place, content, base)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the bytes may be anything
        pass
    raise DamagedError(damaged_part(place, CHECKSUMS_NAME, is_another("has")))


def _parsed(place: Place, content: Any, base: Checksums | None) -> Checksums:
    files = {
        name: SavedFile(int(size), str(checksum), *map(str, where))
        for name, (size, checksum, *where) in content["files"].items()
    }
    if not all(is_plain_name(name) and is_where(file.where) for name, file in files.items()):
        raise ValueError("a file lies elsewhere")
    return Checksums(place, str(content["save"]), files, base)


class CheckedFiles(CheckpointFiles):
    """Files for a reader of `torch.distributed.checkpoint`, each checked before it is read; a path is a name."""

    checksums: Checksums

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with self.checksums.checked(path) as checked, checked.open(mode) as file:
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
        return path in self.checksums.files


class SealedFile:
    """An open file that `torch.save` writes; `seal` appends the checksums of its pieces as the archive's comment."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash, self._left = xxh3_64(), _piece_size(0)
        self._checksums: list[str] = []

    def write(self, data: Any) -> int:
        """Write bytes, or an object with the buffer protocol; return their number."""
        rest = memoryview(data).cast("B")
        self._file.write(rest)
        num_bytes = len(rest)
        while len(rest) > self._left:
            self._hash.update(rest[: self._left])
            rest = rest[self._left :]
            self._checksums.append(self._hash.hexdigest())
            self._hash, self._left = xxh3_64(), _piece_size(len(self._checksums))
        self._hash.update(rest)
        self._left -= len(rest)
        return num_bytes

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def seal(self) -> None:
        """Append the checksums, after `torch.save`."""
        text = _SEAL + " ".join([*self._checksums, self._hash.hexdigest()])
        comment = f"{text} {checksum_of(text.encode())}".encode()
        self._file.seek(-len(_NO_COMMENT), 2)
        self._file.write(len(comment).to_bytes(2, "little"))
        self._file.write(comment)


class Seal(NamedTuple):
    """The checksums of a full file."""

    path: Path
    size: int  # of the file without its comment, in bytes
    checksums: list[str]  # of its pieces

    def check(self, part: int = 0, num_parts: int = 1) -> None:
        """Read every `num_parts`-th piece from `part` on; raise a DamagedError unless it has the saved bytes."""
        start = 0
        for index, checksum in enumerate(self.checksums):
            end = min(start + _piece_size(index), self.size)
            if index % num_parts == part:
                # Where the length of the comment is now, there were zeros when the checksums were computed.
                num_zeros = max(0, end - max(start, self.size - len(_NO_COMMENT)))
                if _checksum(self.path, start, end - num_zeros, bytes(num_zeros)) != checksum:
                    what = f"between {start:,} and {end:,} bytes from its start"
                    raise DamagedError(damaged_part(self.path, "", is_another(f"{what} has")))
            start = end
        if start != self.size:
            raise DamagedError(damaged_part(self.path, "", f"has {self.size} bytes, and was saved with {start}"))


def read_seal(path: Path) -> Seal | None:
    """Return the checksums of a full file; None without any. Raises a DamagedError if their own checksum is wrong."""
    comment, stated_size = zip_comment(path)
    text, _, checksum = comment.decode(errors="replace").rpartition(" ")
    if not comment.startswith(_SEAL.encode()):
        return None
    if len(comment) != stated_size:
        what = "is truncated" if len(comment) < stated_size else "has bytes after its end"
        raise DamagedError(damaged_part(path, "", what))
    if checksum_of(text.encode()) != checksum:
        raise DamagedError(damaged_part(path, "", is_another("at its end has")))
    return Seal(path, path.stat().st_size - len(comment), text.removeprefix(_SEAL).split(" "))


def checksum_of(data: bytes | memoryview) -> str:
    """Return the XXH3 of bytes, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def _piece_size(index: int) -> int:
    """Return the size of a piece of a full file in bytes; the last possible piece has the rest."""
    size_class = index // _OF_ONE_SIZE
    return _SMALLEST_PIECE << size_class if index < _OF_ONE_SIZE * _SIZES - 1 else 1 << 62


def _checksum(path: Path, start: int, end: int, then: bytes = b"") -> str:
    """Return the XXH3 of a part of a file, followed by the bytes `then`."""
    found = xxh3_64()
    if end > start:  # an empty file cannot be mapped
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
            view[start:end] as part,
        ):
            found.update(part)
    found.update(then)
    return found.hexdigest()


def _json_checksum(content: Any) -> str:
    return checksum_of(json.dumps(content, sort_keys=True).encode())
