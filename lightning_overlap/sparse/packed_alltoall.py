"""Send several tensors in one all-to-all, since each costs the host and the network a fixed time besides its bytes."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from math import gcd, prod
from typing import Any, NamedTuple, TypeAlias

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

FEW_PIECES, LARGE_PIECE = 24, 1024
"""Few pieces, and pieces of so many elements, are joined one by one: the host takes 1 us and an object for each. FBGEMM
takes 20 us, and 0.1 us for each, but copies all elements once more."""


Places: TypeAlias = tuple[tuple[int, ...], ...]
"""By rank, the numbers of the pieces for it."""


class Entry(NamedTuple):
    """One of the tensors of an all-to-all."""

    tensor: Tensor  # to send, `(sum(sent), ...)`, of any dtype: rows in the order of their destinations, or `pieces`
    sent: Sequence[int]  # number of rows for each rank
    received: Sequence[int]  # number of rows from each rank
    segments: Sequence[Sequence[int]] | None = None
    """By rank, the rows of each segment that it sends; as many segments from each rank. `take` returns segment 0 of all
    ranks, then segment 1, ..."""
    pieces: Sequence[int] | None = None  # rows of consecutive pieces of the tensor, if these are sent in another order
    places: Places | None = None  # of these pieces

    @property
    def rows(self) -> Sequence[int]:
        """Rows of the consecutive pieces of the tensor."""
        return self.sent if self.pieces is None else self.pieces


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

        # What leaves: by rank, pieces of all entries, in order.
        sizes = [[width * num for num in entry.rows] for entry, width in zip(entries, widths, strict=True)]
        flat = [entry.tensor.detach().reshape(-1).view(unit) for entry in entries]
        order = _by_rank(tuple(map(len, sizes)), tuple([entry.places for entry in entries]), group.size())
        [self._packed] = in_order(flat, sizes, [order])

        # What arrives: by rank, all entries in order; an entry perhaps in segments.
        self._sizes, self._orders = _arriving(entries, widths)
        num_sent = _units_by_rank(widths, [entry.sent for entry in entries])
        num_received = _units_by_rank(widths, [entry.received for entry in entries])
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
            came = in_order([self._came], [self._sizes], self._orders)
            for (dtype, shape), units in zip(self._entries, came, strict=True):
                self._received.append(units.view(dtype).view(-1, *shape) if shape else units.view(dtype))
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


def in_order(
    tensors: Sequence[Tensor], sizes: Sequence[Sequence[int]], orders: Sequence[NDArray[np.int64]]
) -> list[Tensor]:
    """Return a new tensor for each of `orders`: the pieces with these numbers, one after the other.

    `sizes` are of the consecutive pieces of each tensor, `(sum(sizes),)`, all of one dtype. Numbers count the pieces of
    all tensors. The host does not wait for a device.
    """
    num_pieces = sum(map(len, sizes))
    are_few = num_pieces <= FEW_PIECES or sum(one.numel() for one in tensors) >= LARGE_PIECE * num_pieces
    if are_few or tensors[0].dtype is torch.int8:  # FBGEMM has no kernel for bytes
        pieces = [piece for one, its in zip(tensors, sizes, strict=True) for piece in one.split_with_sizes([*its])]
        return [torch.cat([pieces[number] for number in order.tolist()]) for order in orders]
    flat = torch.cat([*tensors])
    sizes_P = np.fromiter(chain.from_iterable(sizes), np.int32, num_pieces)
    nums = [int(sizes_P[order].sum()) for order in orders]
    both = torch.from_numpy(np.concatenate((sizes_P, *orders), dtype=np.int32, casting="same_kind"))
    both = (both.pin_memory() if flat.is_cuda else both).to(flat.device, non_blocking=True)
    sizes_on_device, order = both.split_with_sizes([num_pieces, len(both) - num_pieces])
    _, joined, _ = torch.ops.fbgemm.permute_1D_sparse_data(order, sizes_on_device, flat, None, sum(nums))
    if len(orders) == 1:
        return [joined]
    return [one.clone() for one in joined.split_with_sizes(nums)]  # else one of them would keep all alive


@lru_cache(256)  # in each step the same
def _by_rank(rows: tuple[int, ...], places: tuple[Places | None, ...], num_ranks: int) -> NDArray[np.int64]:
    """Return the numbers of the pieces of all entries, those for rank 0 first, in `in_order`'s count.

    Each entry has a number of pieces in `rows`; without places they go to one rank each.
    """
    firsts = [0, *accumulate(rows)]
    numbers = [
        first + place
        for rank in range(num_ranks)
        for first, of_entry in zip(firsts, places, strict=False)
        for place in ((rank,) if of_entry is None else of_entry[rank])
    ]
    return np.asarray(numbers, np.int64)


def _arriving(entries: Sequence[Entry], widths: Sequence[int]) -> tuple[list[int], list[NDArray[np.int64]]]:
    """Return the units of all segments as they arrive, and by entry the numbers of its segments in their order."""
    num, num_ranks = len(entries), len(entries[0].received)
    num_segments = [1 if entry.segments is None else len(entry.segments[0]) for entry in entries]
    orders = _segments_in_turn(tuple(num_segments), num_ranks)
    if all(entry.segments is None for entry in entries):  # without a list for each rank: they would be thousands
        sizes = [0] * (num * num_ranks)
        for number, (entry, width) in enumerate(zip(entries, widths, strict=True)):
            sizes[number::num] = [width * rows for rows in entry.received]
        return sizes, orders
    by_entry = [[(rows,) for rows in one.received] if one.segments is None else one.segments for one in entries]
    return [
        width * rows
        for of_rank in zip(*by_entry, strict=True)
        for width, segments in zip(widths, of_rank, strict=True)
        for rows in segments
    ], orders


@lru_cache(256)  # in each step the same
def _segments_in_turn(num_segments: tuple[int, ...], num_ranks: int) -> list[NDArray[np.int64]]:
    """Return by entry the numbers of its segments: segment 0 of all ranks, then segment 1, ...

    Every rank sends as many segments of an entry; they are counted by rank, then by entry.
    """
    firsts = [0, *accumulate(num_segments)]
    ranks_R = np.arange(num_ranks) * firsts[-1]
    return [
        (np.arange(first, first + num)[:, None] + ranks_R).ravel()
        for first, num in zip(firsts, num_segments, strict=False)
    ]


def _units_by_rank(widths: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Return how many units of all entries each rank gets; `rows` of each entry by rank."""
    by_entry = [[width * num for num in nums] for width, nums in zip(widths, rows, strict=True)]
    return [*map(sum, zip(*by_entry, strict=True))]
