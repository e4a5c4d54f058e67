"""A caching allocator's pools, counted on a CPU."""

import pytest
import torch

from benchmarks.pools import MIB, PooledStreams
from lightning_overlap.schedules.stages import StreamName

COMPUTE, LOOKUP = StreamName.COMPUTE, StreamName.LOOKUP


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
