"""Checksums of checkpoints: computed while a file is written, compared before anything that it has is used.

A folder has `checksums.json`: the identity of the save, which `meta.pt` has too, and size and checksum of every other
file. A full file has the checksums of its pieces in the comment of its zip archive, which other readers skip. XXH3
finds damage and mixtures; it is no signature, as anybody can compute it.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override
from xxhash import xxh3_64, xxh3_64_hexdigest

from .not_checkpoints import DamagedError, damaged_part, is_another, zip_comment

CHECKSUMS_NAME = "checksums.json"

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


class HashingFiles(FileSystem):
    """Files for a writer of `torch.distributed.checkpoint`; `written` has name -> (size, checksum) of each."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            hashed = HashedFile(file)  # type: ignore[arg-type]
            yield hashed
        self.written[PurePath(path).name] = hashed.size, hashed.checksum

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[PurePath(new_path).name] = self.written.pop(PurePath(path).name)


class Checksums(NamedTuple):
    """What the files of a folder were when they were saved."""

    folder: Path
    save: str  # identity of the save; "" if unknown
    files: Mapping[str, tuple[int, str]]  # name -> size in bytes and checksum; the least size and "" if unknown

    def check_size(self, name: str) -> int:
        """Return the size of a file; raise a DamagedError if it is missing, empty, too short or too long."""
        if name not in self.files:
            raise DamagedError(damaged_part(self.folder, name, "is not of this save"))
        expected, checksum = self.files[name]
        try:
            size = (self.folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(damaged_part(self.folder, name, "is missing")) from None
        if size < expected:
            what = f"is truncated: it has {size} of {expected} bytes" if size else "is empty"
            raise DamagedError(damaged_part(self.folder, name, what))
        if size > expected and checksum:
            raise DamagedError(damaged_part(self.folder, name, f"has {size} bytes, and was saved with {expected}"))
        return size

    def check(self, name: str) -> None:
        """Read a file; raise a DamagedError unless it has the bytes that were saved."""
        size, checksum = self.check_size(name), self.files[name][1]
        if checksum and _checksum(self.folder / name, 0, size) != checksum:
            raise DamagedError(damaged_part(self.folder, name, is_another("has")))

    def encode(self) -> bytes:
        """Return the content of `checksums.json`."""
        content = {"save": self.save, "files": self.files}
        return json.dumps({**content, "checksum": _json_checksum(content)}, indent=0).encode()


def read_checksums(folder: Path) -> Checksums | None:
    """Return the checksums of a folder; None if it has none. Raises a DamagedError if their own checksum is wrong."""
    try:
        data = (folder / CHECKSUMS_NAME).read_bytes()
    except FileNotFoundError:
        return None
    if not data.endswith(b"}"):
        raise DamagedError(damaged_part(folder, CHECKSUMS_NAME, "is truncated" if data else "is empty"))
    try:
        content = json.loads(data)
        if content.pop("checksum") == _json_checksum(content):
            files = {name: (int(size), str(checksum)) for name, (size, checksum) in content["files"].items()}
            if all(PurePath(name).name == name for name in files):
                return Checksums(folder, str(content["save"]), files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the bytes may be anything
        pass
    raise DamagedError(damaged_part(folder, CHECKSUMS_NAME, is_another("has")))


class CheckedFiles(FileSystem):
    """Files for a reader of `torch.distributed.checkpoint`, each checked before it is read."""

    checksums: Checksums | None = None

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if self.checksums is not None:
            self.checksums.check(PurePath(path).name)
        with super().create_stream(path, mode) as file:
            yield file


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
