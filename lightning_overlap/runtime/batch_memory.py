"""Whether a data loader gives each batch memory of its own: several are kept then before they are copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_tree import leaves


class BatchMemory:
    """Compares the memory of a loader's first batches. One that fills the same buffers anew overwrites what is kept.

    Args:
        num: How many batches, one after the other, have to be in memory of their own.
    """

    def __init__(self, num: int) -> None:
        self._num_left = num
        self._kept: list[Any] = []  # so that nobody else gets their memory
        self._seen: set[int] = set()
        self._is_shared = False

    @property
    def is_own(self) -> bool:
        """Whether so many batches have come, each in memory of its own."""
        return self._num_left == 0 and not self._is_shared

    def note(self, batch: Any) -> None:
        """Take notice of a batch as the loader has given it."""
        if self._num_left == 0:
            return
        self._num_left -= 1
        parts = [batch, *(leaf for _, leaf in leaves(batch, lambda _: False))]
        places = {place for part in parts if (place := _place(part)) is not None} | {id(batch)}
        self._is_shared |= not places.isdisjoint(self._seen)
        self._seen |= places
        self._kept += parts
        if self._num_left == 0:
            self._kept.clear()
            self._seen.clear()


def _place(part: Any) -> int | None:
    """Return where the memory of a tensor or an array begins; None for what has none."""
    if isinstance(part, Tensor):
        return part.data_ptr() or None if part.layout is torch.strided else id(part)
    interface = getattr(part, "__array_interface__", None)
    return interface["data"][0] if isinstance(interface, dict) else None
