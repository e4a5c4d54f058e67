"""Send several tensors in one all-to-all, since each costs the host and the network a fixed time besides its bytes."""

from collections.abc import Sequence
from itertools import chain
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """One of the tensors of an all-to-all."""

    tensor: Tensor  # to send, `(sum(sent), ...)`, of any dtype: rows in the order of their destinations, or `pieces`
    sent: Sequence[int]  # number of rows for each rank
    received: Sequence[int]  # number of rows from each rank
    segments: Sequence[Sequence[int]] | None = None
    """By rank, the rows of each segment that it sends. `take` returns segment 0 of all ranks, then segment 1, ..."""
    pieces: Sequence[int] | None = None  # rows of consecutive pieces of the tensor, if these are sent in another order
    places: Sequence[Sequence[int]] | None = None  # by rank, the numbers of the pieces for it


class PackedExchange:
    """One all-to-all of several tensors, of the same dtypes on all ranks, started on the current stream.

    `even`, equal on all ranks: every rank sends the same number of rows to each rank.
    """

    def __init__(self, parts: Sequence[Part], group: dist.ProcessGroup, streams: Any, *, even: bool = False) -> None:
        self._parts = [(part.tensor.dtype, part.tensor.shape[1:]) for part in parts]
        row_bytes = [dtype.itemsize * prod(shape) for dtype, shape in self._parts]
        # The widest integer that divides every row: NCCL counts at most 2**31 elements.
        unit = {8: torch.int64, 4: torch.int32}.get(gcd(8, *row_bytes), torch.int8)
        widths = [size // unit.itemsize for size in row_bytes]
        sent, came, self._sizes = [], [], list[int]()
        pieces: list[list[Sequence[Tensor]]] = []  # by part and rank
        for part, width in zip(parts, widths, strict=True):
            sent.append([*map(width.__mul__, part.sent)])
            came.append([*map(width.__mul__, part.received)])
            flat = part.tensor.detach().reshape(-1).view(unit)
            if part.pieces is None or part.places is None:
                pieces.append([*zip(flat.split_with_sizes(sent[-1]))])
            else:
                found = flat.split_with_sizes([*map(width.__mul__, part.pieces)])
                pieces.append([[*map(found.__getitem__, places)] for places in part.places])
        self._packed = torch.cat([*chain.from_iterable(chain.from_iterable(zip(*pieces, strict=True)))])
        self._segments: list[list[slice]] = [[] for _ in parts]  # places in `_sizes`, by part and rank
        for rank in range(len(came[0])):
            for part, width, places in zip(parts, widths, self._segments, strict=True):
                of_rank = (part.received[rank],) if part.segments is None else part.segments[rank]
                places.append(slice(len(self._sizes), len(self._sizes) + len(of_rank)))
                self._sizes += map(width.__mul__, of_rank)
        from_ranks, to_ranks = [*map(sum, zip(*came, strict=True))], [*map(sum, zip(*sent, strict=True))]
        self._came = self._packed.new_empty(sum(from_ranks))
        self._streams, self._stream = streams, streams.current()
        output_splits, input_splits = (None, None) if even else (from_ranks, to_ranks)
        self._work: dist.Work | None = dist.all_to_all_single(
            self._came, self._packed, output_splits, input_splits, group, async_op=True
        )
        self._received: list[Tensor | None] = []

    def take(self, place: slice) -> list[Tensor]:
        """Wait and return the parts at some positions, once. Raises a RuntimeError if a rank is gone or late."""
        if self._work is not None:
            self._work.wait()
            self._hand_to_current_stream(self._packed, self._came)
            pieces = self._came.split_with_sizes(self._sizes)
            for (dtype, shape), places in zip(self._parts, self._segments, strict=True):
                by_rank = map(pieces.__getitem__, places)
                part = torch.cat([*chain.from_iterable(zip(*by_rank, strict=True))]).view(dtype)
                self._received.append(part.view(-1, *shape) if shape else part)
            self._work = None  # it also holds the sent and received tensors
            del self._packed, self._came
        taken = [part for part in self._received[place] if part is not None]
        self._received[place] = [None] * len(taken)
        self._hand_to_current_stream(*taken)
        return taken

    def _hand_to_current_stream(self, *tensors: Tensor) -> None:
        """Let the current stream use these tensors: ids and sizes of one exchange may be taken on different streams."""
        current = self._streams.current()
        if current is not self._stream:
            self._streams.wait(current, self._streams.record(self._stream))
            self._streams.record_stream(tensors, current)
            self._stream = current
