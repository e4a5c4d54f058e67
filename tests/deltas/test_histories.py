"""Random histories of a training and its sink: a replica is the training at its step, or says what is wrong."""

import random
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.deltas import CutError, FileError, FileName, Replica, TablesError, prune

from .histories import Crash, MemorySink, Training, assert_equal, empty_tables

WORLD, KIND = st.integers(1, 4), st.integers(0, 2)
AHEAD = 5
SOMETIMES = st.sampled_from([True, False, False])


class Beat(NamedTuple):
    """Some steps, a cut, and what happens around it."""

    num_steps: int
    bases: frozenset[int]
    saves_before: bool
    saves_after: bool
    updates: bool
    prunes: bool
    is_late: bool


class Fit(NamedTuple):
    """Steps and cuts up to an end, which may be a crash in a cut, and where to go on."""

    beats: list[Beat]
    crashes_after: int | None
    checkpoint: int
    world_size: int
    kind: int


BEATS = st.builds(
    Beat,
    st.integers(1, 3),
    st.sampled_from([(), (), (0,), (1,), (2, 3), (0, 1, 2, 3)]).map(frozenset),
    *[SOMETIMES] * 5,
)
FITS = st.builds(
    Fit, st.lists(BEATS, max_size=6), st.one_of(st.none(), st.integers(0, AHEAD)), st.integers(0, 9), WORLD, KIND
)
HISTORIES = st.lists(FITS, min_size=1, max_size=5)


class Follower:
    def __init__(self, training: Training, kept_bytes: int = 1 << 20, makes: bool = False) -> None:
        self.replica = Replica(None if makes else empty_tables(), training.sink, kept_bytes=kept_bytes)
        self.training = training

    def update(self) -> None:
        self.replica.update()
        at = None if self.replica.position is None else self.replica.position.cut
        assert at == max(self.training.wholes, default=None)
        self.check()

    def check(self) -> None:
        if self.replica.position is not None:
            assert_equal(self.replica.state_dict(), self.training.at_cut[self.replica.position.cut])


class Played:
    """A history that was played: late replicas were checked on the way."""

    def __init__(self, history: list[Fit], seed: int) -> None:
        self.sink = MemorySink()
        self.training = Training(self.sink, seed)
        self.training.start(1 + seed % 4, seed % 3)
        self.training.checkpoint()
        self.live = Follower(self.training, kept_bytes=seed % 2 * 1000)
        for fit in history:
            self._play(fit)

    def _play(self, fit: Fit) -> None:
        training = self.training
        for beat in fit.beats:
            training.train(beat.num_steps)
            if beat.saves_before:
                training.checkpoint()
            training.cut(beat.bases)
            if beat.saves_after:
                training.checkpoint()
            if beat.prunes:
                prune(self.sink)
            if beat.updates:
                self.live.update()
            if beat.is_late:
                Follower(training, makes=beat.updates, kept_bytes=1000 * beat.saves_after).update()
        if fit.crashes_after == AHEAD:
            training.crash_ahead()
        elif fit.crashes_after is not None:
            with suppress(Crash):
                training.cut(crash_after=fit.crashes_after, steps=1)
        if fit.kind:
            self.live.update()
        training.resume(training.checkpoints[fit.checkpoint % len(training.checkpoints)], fit.world_size, fit.kind)


@given(HISTORIES, st.integers(0, 10_000))
@settings(max_examples=80)
def test_a_replica_is_at_the_newest_whole_cut(history: list[Fit], seed: int) -> None:
    played = Played(history, seed)
    played.live.update()
    Follower(played.training, makes=True).update()
    removed = prune(played.sink)
    assert not set(removed) & set(played.sink.names())
    Follower(played.training).update()
    played.live.update()


DAMAGES = ("lose", "flip", "renumber", "lose_cut", "other_run")


def damage(sink: MemorySink, how: str, choose: random.Random) -> None:
    names = sorted(sink.files)
    name = choose.choice(names)
    if how == "lose":
        del sink.files[name]
    elif how == "flip":
        data = bytearray(sink.files[name])
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        sink.files[name] = bytes(data)
    elif how == "renumber":
        parsed = FileName.parse(name)
        assert parsed is not None
        field = choose.choice(["generation", "step", "rank", "world_size", "chunk", "num_chunks"])
        sink.files[str(parsed._replace(**{field: choose.randint(0, 4)}))] = sink.files.pop(name)
    elif how == "lose_cut":
        for each in names:
            if each.partition("-r")[0] == name.partition("-r")[0]:
                del sink.files[each]
    elif how == "other_run":
        foreign = MemorySink()
        training = Training(foreign, seed=7, run="other")
        training.start(choose.randint(1, 4), 0)
        training.generation, training.step = choose.randint(1, 4), choose.randint(0, 5)
        training.cut()
        sink.files.update(foreign.files)


@pytest.mark.slow
@given(HISTORIES, st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=2), st.integers(0, 10_000))
@settings(max_examples=150)
def test_what_was_done_to_parts_is_named_and_no_table_is_wrong(
    history: list[Fit], damages: list[str], seed: int
) -> None:
    played, choose = Played(history, seed), random.Random(seed)
    for how in damages:
        if played.sink.files:
            damage(played.sink, how, choose)
    for follower in (played.live, Follower(played.training), Follower(played.training, kept_bytes=0, makes=True)):
        with suppress(CutError, FileError, TablesError):
            follower.replica.update()
        if follower.replica.run != "other":
            follower.check()
