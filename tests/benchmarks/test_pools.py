"""A caching allocator's pools, counted on a CPU."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pools import MIB, Block, CachingAllocator, PooledStreams
from lightning_overlap.schedules.stages import StreamName

COMPUTE, LOOKUP, MEMCPY = StreamName.COMPUTE, StreamName.LOOKUP, StreamName.MEMCPY


def _segment(block: Block) -> Iterator[Block]:
    first = block
    while first.before is not None:
        first = first.before
    following: Block | None = first
    while following is not None:
        yield following
        following = following.after


SIZES = st.integers(1, 30 * MIB) | st.integers(1, 2 * MIB)


@given(st.lists(st.tuples(st.booleans(), SIZES, st.sampled_from([COMPUTE, LOOKUP])), max_size=40), st.data())
def test_no_byte_is_given_out_twice_or_lost(steps: list[tuple[bool, int, StreamName]], data: st.DataObject) -> None:
    allocator, in_use = CachingAllocator(), list[Block]()
    for takes, size, stream in steps:
        if takes or not in_use:
            block = allocator.allocate(size, stream)
            assert block.size >= size
            assert block.stream is stream
            in_use.append(block)
        else:
            allocator.release(in_use.pop(data.draw(st.integers(0, len(in_use) - 1))))
    assert allocator.allocated == sum(block.size for block in in_use)
    segments = {id(next(_segment(block))): list(_segment(block)) for block in in_use}
    found = [block for segment in segments.values() for block in segment]
    assert {id(block) for block in found if not block.free} == {id(block) for block in in_use}
    for segment in segments.values():
        assert len({block.stream for block in segment}) == 1
        assert not any(one.free and other.free for one, other in itertools.pairwise(segment))
    for stream, reserved in allocator.reserved.items():
        assert sum(block.size for block in found if block.stream is stream) <= reserved
    for block in in_use:
        allocator.release(block)
    assert allocator.allocated == 0
    free = [block for pool in allocator._free.values() for block in pool]
    assert all(block.before is block.after is None for block in free), "segments are whole again"
    for stream, reserved in allocator.reserved.items():
        assert sum(block.size for block in free if block.stream is stream) == reserved


@pytest.mark.parametrize(
    ("num_bytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),  # the megabyte that is left is too little to be split off
    ],
)
def test_sizes_of_blocks_and_segments_are_pytorchs(num_bytes: int, size: int, segment: int) -> None:
    allocator = CachingAllocator()
    for _ in range(2):  # the second time in the memory of the first
        block = allocator.allocate(num_bytes, COMPUTE)
        assert allocator.reserved == {COMPUTE: segment}
        assert allocator.allocated == block.size == size
        allocator.release(block)


def test_a_result_is_memory_of_the_current_stream_until_it_is_gone() -> None:
    streams = PooledStreams()
    with streams.following():
        with streams.on(LOOKUP):
            rows = torch.ones(5 * MIB)
        view = rows[1:]
        total = rows + 1
        assert streams.reserved == {LOOKUP: 20 * MIB, COMPUTE: 20 * MIB}
        del rows, total
        torch.ones(2)
        assert streams.allocator.allocated // MIB == 20  # the view has the memory still
        del view
        torch.ones(2)
        assert streams.allocator.allocated // MIB == 0
    assert streams.peak_allocated == 40 * MIB


@pytest.mark.parametrize(("reader", "num_segments"), [(COMPUTE, [1, 2, 2, 2, 2]), (LOOKUP, [1, 1, 1])])
def test_what_another_stream_reads_comes_back_as_the_step_after_next_begins_and_all_else_at_once(
    reader: StreamName, num_segments: list[int]
) -> None:
    streams = PooledStreams()
    with streams.following():
        for num in num_segments:
            streams.begin_step()
            with streams.on(LOOKUP):
                rows = torch.ones(5 * MIB)
            streams.record_stream([rows], reader)
            del rows
            assert streams.reserved == {LOOKUP: num * 20 * MIB}


def test_a_batch_is_memory_of_the_stream_that_copies_it_and_a_gradient_of_the_forwards_stream() -> None:
    streams = PooledStreams()
    with streams.on(MEMCPY):
        streams.take({"dense": torch.ones(3 * MIB), "one": [torch.ones(3 * MIB)]})
    assert streams.reserved == {MEMCPY: 24 * MIB}
    streams, weight = PooledStreams(), torch.ones(3 * MIB, requires_grad=True)
    with streams.following():
        with streams.on(LOOKUP):
            rows = weight * 2
        (rows * 3).sum().backward()
    # rows, and the gradients that its multiplication and that of `rows * 3` make: the latter's on the compute stream
    assert set(streams.reserved) == {LOOKUP, COMPUTE}
    assert streams.reserved[LOOKUP] >= 24 * MIB
