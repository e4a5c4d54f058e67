"""Deferred updates: each is made once, the oldest first; after an error those of finished steps are completed."""

from unittest import mock

import pytest

from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.runtime.lookup_order import LookupOrder
from lightning_overlap.runtime.streams import Streams
from lightning_overlap.schedules.stages import StreamName


@pytest.fixture
def tables() -> mock.Mock:
    return mock.Mock(can_defer_updates=True)


@pytest.fixture
def updates(tables: mock.Mock) -> DeferredUpdates:
    updates = DeferredUpdates(tables, LookupOrder(Streams(), StreamName.LOOKUP))
    for index in (3, 4):
        updates.start(InFlightBatch(index, None))
    return updates


def batches(method: mock.Mock) -> list[int]:
    return [call.args[0].index for call in method.mock_calls]


def test_each_is_made_once_and_the_oldest_first(updates: DeferredUpdates, tables: mock.Mock) -> None:
    inflight = InFlightBatch(5, None)
    updates.note_lookup(inflight, defers=True)
    assert inflight.num_unseen == 2
    with pytest.raises(RuntimeError, match="an update of theirs is still to come"):
        updates.refuse_writes()
    for _ in range(2):
        updates.make_all()
    updates.refuse_writes()
    assert batches(tables.start_update) == batches(tables.embedding_update) == [3, 4]


def test_an_update_whose_step_is_not_over_is_dropped(updates: DeferredUpdates, tables: mock.Mock) -> None:
    updates.num_stepped = 4
    assert updates.settle(1) is None
    assert batches(tables.embedding_update) == [3]
    assert batches(tables.forget_update) == [4]


def test_an_update_that_cannot_be_made_is_named(updates: DeferredUpdates, tables: mock.Mock) -> None:
    updates.num_stepped = 5
    tables.gradients_are_there.return_value = False
    assert updates.settle(1) == "the update of batch 3 is missing in the tables"
    tables.gradients_are_there.return_value = True
    tables.embedding_update.side_effect = RuntimeError("link down")
    assert updates.settle(1) == "RuntimeError: link down; the update of batch 3 is missing in the tables"
