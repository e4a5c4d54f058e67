"""Sinks that lose parts which a replica has applied, and a training that goes on from before them."""

import pytest

from lightning_overlap.deltas import CutError, PartName, Replica, prune
from lightning_overlap.deltas.parts import chain

from .histories import CutId, Training, assert_equal


def lose(training: Training, *cuts: CutId) -> None:
    for name in sorted(training.sink.parts):
        parsed = PartName.parse(name)
        if parsed is not None and parsed.cut in cuts:
            del training.sink.parts[name]


def step(training: Training, num: int = 1) -> None:
    for _ in range(num):
        training.train(1)
        training.cut()


def follow(training: Training, replica: Replica) -> None:
    replica.update()
    assert replica.position is not None
    assert replica.position.cut == training.wholes[-1]
    assert_equal(replica.state_dict(), training.at_cut[training.wholes[-1]])


@pytest.fixture
def live(training: Training) -> Replica:
    """At the cut of generation 2, step 5; the checkpoint is of generation 1, step 2."""
    training.checkpoint()
    replica = Replica(None, training.sink)
    step(training)
    follow(training, replica)
    training.resume(training.checkpoints[0], 2, 1)
    step(training, 3)
    follow(training, replica)
    return replica


def test_a_replica_begins_anew_where_its_last_cuts_were_lost(training: Training, live: Replica) -> None:
    lose(training, (2, 4), (2, 5))
    training.resume(training.checkpoints[0], 1, 0)
    step(training)
    follow(training, live)
    step(training)
    follow(training, live)


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_a_generation_that_is_written_twice_is_no_timeline(
    training: Training, live: Replica, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind, at and past the cut that was applied; a replica has not looked for longer than it took."""
    monkeypatch.setattr(chain, "QUICK_S", 0)
    lose(training, (2, 3), (2, 4), (2, 5))
    training.resume(training.checkpoints[0], 2, 1)
    step(training, num_steps)
    assert training.generation == 2
    follow(training, live)


def test_what_was_applied_is_not_read_again(training: Training, live: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(training.sink, "read", read.append)
    assert [live.update() for _ in range(3)] == [0, 0, 0]
    assert read == []


@pytest.mark.parametrize("lost", [(2, 5), (2, 3)])
def test_where_no_base_is_left_the_lost_cut_is_named(training: Training, live: Replica, lost: CutId) -> None:
    lose(training, (1, 2), lost, *([(2, 4), (2, 5)] if lost == (2, 3) else []))
    training.resume(training.checkpoints[0], 2, 1)
    step(training, 4)
    position = live.position
    with pytest.raises(CutError, match=r"(?s)generation 2, step 5, which"):
        live.update()
    assert live.position == position
    assert_equal(live.state_dict(), live.state_dict())


@pytest.mark.parametrize("num_steps", [3, 4])
def test_a_saved_replica_knows_its_fit(training: Training, live: Replica, tmp_path: object, num_steps: int) -> None:
    live.save(f"{tmp_path}/state")
    lose(training, (2, 3), (2, 4), (2, 5))
    training.resume(training.checkpoints[0], 2, 1)
    step(training, num_steps)
    again = Replica(dict(live.state_dict()), training.sink, start=f"{tmp_path}/state")
    follow(training, again)


def test_a_sink_that_leads_to_the_same_cut_again_and_again_is_told(
    training: Training, live: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live._chain, "next", lambda at: live._chain.start())
    with pytest.raises(CutError, match=r"the cut of generation 1, step 2 repeatedly"):
        live.update()
    monkeypatch.undo()
    follow(training, live)


def test_pruned_parts_are_not_lost(training: Training, live: Replica) -> None:
    training.train(1)
    training.cut(bases=(0, 1))
    assert prune(training.sink)
    training.checkpoint()
    follow(training, live)
    training.resume(training.checkpoints[-1], 1, 2)
    step(training)
    follow(training, live)
