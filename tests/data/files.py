"""What tests of data modules share: files of rows, and a trainer that knows its place."""

from __future__ import annotations

import gzip
from pathlib import Path


class FakeTrainer:
    def __init__(self, rank: int, world_size: int, epoch: int = 0) -> None:
        self.global_rank, self.world_size, self.current_epoch = rank, world_size, epoch


def write(path: Path, lines: list[bytes]) -> Path:
    """Write lines, compressed if the name says so; return the path."""
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
