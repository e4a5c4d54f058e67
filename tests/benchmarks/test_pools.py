"""A caching allocator's pools, counted on a CPU."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools import MIB, Block, CachingAllocator, PooledStreams
from lightning_overlap.schedules.stages import StreamName

COMPUTE, LOOKUP, MEMCPY = StreamName.COMPUTE, StreamName.LOOKUP, StreamName.MEMCPY


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
def test_sizes_of_blocks_and_segments(num_bytes: int, size: int, segment: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(num_bytes, COMPUTE)
    assert allocator.reserved == {COMPUTE: segment}
    assert allocator.allocated == block.size == size


def test_what_one_stream_freed_another_does_not_get() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB, COMPUTE))
    allocator.allocate(20 * MIB, COMPUTE)
    assert allocator.reserved == {COMPUTE: 20 * MIB}
    allocator.allocate(20 * MIB, LOOKUP)
    assert allocator.reserved == {COMPUTE: 20 * MIB, LOOKUP: 20 * MIB}


def _blocks(first: Block) -> Iterator[Block]:
    block: Block | None = first
    while block is not None and block.before is not None:
        block = block.before
    while block is not None:
        yield block
        block = block.after


sizes = st.integers(1, 30 * MIB) | st.integers(1, 2 * MIB)
steps = st.lists(st.tuples(st.booleans(), sizes, st.sampled_from([COMPUTE, LOOKUP])), max_size=40)


@settings(deadline=None, max_examples=60)
@given(steps, st.randoms(use_true_random=False))
def test_no_byte_is_given_out_twice_or_lost(steps: list[tuple[bool, int, StreamName]], random: object) -> None:
    allocator, live = CachingAllocator(), []
    for takes, size, stream in steps:
        if takes or not live:
            block = allocator.allocate(size, stream)
            assert block.size >= size
            assert block.stream is stream
            live.append(block)
        else:
            allocator.release(live.pop(random.randrange(len(live))))  # type: ignore[attr-defined]
    assert allocator.allocated == sum(block.size for block in live)
    segments = {id(block): block for one in live for block in _blocks(one)}
    in_use = [block for block in segments.values() if not block.free]
    assert {id(block) for block in in_use} == {id(block) for block in live}
    for block in segments.values():
        assert not (block.free and block.after is not None and block.after.free)
    assert sum(block.size for block in segments.values()) <= sum(allocator.reserved.values())


@pytest.fixture
def streams() -> PooledStreams:
    return PooledStreams()


def test_a_result_is_memory_of_the_current_stream_until_it_is_gone(streams: PooledStreams) -> None:
    with streams.following():
        with streams.on(LOOKUP):
            rows = torch.ones(5 * MIB)
        assert streams.reserved == {LOOKUP: 20 * MIB}
        view = rows[1:]
        total = rows + 1
        assert streams.reserved == {LOOKUP: 20 * MIB, COMPUTE: 20 * MIB}
        assert streams.allocator.allocated == 40 * MIB
        del rows, total
        torch.ones(2)
        assert streams.allocator.allocated // MIB == 20  # the view has the memory still
        del view
        torch.ones(2)
        assert streams.allocator.allocated // MIB == 0
    assert streams.peak_allocated == 40 * MIB


def test_a_batch_is_memory_of_the_stream_that_copies_it(streams: PooledStreams) -> None:
    with streams.on(MEMCPY):
        streams.take({"dense": torch.ones(3 * MIB), "one": [torch.ones(3 * MIB)]})
    assert streams.reserved == {MEMCPY: 24 * MIB}


@pytest.mark.parametrize(("reader", "num_segments"), [(COMPUTE, [1, 2, 2, 2, 2]), (LOOKUP, [1, 1, 1])])
def test_what_another_stream_reads_comes_back_as_the_step_after_next_begins_and_all_else_at_once(
    reader: StreamName, num_segments: list[int], streams: PooledStreams
) -> None:
    with streams.following():
        for num in num_segments:
            streams.begin_step()
            with streams.on(LOOKUP):
                rows = torch.ones(5 * MIB)
            streams.record_stream([rows], reader)
            del rows
            assert streams.reserved == {LOOKUP: num * 20 * MIB}
