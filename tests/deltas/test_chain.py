"""Which cut comes next: crashes, resumed trainings, lost files and bases, one by one."""

import re
from pathlib import Path

import pytest

from lightning_overlap.deltas import CutError, FileName, Replica, prune
from lightning_overlap.deltas.files import chain

from .histories import Crash, MemorySink, Training, assert_equal


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
            self.training.cut(each, crash_after, steps=1)

    def follow(self) -> None:
        self.cut()
        self.assert_at(1, 1)

    def crash(self) -> None:
        with pytest.raises(Crash):
            self.cut(crash_after=1)

    def resume(self, world_size: int, kind: int) -> None:
        self.training.resume(self.training.checkpoints[0], world_size, kind)

    def lose(self, pattern: str) -> dict[str, bytes]:
        lost = {name: self.sink.files.pop(name) for name in sorted(self.sink.files) if re.search(pattern, name)}
        assert lost
        return lost

    def assert_at(self, *cut: int) -> None:
        self.replica.update()
        position = self.replica.position
        assert position is not None
        assert position.cut == cut
        assert_equal(self.replica.state_dict(), self.training.at_cut[position.cut])

    def error(self) -> str:
        with pytest.raises(CutError) as err:
            self.replica.update()
        return str(err.value)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_base_that_is_being_written_is_waited_for_where_a_part_never_came(setup: Setup) -> None:
    setup.follow()
    setup.cut()
    setup.lose("s0*2-r00001")
    setup.cut((0, 1))
    lost = setup.lose("s0*3-r00000")
    assert setup.replica.update() == 0
    setup.sink.files |= lost
    setup.assert_at(1, 3)
    setup.cut()
    setup.lose("s0*4-r00001")
    setup.cut()
    setup.lose("s0*5-r00000")
    assert "step 4 lacks g000001-s000000000004-r00001of00002-c*, but has later files" in setup.error()


def test_a_replica_first_comes_to_what_a_new_generation_follows(setup: Setup) -> None:
    setup.follow()
    setup.cut((), ())
    setup.training.checkpoint()
    setup.resume(1, 0)
    setup.cut()
    assert setup.replica.update() == 3
    setup.assert_at(2, 4)


