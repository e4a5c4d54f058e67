"""Send several tensors in one all-to-all, since each costs the host and the network a fixed time besides its bytes."""

from collections.abc import Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Entry(NamedTuple):
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

    def __init__(self, entries: Sequence[Entry], group: dist.ProcessGroup, streams: Any, *, even: bool = False) -> None:
        self._entries = [(entry.tensor.dtype, entry.tensor.shape[1:]) for entry in entries]
        row_bytes = [dtype.itemsize * prod(shape) for dtype, shape in self._entries]
        # The widest integer that divides every row: NCCL counts at most 2**31 elements.
        unit = {8: torch.int64, 4: torch.int32}.get(gcd(8, *row_bytes), torch.int8)
        widths = [size // unit.itemsize for size in row_bytes]  # of a row of each entry, in units
        num_ranks = group.size()

        to_send: list[list[Tensor]] = [[] for _ in range(num_ranks)]  # by rank: pieces of all entries, in order
        num_sent = [0] * num_ranks  # units for each rank
        for entry, width in zip(entries, widths, strict=True):
            for rank, pieces in enumerate(_pieces_by_rank(entry, unit, width)):
                to_send[rank] += pieces
                num_sent[rank] += width * entry.sent[rank]
        self._packed = torch.cat([piece for pieces in to_send for piece in pieces])

        # What arrives: by rank, all entries in order; an entry perhaps in segments.
        self._sizes: list[int] = []  # of the segments, in the order of their arrival
        self._segments: list[list[range]] = [[] for _ in entries]  # by entry and rank: numbers of its segments
        num_received = [0] * num_ranks
        for rank in range(num_ranks):
            for entry, width, numbers in zip(entries, widths, self._segments, strict=True):
                rows = [entry.received[rank]] if entry.segments is None else entry.segments[rank]
                numbers.append(range(len(self._sizes), len(self._sizes) + len(rows)))
                self._sizes += [width * num for num in rows]
                num_received[rank] += width * entry.received[rank]

        self._came = self._packed.new_empty(sum(num_received))
        self._streams, self._stream = streams, streams.current()
        output_splits, input_splits = (None, None) if even else (num_received, num_sent)
        self._work: dist.Work | None = dist.all_to_all_single(
            self._came, self._packed, output_splits, input_splits, group, async_op=True
        )
        self._received: list[Tensor | None] = []

    def take(self, place: slice) -> list[Tensor]:
        """Wait and return the entries at some positions, once. Raises a RuntimeError if a rank is gone or late."""
        if self._work is not None:
            self._work.wait()
            self._hand_to_current_stream(self._packed, self._came)
            segments = self._came.split_with_sizes(self._sizes)
            for (dtype, shape), numbers_by_rank in zip(self._entries, self._segments, strict=True):
                # Segment 0 of all ranks, then segment 1, ...
                numbers = [number for numbers in zip(*numbers_by_rank, strict=True) for number in numbers]
                entry = torch.cat([segments[number] for number in numbers]).view(dtype)
                self._received.append(entry.view(-1, *shape) if shape else entry)
            self._work = None  # it also holds the sent and received tensors
            del self._packed, self._came
        taken = [entry for entry in self._received[place] if entry is not None]
        self._received[place] = [None] * len(taken)
        self._hand_to_current_stream(*taken)
        return taken

    def _hand_to_current_stream(self, *tensors: Tensor) -> None:
        """Let the current stream use these tensors: ids and sizes of one exchange may be taken on different streams."""
        current = self._streams.current()
        if current is not self._stream:
            self._streams.use(self._streams.made(tensors, on=self._stream), on=current)
            self._stream = current


def _pieces_by_rank(entry: Entry, unit: torch.dtype, width: int) -> list[list[Tensor]]:
    """Return, by rank, the pieces of an entry that are sent there, as units; a row has `width` units."""
    flat = entry.tensor.detach().reshape(-1).view(unit)
    if entry.pieces is None or entry.places is None:
        return [[piece] for piece in flat.split_with_sizes([width * num for num in entry.sent])]
    pieces = flat.split_with_sizes([width * num for num in entry.pieces])
    return [[pieces[number] for number in numbers] for numbers in entry.places]
