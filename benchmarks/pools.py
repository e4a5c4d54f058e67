"""What a device's caching allocator would hold, in a run on a CPU: the memory of every tensor, in its stream's pool.

Counted is what operators return. What a kernel takes for itself while it runs is out of sight, and so is what differs
on a device: its own kernels' workspaces, the communicators' buffers, fragments of other sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_overlap import StreamName
from lightning_overlap.runtime import Made, leaves
from lightning_overlap.testing.checked_streams import CheckedStreams, tensors_of

MIB = 1 << 20
_ROUND = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE, _LARGE_SEGMENT = 10 * MIB, 20 * MIB
_SEGMENT_ROUND = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """Memory of a segment: one tensor's, or free."""

    size: int
    stream: StreamName
    small: bool
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """Gives out memory as PyTorch's CUDA caching allocator does with its default settings.

    A pool for each stream, and in it one for small and one for large blocks; the smallest free block that is large
    enough, split if enough is left of it; a new segment if there is none. Neighbours that are free become one.
    Segments are kept.

    Source: `CUDACachingAllocator.cpp`, PyTorch 2.13; sizes in bytes.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[StreamName, bool], list[Block]] = {}
        self.reserved: dict[StreamName, int] = {}
        """Bytes of the segments of each stream."""
        self.allocated = 0
        """Bytes given out, each rounded up to 512."""

    def allocate(self, num_bytes: int, stream: StreamName) -> Block:
        """Return a block of at least so many bytes, for work of one stream."""
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free.setdefault((stream, small), [])
        fits = [block for block in free if block.size >= size]
        if fits:
            block = min(fits, key=lambda one: one.size)
            free.remove(block)
        else:
            segment = _segment_of(size)
            self.reserved[stream] = self.reserved.get(stream, 0) + segment
            block = Block(segment, stream, small)
        block.free = False
        left = block.size - size
        if left >= _ROUND if small else left > _SMALL:
            rest = Block(left, stream, small, free=True, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            free.append(rest)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Take a block back."""
        assert not block.free, "a block is given back once"
        self.allocated -= block.size
        size = block.size
        free = self._free[block.stream, block.small]
        for other in (block.before, block.after):
            if other is not None and other.free:
                free.remove(other)
                size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        block.size, block.free = size, True
        free.append(block)


def _segment_of(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE else -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND


class PooledStreams(CheckedStreams):
    """Streams of a run that count what a caching allocator would hold for it, in place of looking for races.

    A block that another stream was told of comes back as the step after next begins: the host is a step ahead of the
    device at most, since it waits for the sizes of each batch.

    Args:
        lookup: The stream that `StreamName.LOOKUP` stands for, as a stream policy says.
    """

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        super().__init__(lookup)
        self.allocator = CachingAllocator()
        self.peak_allocated = 0
        self._live: dict[int, _Live] = {}
        self._late: tuple[list[Block], list[Block]] = ([], [])

    @property
    def reserved(self) -> Mapping[StreamName, int]:
        """Bytes of each stream's pool."""
        return self.allocator.reserved

    @override
    def record_stream(self, value: Any, name: StreamName) -> None:
        """Note that a stream uses these tensors."""
        for _, leaf in leaves(value, lambda node: False):
            live = self._live.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if live is not None and live.block.stream is not self[name]:
                live.shared = True

    @override
    def _record_made(self, made: Made, name: StreamName) -> None:
        self.record_stream(made.value, name)

    @override
    def begin_step(self) -> None:
        """Give back what two steps ago was free but for another stream."""
        self._sweep()
        over, now = self._late
        for block in over:
            self.allocator.release(block)
        self._late = now, []

    def take(self, batch: Any) -> None:
        """Take a batch that was copied to the device on the current stream: its tensors are new memory there."""
        self._sweep()
        for _, leaf in leaves(batch, lambda node: False):
            if isinstance(leaf, Tensor):
                self._made(leaf, self._current)

    @override
    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Take an operator that has run."""
        stream, _ = self.stream_of_operator()
        self._sweep()
        for tensor in tensors_of(result):
            self._made(tensor, stream)

    def _made(self, tensor: Tensor, stream: StreamName) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage._cdata in self._live:
            return
        self._live[storage._cdata] = _Live(StorageWeakRef(storage), self.allocator.allocate(storage.nbytes(), stream))
        self.peak_allocated = max(self.peak_allocated, self.allocator.allocated)

    def _sweep(self) -> None:
        """Give back what has gone since the last operator."""
        for key in [key for key, live in self._live.items() if live.storage.expired()]:
            live = self._live.pop(key)
            if live.shared:
                self._late[1].append(live.block)
            else:
                self.allocator.release(live.block)


@dataclass(slots=True)
class _Live:
    storage: StorageWeakRef
    block: Block
    shared: bool = False
