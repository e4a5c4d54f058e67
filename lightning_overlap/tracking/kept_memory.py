"""Memory of a host that copies take again and again: to get a page costs more than to write it."""

from __future__ import annotations

from collections import deque
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

ALIGNED_TO = 64
"""Bytes: where each tensor in lent memory begins."""

LARGER = 4
"""Memory that is so many times as large as what is asked for is let go of."""

FIRST_IDS = 1 << 14
"""Room for ids that are kept, at first."""

_Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""On a host, `(N,)`."""


class LentMemory:
    """One piece of memory, taken by several tensors until all of them are given back.

    Args:
        content: The memory.
        owner: Where it goes when it is given back.
    """

    def __init__(self, content: Tensor, owner: deque[Tensor]) -> None:
        self._content: Tensor | None = content
        self._owner = owner
        self._num_taken = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in it, with any values.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
        """
        assert self._content is not None
        first, self._num_taken = self._num_taken, self._num_taken + taken_by(shape, dtype)
        return self._content[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def give_back(self) -> None:
        """Say that nobody reads its tensors any more, in any thread; again is fine."""
        content, self._content = self._content, None
        if content is not None:
            self._owner.append(content)


class KeptMemory:
    """Lends memory, and keeps one piece of what comes back for the next time; more is let go of."""

    def __init__(self) -> None:
        self._at_rest: deque[Tensor] = deque(maxlen=1)

    def lend(self, num_bytes: int) -> LentMemory:
        """Return memory of so many bytes at least.

        Args:
            num_bytes: The sum of what `taken_by` tells of the tensors to come.
        """
        content = self._at_rest.pop() if self._at_rest else None
        if content is None or not num_bytes <= content.numel() <= LARGER * num_bytes:
            del content
            # NumPy asks the system for huge pages, torch does not
            content = torch.from_numpy(np.empty(num_bytes + num_bytes // 8, dtype=np.uint8))
        return LentMemory(content, self._at_rest)


def taken_by(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return how many bytes of lent memory a tensor takes."""
    return -(-prod(shape) * dtype.itemsize // ALIGNED_TO) * ALIGNED_TO


class KeptIds:
    """Copies ids into memory that is used again once they are forgotten."""

    def __init__(self) -> None:
        self._blocks: list[_Ids] = []
        self._block = self._first = 0  # where the next ids go

    def copy(self, ids_N: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> _Ids:
        """Return a copy of ids."""
        end = self._first + ids_N.size
        while self._block == len(self._blocks) or end > self._blocks[self._block].size:
            if self._block == len(self._blocks):
                so_far = sum(block.size for block in self._blocks)
                self._blocks.append(np.empty(max(ids_N.size, so_far, FIRST_IDS), dtype=np.int64))
            else:
                self._block += 1
            self._first, end = 0, ids_N.size
        copied = self._blocks[self._block][self._first : end]
        copied[:] = ids_N
        self._first = end
        return copied

    def forget(self) -> None:
        """Use the memory again, as much as was used since the last time; more is let go of."""
        del self._blocks[self._block + 1 :]
        self._block = self._first = 0
