"""Which cut comes next: crashes, resumed trainings, lost parts and bases, one by one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_overlap.deltas import CutError, PartName, Replica, prune

from .histories import Crash, MemorySink, Training, assert_equal, empty_tables


class Setup:
    """A training on two ranks, and a replica of its sink."""

    def __init__(self) -> None:
        self.sink = MemorySink()
        self.training = Training(self.sink, seed=5)
        self.training.start(2, 1)
        self.replica = Replica(None, self.sink)

    def cut(self, *bases: tuple[int, ...], crash_after: int | None = None) -> None:
        """Write a cut, or several, with the bases of these ranks."""
        for each in bases or ((),):
            self.training.train(1)
            self.training.cut(each, crash_after)

    def follow(self) -> None:
        self.cut()
        self.assert_at(1, 1)

    def crash(self) -> None:
        with pytest.raises(Crash):
            self.cut(crash_after=1)

    def lose(self, pattern: str) -> dict[str, bytes]:
        lost = {name: self.sink.parts.pop(name) for name in sorted(self.sink.parts) if re.search(pattern, name)}
        assert lost
        return lost

    @contextmanager
    def hidden(self) -> Iterator[None]:
        name = max(self.sink.parts)
        data = self.sink.parts.pop(name)
        yield
        self.sink.parts[name] = data

    def assert_at(self, generation: int, step: int) -> None:
        self.replica.update()
        position = self.replica.position
        assert position is not None
        assert position.cut == (generation, step)
        assert_equal(self.replica.state_dict(), self.training.at_cut[position.cut])

    def error(self, replica: Replica | None = None) -> str:
        with pytest.raises(CutError) as err:
            (replica or self.replica).update()
        return str(err.value)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_cut_that_is_being_written_is_waited_for(setup: Setup) -> None:
    setup.cut()
    with setup.hidden():
        assert setup.replica.update() == 0
        assert setup.replica.step is None
    setup.assert_at(1, 1)
    setup.crash()
    setup.assert_at(1, 1)


def test_a_rank_may_be_ahead_of_another(setup: Setup) -> None:
    setup.follow()
    setup.cut((), ())
    late = setup.lose("s0*[23]-r00001")
    assert setup.replica.update() == 0
    setup.sink.parts |= {name: data for name, data in late.items() if "s000000000002" in name}
    setup.assert_at(1, 2)
    setup.sink.parts |= late
    setup.assert_at(1, 3)


def test_a_base_that_is_being_written_is_waited_for_where_a_part_never_came(setup: Setup) -> None:
    setup.follow()
    setup.cut()
    setup.lose("s0*2-r00001")
    setup.cut((0, 1))
    lost = setup.lose("s0*3-r00000")
    assert setup.replica.update() == 0
    setup.sink.parts |= lost
    setup.assert_at(1, 3)
    setup.cut()
    setup.lose("s0*4-r00001")
    setup.cut()
    setup.lose("s0*5-r00000")
    assert "step 4 lacks g000001-s000000000004-r00001of00002-c*, but has later parts" in setup.error()


def test_a_crash_in_the_first_cut_of_all_is_made_good_by_the_next_generation(setup: Setup) -> None:
    setup.training.checkpoint()
    setup.crash()
    setup.training.resume(setup.training.checkpoints[0], 2, 1)
    setup.cut()
    with setup.hidden():
        assert setup.replica.update() == 0
    setup.assert_at(2, 1)


@pytest.mark.parametrize("seen", [1, 2, 3], ids=["at_what_it_follows", "later", "at_the_newest"])
def test_a_resumed_training_corrects_what_was_written_past_its_checkpoint(setup: Setup, seen: int) -> None:
    for step in range(1, 4):
        setup.cut()
        if step == 1:
            setup.training.checkpoint()
        if step == seen:
            setup.assert_at(1, step)
    setup.crash()
    setup.training.resume(setup.training.checkpoints[0], 3, 2)
    setup.training.cut()
    assert setup.replica.update() == 1  # straight to the new generation
    setup.assert_at(2, 1)


def test_a_replica_first_comes_to_what_a_new_generation_follows(setup: Setup) -> None:
    setup.follow()
    setup.cut((), ())
    setup.training.checkpoint()
    setup.training.resume(setup.training.checkpoints[0], 1, 0)
    setup.cut()
    assert setup.replica.update() == 3
    setup.assert_at(2, 4)


def test_a_new_generation_that_is_being_written_is_waited_for(setup: Setup) -> None:
    setup.follow()
    setup.cut()
    setup.training.checkpoint()
    setup.lose("s0*2-r00001")  # the replica cannot come to what generation 2 follows
    setup.training.resume(setup.training.checkpoints[0], 2, 0)
    setup.cut()
    with setup.hidden():
        assert setup.replica.update() == 0
    said = setup.error()
    assert "the cut of generation 2, step 3 follows the cut of generation 1, step 2, which is missing" in said


def test_a_crash_in_a_first_cut_hides_no_loss(setup: Setup) -> None:
    setup.follow()
    setup.cut()
    setup.training.checkpoint()
    setup.lose("s0*2-r00001")
    for _ in range(2):
        setup.training.resume(setup.training.checkpoints[0], 2, 0)
        if setup.training.generation == 2:
            setup.crash()
    setup.training.cut()
    assert "generation 3, step 2 follows the cut of generation 1, step 2, which is missing" in setup.error()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("s0*3-r00001", "{0} 3 lacks g000001-s000000000003-r00001of00002-c*, but has later parts"),
        ("s0*3-r00000.*c00000", "{0} 3 lacks {1}, but has later parts"),
        ("s0*3-", "{0} 4 follows {0} 3, which is missing; applied so far: {0} 2"),
    ],
    ids=["a_part", "a_chunk", "a_cut"],
)
def test_what_is_lost_is_named_until_a_base_comes(
    setup: Setup, pattern: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        setup.cut()
        if setup.training.step == 2:
            setup.assert_at(1, 2)
    expected = expected.format("the cut of generation 1, step", min(setup.lose(pattern)))
    assert expected in setup.error()
    assert setup.replica.step == 2
    assert_equal(setup.replica.state_dict(), setup.training.at_cut[1, 2])
    setup.cut((0,))
    assert expected in setup.error()
    setup.cut((1,))  # with the base of rank 0 just before
    setup.assert_at(1, 7)
    assert "starting again from the base of the cut of generation 1, step 7" in caplog.text


def test_a_late_replica_begins_with_the_newest_base(setup: Setup) -> None:
    setup.cut()
    setup.training.checkpoint()
    setup.training.resume(setup.training.checkpoints[0], 2, 0)
    setup.cut((), (0, 1), (1,), (), (0,), ())
    assert setup.replica.update() == 2  # the cuts from the base of rank 1 to that of rank 0 at once, and the next
    setup.assert_at(2, 7)


def test_no_base_is_told(setup: Setup) -> None:
    setup.cut((), (), ())
    setup.lose("s0*1-")
    assert setup.error() == (
        "the sink lacks a base of every rank, so a new replica cannot start. It has 2 cuts, from the cut of generation "
        "1, step 2 to the cut of generation 1, step 3. Start from a state that a replica saved, or let the training "
        "write a base."
    )
    setup.cut((1,))
    assert "the sink lacks a base of every rank" in setup.error()


@pytest.mark.parametrize(("pattern", "leaves_names"), [("s0*3-r00000", True), ("s0*3-", False)])
def test_bases_on_both_sides_of_a_lost_cut_make_no_start(setup: Setup, pattern: str, leaves_names: bool) -> None:
    setup.cut((), (0,), (), (1,), ())
    setup.lose("s0*1-")
    lost = setup.lose(pattern)
    said = setup.error()
    assert said.startswith("the sink lacks a base of every rank")
    assert all(name.partition("-c")[0] in said for name in lost) == leaves_names


def test_bases_of_two_generations_make_no_start(setup: Setup) -> None:
    setup.cut((), (0,))
    setup.training.checkpoint()
    setup.training.resume(setup.training.checkpoints[0], 2, 2)
    setup.cut((1,))
    setup.assert_at(2, 3)  # from the start of generation 1 on
    setup.lose("s0*1-")
    assert "the sink lacks a base of every rank" in setup.error(Replica(None, setup.sink))


def test_two_trainings_in_one_sink_are_told(setup: Setup) -> None:
    setup.follow()
    other = Training(setup.sink, seed=6)
    other.start(3, 0)
    other.train(2)
    setup.cut()
    other.cut()
    assert setup.error() == (
        "the cut of generation 1, step 2 has parts of 2 ranks and of 3 ranks: two trainings wrote into this "
        "sink. Use a separate sink for each run."
    )


def test_a_part_twice_is_told(setup: Setup) -> None:
    setup.cut()
    name = PartName(1, 1, 0, 2, 0, 7)
    setup.sink.parts[str(name)] = b""
    assert "has two parts of rank 0, of " in setup.error()


def test_another_run_is_told(setup: Setup) -> None:
    setup.follow()
    for generation, step in ((1, 2), (2, 5), (1, 0)):
        setup.sink.parts.clear()
        other = Training(setup.sink, seed=6, run="another")
        other.generation, other.step = generation, step
        other.cut()
        said = setup.error()
        assert f"the cut of generation {generation}, step {step} is of the run 'another', this replica is of" in said


def test_parts_of_two_runs_in_one_cut_are_told(setup: Setup) -> None:
    setup.cut()
    other = Training(MemorySink(), seed=6, run="another")
    other.start(2, 1)
    other.train(1)
    other.cut()
    setup.lose("r00001")
    setup.sink.parts |= {name: part for name, part in other.sink.parts.items() if "r00001" in name}
    assert "is of the run 'another', g000001-s000000000001-r00000of00002" in setup.error()


def test_a_listing_that_missed_a_part_is_made_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.follow()
    setup.cut((), ())
    listings = [[name for name in setup.sink.names() if "s000000000002-r00001" not in name]]
    everything = setup.sink.names
    monkeypatch.setattr(setup.sink, "names", lambda: listings.pop() if listings else everything())
    setup.assert_at(1, 3)
    assert not listings


def test_a_replica_that_catches_up_lists_its_sink_twice(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, and where that listing has no more; what has come meanwhile is applied too."""
    setup.cut((), (), (), (), (), ())
    names, listings = setup.sink.names, []
    monkeypatch.setattr(setup.sink, "names", lambda: listings.append(setup.training.step) or names())
    setup.assert_at(1, 6)
    assert len(listings) == 2
    setup.cut((), (), (), ())
    read = setup.sink.read

    def cuts_first(name: str) -> bytes:
        monkeypatch.setattr(setup.sink, "read", read)
        setup.cut()
        return read(name)

    monkeypatch.setattr(setup.sink, "read", cuts_first)
    listings.clear()
    setup.assert_at(1, 11)
    assert listings == [10, 11, 11]


