"""The order of streams under each policy; fake runs raise at a race."""

from typing import Any
from unittest import mock

import pytest

from lightning_overlap.runtime import Made, Streams
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, PREFETCH, STREAMS
from lightning_overlap.schedules.stages import StreamName

from ..support.fakes import FakeTrainer, Mark, RecordingStreams
from ..support.fakes.fake_sparse import cache


class WritesCachesBack(FakeTrainer):
    """Writes caches back on the lookup stream after each step, as `EmbeddingDeltas` does."""

    def _train_next(self, *args: Any) -> bool:
        goes_on = super()._train_next(*args)
        self.streams.order(StreamName.COMPUTE, then=self.streams.lookup)
        with self.streams.on_lookup():
            mark = Mark("the cache written back after the step", self.walker.num_trained - 1)
            self.streams.do(mark, writes=[cache(name) for name in self.sparse.modules])
        return goes_on


@pytest.mark.parametrize("policy", STREAMS)
def test_a_prefetch_comes_after_the_cache_is_written_back(policy: str) -> None:
    WritesCachesBack(PREFETCH, streams=RecordingStreams(STREAMS[policy])).run(2 * PREFETCH.depth + 1)


def test_a_stream_that_uses_a_value_waits_for_it_and_is_recorded() -> None:
    """Other orders are left out one by one in `tests/testing`, where each is found to be a race."""

    class Named(Streams):
        def __getitem__(self, name: StreamName) -> StreamName:
            return name

    streams, value = Named(), object()
    with mock.patch.multiple(streams, wait=mock.DEFAULT, record_stream=mock.DEFAULT) as called:
        made = Made(value, StreamName.DATA_DIST, mock.sentinel.event)
        assert streams.use(made, on=StreamName.DATA_DIST) is value
        assert not called["wait"].called
        assert streams.use(made, on=StreamName.LOOKUP) is value
    called["wait"].assert_called_once_with(StreamName.LOOKUP, mock.sentinel.event)
    called["record_stream"].assert_called_once_with(value, StreamName.LOOKUP)


@pytest.mark.parametrize("policy", STREAMS)
def test_waiting_for_lookups_orders_the_compute_stream_behind_them(policy: str) -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST, streams=RecordingStreams(STREAMS[policy]))
    trainer.run(9, stop_after=4)
    trainer.walker.wait_for_lookups()
    trainer.streams.do(Mark("a write of the user's, on the compute stream", 99), writes=trainer.tables)
