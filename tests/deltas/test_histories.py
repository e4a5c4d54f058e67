"""Random histories of a training and its sink: a replica is the training at its step, or says what is wrong."""

import random
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_overlap.deltas import CutError, PartError, PartName, Replica, TablesError, prune

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
NAMED = (CutError, PartError, TablesError)


class Follower:
    def __init__(self, sink: Any, training: Training, kept_bytes: int = 1 << 20, makes: bool = False) -> None:
        self.given: dict[str, Tensor] | None = None if makes else empty_tables()
        self.replica = Replica(self.given, sink, kept_bytes=kept_bytes)
        self.training = training

    def update(self) -> None:
        self.replica.update()
        at = None if self.replica.position is None else self.replica.position.cut
        assert at == max(self.training.wholes, default=None)
        self.check()

    def check(self) -> None:
        position = self.replica.position
        if position is not None:
            tables = self.replica.state_dict() if self.given is None else self.given
            assert_equal(tables, self.training.at_cut[position.cut])


class Played:
    """A history that was played: late replicas were checked on the way.

    Args:
        history: What happens.
        seed: Of what is trained, and of how it begins.
    """

    def __init__(self, history: list[Fit], seed: int) -> None:
        self.sink = MemorySink()
        self.training = Training(self.sink, seed)
        self.training.start(1 + seed % 4, seed % 3)
        self.training.checkpoint()
        self.live = self.follower(kept_bytes=seed % 2 * 1000)
        for fit in history:
            self._play(fit)

    def follower(self, **options: Any) -> Follower:
        return Follower(self.sink, self.training, **options)

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
                self.follower(makes=beat.updates, kept_bytes=1000 * beat.saves_after).update()
        if fit.crashes_after == AHEAD:
            training.crash_ahead()
        elif fit.crashes_after is not None:
            training.train(1)
            with suppress(Crash):
                training.cut(crash_after=fit.crashes_after)
        if fit.kind:
            self.live.update()
        training.resume(training.checkpoints[fit.checkpoint % len(training.checkpoints)], fit.world_size, fit.kind)


@given(HISTORIES, st.integers(0, 10_000))
@settings(max_examples=80)
def test_a_replica_is_at_the_newest_whole_cut(history: list[Fit], seed: int) -> None:
    played = Played(history, seed)
    played.live.update()
    played.follower(makes=True).update()
    removed = prune(played.sink)
    assert not set(removed) & set(played.sink.names())
    played.follower().update()
    played.live.update()


DAMAGES = ("lose", "tear", "flip", "copy", "swap", "renumber", "lose_cut", "other_run")


def damage(sink: MemorySink, how: str, choose: random.Random) -> None:
    names = sorted(sink.parts)
    name, other = choose.choice(names), choose.choice(names)
    if how == "lose":
        del sink.parts[name]
    elif how == "tear":
        sink.parts[name] = sink.parts[name][: choose.randrange(len(sink.parts[name]))]
    elif how == "flip":
        data = bytearray(sink.parts[name])
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        sink.parts[name] = bytes(data)
    elif how == "copy":
        sink.parts[name] = sink.parts[other]
    elif how == "swap":
        sink.parts[name], sink.parts[other] = sink.parts[other], sink.parts[name]
    elif how == "renumber":
        parsed = PartName.parse(name)
        assert parsed is not None
        field = choose.choice(["generation", "step", "rank", "world_size", "chunk", "num_chunks"])
        sink.parts[str(parsed._replace(**{field: choose.randint(0, 4)}))] = sink.parts.pop(name)
    elif how == "lose_cut":
        for each in names:
            if each.partition("-r")[0] == name.partition("-r")[0]:
                del sink.parts[each]
    elif how == "other_run":
        foreign = MemorySink()
        training = Training(foreign, seed=7, run="other")
        training.start(choose.randint(1, 4), 0)
        training.generation, training.step = choose.randint(1, 4), choose.randint(0, 5)
        training.cut()
        sink.parts.update(foreign.parts)


@pytest.mark.slow
@given(HISTORIES, st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=2), st.integers(0, 10_000))
@settings(max_examples=150)
def test_what_was_done_to_parts_is_named_and_no_table_is_wrong(
    history: list[Fit], damages: list[str], seed: int
) -> None:
    played, choose = Played(history, seed), random.Random(seed)
    for how in damages:
        if played.sink.parts:
            damage(played.sink, how, choose)
    for follower in (played.live, played.follower(), played.follower(kept_bytes=0, makes=True)):
        with suppress(*NAMED):
            follower.replica.update()
        if follower.replica.run != "other":
            follower.check()
