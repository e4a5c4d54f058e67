"""Checksums (XXH3) of files, and what is said of a file that has another one.

XXH3 finds damage and mixtures; it is no signature, as anybody can compute it.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from xxhash import xxh3_64, xxh3_64_hexdigest


class DamagedError(ValueError):
    """A checkpoint does not have what was saved: bytes changed, a file is missing, or files are of different saves."""


class About(NamedTuple):
    """What a save says of itself."""

    time: float = 0.0  # seconds since 1970; later saves of a run have later ones
    stands_for: tuple[str, ...] = ()  # patterns of the names in whose place it is until they are saved again
    resumes: bool = True  # whether a training can go on from it

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Self:
        """Return what `_asdict` gave, from JSON; errors of many types for anything else."""
        return cls(float(content["time"]), tuple(map(str, content["stands_for"])), bool(content["resumes"]))


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
        """Do nothing: who opened the file closes it, once it is on the disk."""


def checksum_of(data: bytes | memoryview) -> str:
    """Return the XXH3 of bytes, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def checksum_of_part(path: Path, start: int, end: int, then: bytes = b"") -> str:
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


def damaged_part(shown: object, name: str, what: str) -> str:
    """Return the message for a file of a checkpoint, or (with the name "") a full file, that differs from the saved."""
    return f"{shown} is a damaged checkpoint: {f'its {name}' if name else 'it'} {what}. {COPY_AGAIN}"


def is_another(has: str) -> str:
    """Return the words for bytes whose checksum is another one."""
    return f"{has} other bytes than were saved, by their checksum: they changed, or are of another save"


COPY_AGAIN = "Copy it again, or load another checkpoint."
