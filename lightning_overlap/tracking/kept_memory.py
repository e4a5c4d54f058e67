"""Memory of a host that copies take again and again: to get a page costs more than to write it."""

from __future__ import annotations

from collections import deque
from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNED_TO = 64
"""Bytes: where each tensor in lent memory begins."""

LARGER = 4
"""Memory that is so many times as large as what is asked for is let go of."""


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
