"""A file of `torch.save` with the checksums of its pieces in the comment of its zip archive, which readers skip."""

import json
from pathlib import Path
from typing import IO, Any, NamedTuple

from xxhash import xxh3_64

from .checksums import About, DamagedError, checksum_of, checksum_of_part, damaged_part, is_another

_SEAL = "lightning_overlap xxh3_64 "  # how the comment begins; the checksums of its pieces follow
# A comment has 64 KiB at most: 512 pieces of 16 MiB, then 512 of twice the size, and so on, 7 times.
_SMALLEST_PIECE, _OF_ONE_SIZE, _SIZES = 1 << 24, 512, 7
_NO_COMMENT = b"\0\0"  # the length of the comment: the end of an archive as torch.save writes it
_END = b"PK\x05\x06"  # how the last record of a zip archive begins, which ends with the comment's length
_END_SIZE, _MOST_COMMENT = 22, (1 << 16) - 1


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

    def seal(self, about: About | None = None) -> None:
        """Append the checksums, after `torch.save`, and what the save says of itself."""
        told = json.dumps((about or About())._asdict(), separators=(",", ":"))
        text = _SEAL + " ".join([*self._checksums, self._hash.hexdigest(), told.replace(" ", "\\u0020")])
        comment = f"{text} {checksum_of(text.encode())}".encode()
        self._file.seek(-len(_NO_COMMENT), 2)
        self._file.write(len(comment).to_bytes(2, "little"))
        self._file.write(comment)


class Seal(NamedTuple):
    """The checksums of a sealed file."""

    path: Path
    size: int  # of the file without its comment, in bytes
    checksums: list[str]  # of its pieces
    about: About

    def check(self, part: int = 0, num_parts: int = 1) -> None:
        """Read every `num_parts`-th piece from `part` on; raise a DamagedError unless it has the saved bytes."""
        start = 0
        for index, checksum in enumerate(self.checksums):
            end = min(start + _piece_size(index), self.size)
            if index % num_parts == part:
                # Where the length of the comment is now, there were zeros when the checksums were computed.
                num_zeros = max(0, end - max(start, self.size - len(_NO_COMMENT)))
                if checksum_of_part(self.path, start, end - num_zeros, bytes(num_zeros)) != checksum:
                    what = f"between {start:,} and {end:,} bytes from its start"
                    raise DamagedError(damaged_part(self.path, "", is_another(f"{what} has")))
            start = end
        if start != self.size:
            raise DamagedError(damaged_part(self.path, "", f"has {self.size} bytes, and was saved with {start}"))


def read_seal(path: Path) -> Seal | None:
    """Return the checksums of a sealed file; None without any. A DamagedError if their own checksum is wrong."""
    comment, stated_size = _zip_comment(path)
    text, _, checksum = comment.decode(errors="replace").rpartition(" ")
    if not comment.startswith(_SEAL.encode()):
        return None
    if len(comment) != stated_size:
        what = "is truncated" if len(comment) < stated_size else "has bytes after its end"
        raise DamagedError(damaged_part(path, "", what))
    if checksum_of(text.encode()) != checksum:
        raise DamagedError(damaged_part(path, "", is_another("at its end has")))
    checksums, told = text.removeprefix(_SEAL).split(" "), About()
    if checksums[-1].startswith("{"):  # not in files of former versions
        try:
            told = About.parse(json.loads(checksums.pop()))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedError(damaged_part(path, "", is_another("at its end has"))) from None
    return Seal(path, path.stat().st_size - len(comment), checksums, told)


def _zip_comment(path: Path) -> tuple[bytes, int]:
    """Return what follows the last record of a zip archive, and its length by that record; (b"", 0) without one."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_SIZE - _MOST_COMMENT))
        _, found, record = file.read().rpartition(_END)
    at = _END_SIZE - len(_END)
    return (record[at:], int.from_bytes(record[at - 2 : at], "little")) if found else (b"", 0)


def _piece_size(index: int) -> int:
    """Return the size of a piece of a file in bytes; the last possible piece has the rest."""
    size_class = index // _OF_ONE_SIZE
    return _SMALLEST_PIECE << size_class if index < _OF_ONE_SIZE * _SIZES - 1 else 1 << 62
