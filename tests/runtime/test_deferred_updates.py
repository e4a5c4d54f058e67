"""Deferred updates: each is made once, the oldest first; after an error those of finished steps are completed."""

import weakref
from collections.abc import Callable
from unittest import mock

import pytest

from lightning_overlap.runtime import Flight, Streams, Telemetry
from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.schedules import Stage, StreamName


class LoggedFlight(Flight):
    """Notes which of its stages were run."""

    def __init__(self, index: int, log: list[str]) -> None:
        super().__init__(index, None)
        self.log = log
        self.error: Exception | None = None
        self.has_gradients = True

    def send_gradients(self) -> None:
        self.log.append(f"send {self.index}")

    def update(self, after_part: Callable[[str, int], None] | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(f"update {self.index}")

    def forget_update(self) -> None:
        self.log.append(f"forget {self.index}")

    def gradients_are_there(self) -> bool:
        return self.has_gradients


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def updates(log: list[str]) -> DeferredUpdates:
    updates = DeferredUpdates(mock.Mock(can_defer_updates=True), Streams(), Telemetry())
    for index in (3, 4):
        updates.start(LoggedFlight(index, log))
    return updates


def test_each_is_made_once_and_the_oldest_first(updates: DeferredUpdates, log: list[str]) -> None:
    flight = Flight(5, None)
    updates.note_lookup(flight, defers=True)
    assert flight.num_unseen == 2
    with pytest.raises(RuntimeError, match="an update of theirs is still to come"):
        updates.refuse_writes()
    for _ in range(2):
        updates.make_all()
    updates.refuse_writes()
    assert log == ["send 3", "send 4", "update 3", "update 4"]


def test_an_update_whose_step_is_not_over_is_dropped(updates: DeferredUpdates, log: list[str]) -> None:
    updates.num_stepped = 4
    assert updates.settle(1) is None
    assert log[2:] == ["forget 4", "update 3"]


def test_an_update_that_cannot_be_made_is_named(updates: DeferredUpdates, log: list[str]) -> None:
    updates.num_stepped = 5
    flight = updates.to_update[3]
    assert isinstance(flight, LoggedFlight)
    flight.has_gradients = False
    assert updates.settle(0.05) == "the update of batch 3 is missing in the tables"
    flight.has_gradients, flight.error = True, RuntimeError("link down")
    assert updates.settle(1) == "RuntimeError: link down; the update of batch 3 is missing in the tables"


def test_a_trained_batch_is_let_go_before_its_update(updates: DeferredUpdates) -> None:
    class Batch:
        """A batch that can be referred to weakly."""

    flight, batch = updates.to_update[3], Batch()
    flight.batch, reference = batch, weakref.ref(batch)
    flight.issued[Stage.COPY_BATCH_TO_DEVICE] = Streams().made(batch, StreamName.MEMCPY)
    del batch
    updates.begin_iteration()
    assert reference() is None
