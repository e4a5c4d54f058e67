"""Several tensors in one all-to-all: what goes to a rank is put in a row, and taken apart where it has come.

An all-to-all costs the host and the network a share that does not depend on its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """One tensor that travels."""

    tensor: Tensor
    """To send, `(sum(sent), ...)`, any dtype."""
    sent: list[int]
    """Rows of it to each rank."""
    received: list[int]
    """Rows from each rank."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.tensor.element_size() * prod(self.tensor.shape[1:])


class PackedExchange:
    """The one all-to-all of several tensors, under way from the beginning.

    Args:
        parts: At least one; of the same dtypes and in the same order on all ranks, on one device.
        group: The process group.
        even: Whether every rank is known to send as many rows to each; the same on all ranks.
    """

    def __init__(self, parts: Sequence[Part], group: dist.ProcessGroup, *, even: bool = False) -> None:
        self._parts = [(part.tensor.dtype, part.tensor.shape[1:]) for part in parts]
        unit, unit_bytes = _unit(parts)
        widths = [part.row_bytes // unit_bytes for part in parts]
        sent = [[rows * width for rows in part.sent] for part, width in zip(parts, widths, strict=True)]
        came = [[rows * width for rows in part.received] for part, width in zip(parts, widths, strict=True)]
        pieces = [
            part.tensor.detach().contiguous().flatten().view(unit).split(sizes)
            for part, sizes in zip(parts, sent, strict=True)
        ]
        self._packed = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
        self._sizes = [size for of_rank in zip(*came, strict=True) for size in of_rank]
        from_ranks, to_ranks = ([sum(of_rank) for of_rank in zip(*sizes, strict=True)] for sizes in (came, sent))
        self._came = self._packed.new_empty(sum(from_ranks))
        self._stream = torch.cuda.current_stream(self._came.device) if self._came.is_cuda else None
        output_splits, input_splits = (None, None) if even else (from_ranks, to_ranks)
        self._work: dist.Work | None = dist.all_to_all_single(
            self._came, self._packed, output_splits, input_splits, group, async_op=True
        )
        self._received: list[Tensor | None] = []

    def take(self, place: slice) -> list[Tensor]:
        """Wait, and hand over what has come of some parts, each once: nothing of it is kept.

        Args:
            place: Of these parts among all.

        Returns:
            What has come of each, `(sum(received), ...)`, contiguous, for the stream that is current.

        Raises:
            RuntimeError: A rank is gone, or the group's time is over.
        """
        if self._work is not None:
            self._work.wait()
            self._hand_to_current_stream(self._packed, self._came)
            pieces = self._came.split(self._sizes)
            self._received = [
                torch.cat(pieces[number :: len(self._parts)]).view(dtype).view(-1, *shape)
                for number, (dtype, shape) in enumerate(self._parts)
            ]
            self._work = None  # which keeps what travelled, too
            del self._packed, self._came
        taken = [part for part in self._received[place] if part is not None]
        self._received[place] = [None] * len(taken)
        self._hand_to_current_stream(*taken)
        return taken

    def _hand_to_current_stream(self, *tensors: Tensor) -> None:
        """Let it use what the stream before it has made: ids and sizes of one exchange may be asked for on two."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)
            self._stream = current


def _unit(parts: Sequence[Part]) -> tuple[torch.dtype, int]:
    """Return the widest integer in which every row is whole, and its bytes: NCCL counts what it sends up to 2**31."""
    return next(
        (unit, unit.itemsize)
        for unit in (torch.int64, torch.int32, torch.int8)
        if all(part.row_bytes % unit.itemsize == 0 for part in parts)
    )
