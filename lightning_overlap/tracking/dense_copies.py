"""Copies of what the dense optimizer writes: any of it may change in any step, so a copy is compared with the last."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class DenseCopy:
    """Tensors as they are now, on the host.

    On a device the current stream copies them to pinned memory, and the host does not wait.

    Args:
        tensors: Any shape and dtype, by any key.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {name: to_host(tensor.detach()) for name, tensor in tensors.items()}
        self._event = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> dict[str, Tensor]:
        """Wait for the copies, in any thread, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor; from a device to pinned memory, on the current stream, for which the caller waits."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def changed_rows(now_RD: Tensor, before_RD: Tensor | None) -> Tensor:
    """Return the rows that differ in any bit, `(N,)`, int64; all, where there is nothing before.

    Args:
        now_RD: `(rows, columns)`, on the host.
        before_RD: Of the same shape and dtype.
    """
    if before_RD is None:
        return torch.arange(now_RD.shape[0])
    differ = now_RD.contiguous().view(torch.uint8) != before_RD.contiguous().view(torch.uint8)
    return differ.any(1).nonzero().squeeze(1)