@pytest.mark.parametrize("step", [2, 4], ids=["after_a_listing", "later"])
def test_parts_that_are_pruned_while_they_are_read(setup: Setup, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    setup.follow()
    setup.cut((), (), ())
    read = setup.sink.read

    def prunes_first(name: str) -> bytes:
        if f"s{step:012d}" in name:
            monkeypatch.setattr(setup.sink, "read", read)
            setup.cut((0, 1))
            assert prune(setup.sink)
        return read(name)

    monkeypatch.setattr(setup.sink, "read", prunes_first)
    setup.assert_at(1, 5)


def test_pruning_leaves_what_replicas_and_a_resumed_training_need(setup: Setup) -> None:
    setup.cut()
    setup.training.checkpoint()
    setup.assert_at(1, 1)
    setup.cut((), (1,), (0,), ())
    removed = prune(setup.sink)
    assert {name[:21] for name in removed} == {"g000001-s000000000001", "g000001-s000000000002"}
    assert prune(setup.sink) == []
    setup.assert_at(1, 5)
    setup.training.resume(setup.training.checkpoints[0], 1, 0)
    setup.training.cut()
    setup.assert_at(2, 1)
    late = Replica(empty_tables(), setup.sink)
    late.update()
    assert_equal(late.state_dict(), setup.training.tables)


def test_nothing_is_pruned_without_a_base(setup: Setup) -> None:
    assert prune(setup.sink) == []
    setup.crash()
    assert prune(setup.sink) == []