def test_a_crash_in_a_first_cut_hides_no_loss(setup: Setup) -> None:
    setup.follow()
    setup.cut()
    setup.training.checkpoint()
    setup.lose("s0*2-r00001")
    for _ in range(2):
        setup.resume(2, 0)
        if setup.training.generation == 2:
            setup.crash()
    setup.training.cut()
    assert "generation 3, step 2 follows the cut of generation 1, step 2, which is missing" in setup.error()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("s0*3-r00001", "{0} 3 lacks g000001-s000000000003-r00001of00002-c*, but has later files"),
        ("s0*3-r00000.*c00000", "{0} 3 lacks {1}, but has later files"),
        ("s0*3-", "{0} 4 follows {0} 3, which is missing; applied so far: {0} 2"),
    ],
    ids=["a_part", "a_chunk", "a_cut"],
)
def test_what_is_lost_is_named_until_a_base_comes(
    setup: Setup, pattern: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup.cut((), ())
    setup.assert_at(1, 2)
    setup.cut((), (), ())
    expected = expected.format("the cut of generation 1, step", min(setup.lose(pattern)))
    assert expected in setup.error()
    assert setup.replica.step == 2
    assert_equal(setup.replica.state_dict(), setup.training.at_cut[1, 2])
    setup.cut((0,))
    assert expected in setup.error()
    setup.cut((1,))  # with the base of rank 0 just before
    setup.assert_at(1, 7)
    assert "starting again from the base of the cut of generation 1, step 7" in caplog.text


def test_no_base_is_told(setup: Setup) -> None:
    setup.cut((), (), ())
    setup.lose("s0*1-")
    assert setup.error() == (
        "the sink lacks a base of every rank, so a new replica cannot start. It has 2 cuts, from the cut of generation "
        "1, step 2 to the cut of generation 1, step 3. Start from a state that a replica saved, or let the training "
        "write a base."
    )


def test_two_trainings_in_one_sink_are_told(setup: Setup) -> None:
    setup.follow()
    other = Training(setup.sink, seed=6)
    other.start(3, 0)
    other.train(2)
    setup.cut()
    other.cut()
    expected = "the cut of generation 1, step 2 has files of 2 ranks and of 3 ranks: two trainings wrote into this sink"
    assert expected in setup.error()
    setup.lose("of00003")
    setup.sink.files[str(FileName(1, 2, 0, 2, 0, 7))] = b""
    assert "has several series of files of rank 0, one of " in setup.error()


def test_another_run_is_told(setup: Setup) -> None:
    setup.follow()
    for generation, step in ((1, 2), (2, 5), (1, 0)):
        setup.sink.files.clear()
        other = Training(setup.sink, seed=6, run="another")
        other.generation, other.step = generation, step
        other.cut()
        said = setup.error()
        assert f"the cut of generation {generation}, step {step} is of the run 'another', this replica is of" in said


def test_a_listing_that_missed_a_part_is_made_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.follow()
    setup.cut((), ())
    listings = [[name for name in setup.sink.names() if "s000000000002-r00001" not in name]]
    everything = setup.sink.names
    monkeypatch.setattr(setup.sink, "names", lambda: listings.pop() if listings else everything())
    setup.assert_at(1, 3)
    assert not listings


def test_a_replica_that_catches_up_lists_its_sink_twice_and_reads_each_file_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists at first, and where that listing has no more. A sink may be an object store, which bills for both."""
    listings, read = list[int](), list[str]()
    names, own_read = setup.sink.names, setup.sink.read
    monkeypatch.setattr(setup.sink, "names", lambda: listings.append(setup.training.step) or names())
    monkeypatch.setattr(setup.sink, "read", lambda name: read.append(name) or own_read(name))
    setup.cut(*[()] * 6)
    setup.assert_at(1, 6)
    assert len(listings) == 2
    assert sorted(set(read)) == sorted(setup.sink.files)
    read.clear()
    assert [setup.replica.update() for _ in range(3)] == [0, 0, 0]
    assert read == [], "what was applied is not read again"


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


@pytest.fixture
def live(setup: Setup) -> Setup:
    """At the cut of generation 2, step 4; the checkpoint is of generation 1, step 1."""
    setup.cut()
    setup.training.checkpoint()
    setup.cut()
    setup.assert_at(1, 2)
    setup.resume(2, 1)
    setup.cut((), (), ())
    setup.assert_at(2, 4)
    return setup


def test_a_replica_begins_anew_where_its_last_cuts_were_lost(live: Setup) -> None:
    live.lose("g0*2-s0*[34]-")
    live.resume(1, 0)
    for step in (2, 3):
        live.cut()
        live.assert_at(3, step)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_a_generation_that_is_written_twice_is_no_timeline(
    live: Setup, num_steps: int, saves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind, at and past the cut that was applied; a replica has not looked for longer than it took."""
    monkeypatch.setattr(chain, "QUICK_S", 0)
    if saves:
        live.replica.save(tmp_path / "state")
    live.lose("g0*2-")
    live.resume(2, 1)
    live.cut(*[()] * num_steps)
    if saves:
        live.replica = Replica(None, live.sink, start=tmp_path / "state")
    live.assert_at(2, 1 + num_steps)


@pytest.mark.parametrize("lost", ["g0*1-s0*1-|g0*2-s0*4-", "g0*1-s0*1-|g0*2-"], ids=["the_last_cut", "all_cuts"])
def test_where_no_base_is_left_the_lost_cut_is_named(live: Setup, lost: str) -> None:
    live.lose(lost)
    live.resume(2, 1)
    live.cut((), (), (), ())
    position = live.replica.position
    assert "generation 2, step 4, which" in live.error()
    assert live.replica.position == position


def test_a_sink_that_leads_to_one_cut_again_and_again_is_told(live: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.replica._chain, "next", lambda at: live.replica._chain.start())
    assert "the cut of generation 1, step 1 repeatedly" in live.error()
