"""What the streams are told: waits, hand-overs, under each policy."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_overlap.runtime.lookup_order import LookupOrder
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, PREFETCH, SEMI_SYNC, STREAMS
from lightning_overlap.schedules.schedule import Schedule, Step
from lightning_overlap.schedules.stages import Stage, StreamName, WeightOwner
from lightning_overlap.testing import RaceError
from lightning_overlap.testing.race_detector import RecordedEvent

from ..support.fakes import FakeTrainer, Mark, RecordingStreams, Run
from ..support.fakes.fake_sparse import cache
from .setups import ONE_MIXED, LoggedStreams, overlapping


def logged(schedule: Schedule, policy: str, modules: Mapping[str, frozenset[WeightOwner]]) -> tuple[Run, list[str]]:
    streams = LoggedStreams(STREAMS[policy])
    run = FakeTrainer(schedule, modules=modules, streams=streams).run(4)
    return run, [" ".join(_text(entry)) for entry in streams.log]


def _text(entry: tuple[str, StreamName, Any]) -> tuple[str, ...]:
    kind, stream, what = entry
    if isinstance(what, RecordedEvent):
        return (kind, str(stream), "for", str(what.stream)) if kind == "wait" else (kind, str(stream))
    if isinstance(what, str):
        return kind, str(stream), what
    if what is None:
        return kind, str(stream)
    return kind, str(stream), getattr(what.what, "value", what.what or "load"), str(what.batch)


@pytest.mark.parametrize("policy", STREAMS)
def test_order_of_streams_under_each_policy(mode: Schedule, policy: str) -> None:
    FakeTrainer(mode, streams=RecordingStreams(STREAMS[policy])).run(2 * mode.depth + 1)  # raises at a race


class WritesCachesBack(FakeTrainer):
    """Writes caches back on the lookup stream after each step, as `EmbeddingDeltas` does."""

    def _train_next(self, *args: Any) -> bool:
        goes_on, order = super()._train_next(*args), self.executor._order
        order.lookup_waits()
        with order.on_lookup():
            mark = Mark("the cache written back after the step", self.executor.num_trained - 1)
            self.streams.do(mark, writes=[cache(name) for name in self.sparse.modules])
        return goes_on


@pytest.mark.parametrize("policy", STREAMS)
def test_a_prefetch_comes_after_the_cache_is_written_back(policy: str) -> None:
    WritesCachesBack(PREFETCH, streams=RecordingStreams(STREAMS[policy])).run(2 * PREFETCH.depth + 1)


@pytest.mark.parametrize("policy", STREAMS)
@overlapping
def test_batch_and_received_input_are_handed_to_the_streams_that_read_them(schedule: Schedule, policy: str) -> None:
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    assert lookup is not None
    run, log = logged(schedule, policy, ONE_MIXED)
    stream = STREAMS[policy] if lookup.stream is StreamName.LOOKUP else lookup.stream
    for batch in range(4):
        splits = log.index(f"do data_dist input_splits_dist {batch}")
        forward = log.index(f"do compute dense_forward {batch}")
        looked_up = log.index(f"do {stream} embedding_lookup {batch}")
        received = max(at for at in range(looked_up) if log[at] == f"do data_dist input_data_dist {batch}")
        assert f"record_stream data_dist batch {batch}" in log[:splits]
        assert f"record_stream compute batch {batch}" in log[:forward]
        assert f"record_stream {stream} input" in log[received:looked_up], str(run)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (LookupOrder.compute_waits, ["record lookup", "wait compute for lookup"]),
        (LookupOrder.lookup_waits, ["record compute", "wait lookup for compute"]),
        (lambda order: order.wait_for_writes(StreamName.MEMCPY), []),
        (
            lambda order: (order.note_write(), order.wait_for_writes(StreamName.MEMCPY)),
            ["record compute", "wait memcpy for compute"],
        ),
        (LookupOrder.compute_waits_for_update, []),
        (
            lambda order: (order.note_update(), order.compute_waits_for_update()),
            ["record lookup", "wait compute for lookup"],
        ),
        (
            lambda order: order.hand_to_compute([], StreamName.DATA_DIST),
            ["record data_dist", "wait compute for data_dist", "record_stream compute input"],
        ),
        (lambda order: order.hand_to_lookup([]), ["record_stream lookup input"]),
        (
            lambda order: order.hand_to_caller([], order.streams.record(order.lookup), 0, is_first=True),
            ["record lookup", "wait compute for lookup", "record_stream compute input"],
        ),
    ],
)
def test_what_the_streams_are_told_by_each_order(call: Callable[[LookupOrder], Any], told: list[str]) -> None:
    streams = LoggedStreams()
    call(LookupOrder(streams, StreamName.LOOKUP))
    assert [" ".join(_text(entry)) for entry in streams.log] == told


def test_what_the_streams_are_told_for_one_early_lookup() -> None:
    # data_dist |              receive 2 .
    # lookup    | fused update 1          ` lookup 2 (fused part)                . lookup 2 (dense optimizer's part)
    # compute   |                                             optimizer step 1 '
    _, log = logged(FUSED_SPARSE_DIST, "dedicated", ONE_MIXED)
    begin = log.index("do lookup fused_backward 1")
    end = log.index("begin_step compute", begin)
    assert [text for text in log[begin:end] if not text.startswith(("record ", "on "))] == [
        "do lookup fused_backward 1",
        "do data_dist input_data_dist 2",
        "record_stream lookup input",
        "wait lookup for data_dist",
        "do lookup embedding_lookup 2",
        "do compute dense_optimizer 1",
        "wait compute for lookup",  # behind the fused update: callbacks between two steps find it done
        "record_stream lookup input",
        "wait lookup for data_dist",
        "wait lookup for compute",
        "do lookup embedding_lookup 2",
        "do compute a callback after the step 1",
    ]


def writes_tables(trainer: FakeTrainer) -> None:
    """Write all tables on the compute stream: a race with every lookup and update that this comes not after."""
    trainer.streams.do(Mark("a write of the user's", 99), writes=trainer.tables)


@pytest.mark.parametrize("policy", STREAMS)
def test_waiting_for_lookups_orders_the_compute_stream_behind_them(policy: str) -> None:
    trainer = FakeTrainer(FUSED_SPARSE_DIST, streams=RecordingStreams(STREAMS[policy]))
    trainer.run(9, stop_after=4)
    trainer.executor.wait_for_lookups()
    writes_tables(trainer)


@pytest.mark.parametrize("stream", [StreamName.DATA_DIST, StreamName.MEMCPY])
def test_a_lookup_row_on_another_stream_is_ordered_after_the_load_of_weights(stream: StreamName) -> None:
    steps = [Step(step.stage, step.offset, stream) if step.stream is StreamName.LOOKUP else step for step in SEMI_SYNC]
    trainer = FakeTrainer(Schedule("mine", tuple(steps)))
    for waits in (False, True):
        trainer.run(9, stop_after=4)
        if waits:
            trainer.executor.wait_for_lookups()
            writes_tables(trainer)
        else:
            with pytest.raises(RaceError, match="after embedding_lookup of batch"):
                writes_tables(trainer)
