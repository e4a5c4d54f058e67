"""A checksum for a file that `torch.save` writes: the comment of its zip archive, which `torch.load` skips."""

import os
import re
import struct
from typing import IO, Any

from .form import TRAILER_SIZE, FileError, crc32

_END = b"PK\5\6"  # how the end of an archive begins; it has 22 bytes, the last two of which are the comment's length
_END_SIZE, _NO_COMMENT = 22, b"\0\0"
_LENGTH = struct.pack("<H", TRAILER_SIZE)
_CHUNK = 1 << 22


class SealedFile:
    """An open file for `torch.save`; `seal` then adds the checksum of all that was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._checksum = file, 0
        self._held = b""  # the last two bytes so far

    def write(self, data: Any) -> int:
        """Write bytes, or an object with the buffer protocol; return their number."""
        view = memoryview(data).cast("B")
        if len(view) < len(_NO_COMMENT):
            last = self._held + bytes(view)
            self._put(last[: -len(_NO_COMMENT)])
            self._held = last[-len(_NO_COMMENT) :]
        else:
            self._put(self._held)
            self._put(view[: -len(_NO_COMMENT)])
            self._held = bytes(view[-len(_NO_COMMENT) :])
        return len(view)

    def flush(self) -> None:
        """Hand what is written to the operating system."""
        self._file.flush()

    def seal(self) -> None:
        """Write the checksum."""
        if self._held != _NO_COMMENT:
            raise ValueError("the file is no archive without a comment, as torch.save writes it.")
        self._file.write(_LENGTH + b"CRC32:%08x" % self._checksum)

    def _put(self, data: Any) -> None:
        self._checksum = crc32(data, self._checksum)
        self._file.write(data)


def check_seal(path: str | os.PathLike[str]) -> None:
    """Raise a FileError if a file has not the bytes that were sealed; one that was never sealed is not checked."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_SIZE - TRAILER_SIZE))
        tail = file.read()
        if tail[-_END_SIZE:].startswith(_END):
            return
        found = re.fullmatch(rb"CRC32:([0-9a-f]{8})", tail[-TRAILER_SIZE:])
        if not tail.startswith(_END) or not tail[:-TRAILER_SIZE].endswith(_LENGTH) or found is None:
            raise FileError(f"{path} is damaged or cut short, or no file of torch.save.")
        file.seek(0)
        left, checksum = size - TRAILER_SIZE - len(_LENGTH), 0
        while left and (chunk := file.read(min(_CHUNK, left))):
            checksum = crc32(chunk, checksum)
            left -= len(chunk)
        if checksum != int(found[1], 16):
            raise FileError(f"{path} is damaged: its checksum is wrong.")
