"""Deferred updates: each is made once, the oldest first; after an error those of finished steps are completed."""

from collections.abc import Iterable
from typing import Any

import pytest

from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.runtime.lookup_order import LookupOrder
from lightning_overlap.runtime.streams import Streams
from lightning_overlap.schedules.stages import StreamName


class Tables:
    can_defer_updates = True

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.arrive = True
        self.fails = False

    def start_update(self, inflight: InFlightBatch) -> None:
        self.done.append(("start", inflight.index))

    def embedding_update(self, inflight: InFlightBatch, updated: Any = None) -> None:
        if self.fails:
            raise RuntimeError("link down")
        self.done.append(("make", inflight.index))

    def count_lookups(self, inflight: InFlightBatch, times: int) -> None:
        assert times == -1, "lookups of an update that is not made are taken back"

    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool:
        return self.arrive


@pytest.fixture
def tables() -> Any:
    return Tables()


@pytest.fixture
def updates(tables: Any) -> DeferredUpdates:
    updates = DeferredUpdates(tables, LookupOrder(Streams(), StreamName.LOOKUP))
    for index in (3, 4):
        updates.start(InFlightBatch(index, None))
    return updates


def test_each_is_made_once_and_the_oldest_first(updates: DeferredUpdates, tables: Tables) -> None:
    assert [num_unseen_by(updates, 4), num_unseen_by(updates, 5)] == [1, 2]
    updates.make_all()
    updates.make_all()
    assert tables.done == [("start", 3), ("start", 4), ("make", 3), ("make", 4)]
    updates.num_updated = 5
    assert num_unseen_by(updates, 5) == 0


def num_unseen_by(updates: DeferredUpdates, index: int) -> int:
    inflight = InFlightBatch(index, None)
    updates.note_lookup(inflight, defers=True)
    return inflight.num_unseen


def test_tables_that_wait_for_an_update_are_not_written(updates: DeferredUpdates) -> None:
    with pytest.raises(RuntimeError, match="an update of theirs is still to come"):
        updates.refuse_writes()
    updates.make_all()
    updates.refuse_writes()


def test_an_update_whose_step_is_not_over_is_dropped(updates: DeferredUpdates, tables: Tables) -> None:
    updates.num_stepped = 4
    assert updates.settle(1) is None
    assert tables.done[2:] == [("make", 3)]


@pytest.mark.parametrize(
    ("attribute", "value", "missing"),
    [
        ("arrive", False, "the update of batch 3 is missing in the tables"),
        ("fails", True, "RuntimeError: link down; the update of batch 3 is missing in the tables"),
    ],
)
def test_an_update_that_cannot_be_made_is_named(
    updates: DeferredUpdates, tables: Tables, attribute: str, value: bool, missing: str
) -> None:
    setattr(tables, attribute, value)
    updates.num_stepped = 5
    assert updates.settle(1) == missing
