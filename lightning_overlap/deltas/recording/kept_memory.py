"""Host memory that copies reuse: getting a page from the system costs more than writing it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNED_TO = 64
"""Alignment of each tensor in lent memory, in bytes."""

LARGER = 4
"""Kept memory is freed if it is larger than a request by more than this factor."""


class KeptMemory:
    """Lends memory, and keeps the last piece that was given back."""

    def __init__(self) -> None:
        self._at_rest: deque[Tensor] = deque(maxlen=1)

    def lend(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[Tensor], Tensor]:
        """Return uninitialized tensors of these shapes and dtypes, and the memory of all of them, for `give_back`."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
        *firsts, num_bytes = accumulate((-(-size // ALIGNED_TO) * ALIGNED_TO for size in sizes), initial=0)
        memory = self._at_rest.pop() if self._at_rest else None
        if memory is None or not num_bytes <= memory.numel() <= LARGER * num_bytes:
            del memory
            # NumPy requests huge pages, torch does not
            memory = torch.from_numpy(np.empty(num_bytes + num_bytes // 8, dtype=np.uint8))
        places = zip(firsts, sizes, wanted, strict=True)
        return [memory[first : first + size].view(dtype).view(shape) for first, size, (shape, dtype) in places], memory

    def give_back(self, memory: Tensor) -> None:
        """Take memory back, in any thread; its tensors must not be used any more."""
        self._at_rest.append(memory)
