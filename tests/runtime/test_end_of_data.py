"""The end of the data, early stops, and sources that hold batches back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from lightning_overlap.distributed import ASK_FOR_LAST, MAX_INTERVAL, StepFlags, check_none_batches
from lightning_overlap.runtime.end_of_data import EndOfData
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import Stage

from ..support.fakes import FakeTrainer, InjectedError, check_in_flight, check_stages, check_staleness
from ..support.schedules import run_schedule
from .setups import FUSED, overlapping


def test_an_epoch_without_batches(mode: Schedule) -> None:
    run = run_schedule(mode, 0)
    assert run.trained == []
    assert run.stages == {}


@overlapping
def test_stopping_early_completes_every_collective(schedule: Schedule) -> None:
    for stop_after in range(2 * schedule.depth):
        for ready in (True, False):
            # `run` itself fails on a collective that is in flight after the drain.
            run = run_schedule(schedule, 4 * schedule.depth, ready=ready, stop_after=stop_after)
            assert run.trained == list(range(stop_after))
            assert max(run.stages, default=-1) <= stop_after + schedule.max_offset - 1


def _failed(schedule: Schedule, stage: Stage, batch: int) -> FakeTrainer:
    trainer = FakeTrainer(schedule)
    with pytest.raises(InjectedError):
        trainer.run(9, fail_at=(stage, batch))
    return trainer


@overlapping
def test_a_batch_that_was_handed_out_but_not_trained_is_drained(schedule: Schedule) -> None:
    trainer = _failed(schedule, Stage.OPTIMIZER_STEP, 3)
    assert trainer.sparse.pending, "there is something to complete"
    assert trainer.executor.next_batch() is not None
    trainer.executor.drain()
    assert not trainer.sparse.pending


def test_a_run_after_an_early_stop_starts_anew(mode: Schedule) -> None:
    trainer = FakeTrainer(mode)
    trainer.run(9, stop_after=2)
    run = trainer.run(5)
    check_stages(run, 5)
    check_staleness(run)


def test_a_batch_that_the_source_held_back_is_trained_all_the_same(mode: Schedule) -> None:
    for held in range(1, 2 * mode.depth):
        for until in range(max(0, held - mode.max_offset), held + 1):
            run = run_schedule(mode, 3 * mode.depth, hold={held: until})
            assert run.trained == list(range(3 * mode.depth)), f"batch {held} held back until {until}\n{run}"
            check_in_flight(run)
            for served in run.served:
                staleness = mode.staleness if served.early and served.owner is FUSED else 0
                assert served.saw == tuple(range(served.batch - staleness)), f"held {held} until {until}\n{run}"


def test_batches_ahead_are_fetched_but_not_trained() -> None:
    executor = _failed(FUSED_SPARSE_DIST, Stage.BACKWARD, 1).executor
    assert (executor.num_trained, executor.num_ahead, executor.queue.num_fetched) == (2, 2, 4)


# -- what ranks tell each other, one answer after the other --------------------------------------------------------


@dataclass
class Data:
    exhausted: bool = False
    length_known: bool = False
    num_batches: float = float("inf")
    num_certain: int = 0
    stop_requested: bool = False

    def fetch(self, index: int, timer: None) -> None:
        return None


class Others:
    """Ranks that say what they are told to, beside what this one says."""

    def __init__(self, *said: StepFlags) -> None:
        self.said = list(said)
        self.asked: list[StepFlags] = []

    def ask(self, flags: StepFlags) -> Others:
        self.asked.append(flags)
        return self

    def wait(self) -> StepFlags:
        return self.said.pop(0)


GOES_ON = StepFlags(has=True, lacks=False, last=False, stop=False)


def test_all_ranks_end_where_the_first_of_them_does() -> None:
    others = Others(GOES_ON, GOES_ON._replace(lacks=True))
    end, in_flight = EndOfData(Data(), others, rank=1, depth=2), {index: InFlightBatch(index, None) for index in (0, 1)}
    for index in (0, 1):
        end.ask(index, lacks=False)
    end.hear(0, in_flight)
    assert (end.num_batches, list(in_flight)) == (None, [0, 1])
    with pytest.warns(UserWarning, match="another rank ended after 1 batches. Rank 1 has more"):
        end.hear(1, in_flight)
    assert (end.num_batches, list(in_flight)) == (1, [0])
    assert end.is_last(0, num_ahead=0)
    soon = GOES_ON._replace(requested_interval=MAX_INTERVAL - 1)  # nothing is certain of the next batch
    assert others.asked == [soon, soon]


def test_a_rank_that_knows_its_last_batch_ends_all_after_it() -> None:
    end = EndOfData(Data(exhausted=True), Others(GOES_ON._replace(last=True, stop=True)), rank=0, depth=2)
    end.ask(0, lacks=False)
    assert not end.is_last(0, num_ahead=0)
    end.hear(0, {})
    assert end.is_last(0, num_ahead=0)
    assert end.stop_agreed


def test_ranks_that_know_how_many_batches_they_have_ask_for_the_first_and_the_last_ones() -> None:
    others = Others(*[GOES_ON] * 100)
    end = EndOfData(Data(length_known=True, num_batches=20), others, rank=0, depth=2)
    asked = []
    for index in range(20):
        end.ask(index, lacks=False)
        asked += list(end.answers)
        end.hear(index, {})
    assert asked[0] == 0
    assert asked[-ASK_FOR_LAST:] == list(range(20 - ASK_FOR_LAST, 20))
    assert len(asked) < 20


class Stream:
    """A rank's batches, some of them None, of which it has two at hand beyond the one fetched last."""

    length_known, num_batches, stop_requested = False, float("inf"), False

    def __init__(self, layout: Sequence[bool]) -> None:
        self.real = [place for place, is_real in enumerate(layout) if is_real]
        self.layout, self.num_fetched = layout, 0

    @property
    def exhausted(self) -> bool:
        return self.num_fetched >= len(self.real)

    @property
    def num_certain(self) -> int:
        following = self.real[self.num_fetched] if not self.exhausted else len(self.layout)
        if self.exhausted or following > self.num_fetched:  # it has seen a None batch
            return 0
        return 1 + (following + 1 < len(self.layout) and self.layout[following + 1])

    @property
    def latest_none(self) -> int:
        """Of those before the batch fetched last."""
        before = range(self.real[self.num_fetched - 1])
        return max((place for place in before if not self.layout[place]), default=-1)

    def fetch(self, index: int, timer: None) -> None:
        self.num_fetched += not self.exhausted


class Rank:
    """One of several ranks in lockstep: its n-th question goes with the n-th of each other one."""

    def __init__(self, layout: Sequence[bool]) -> None:
        self.asked: list[StepFlags] = []
        self.all_ranks: list[Rank] = []
        self.stream = Stream(layout)
        self.end = EndOfData(self.stream, self, rank=0, depth=3)

    def ask(self, flags: StepFlags) -> LockstepAnswer:
        self.asked.append(flags)
        return LockstepAnswer(self.all_ranks, len(self.asked) - 1)

    def fetch_to(self, index: int) -> None:
        while self.stream.num_fetched <= index and self.end.num_batches is None:
            before = self.stream.num_fetched
            self.stream.fetch(before, None)
            lacks = self.stream.num_fetched == before
            self.end.ask(before, lacks=lacks, latest_none=-1 if lacks else self.stream.latest_none)
            if lacks:
                return


@dataclass
class LockstepAnswer:
    all_ranks: list[Rank]
    number: int

    def wait(self) -> StepFlags:
        said = [rank.asked[self.number] for rank in self.all_ranks]  # no rank may have asked fewer questions
        check_none_batches({rank: flags.latest_none for rank, flags in enumerate(said) if flags.has})
        return StepFlags(*(max(flags) for flags in zip(*said, strict=True)))


def _layouts(draw: Random) -> list[list[bool]]:
    """Draw data for two or three ranks: of other lengths, with the same None batches; each place is None or not."""
    share = draw.choice([1.0, 1.0, 0.9, 0.5])
    longest = [draw.random() < share for _ in range(25)]
    return [longest[: draw.randint(0, 25)] for _ in range(draw.choice([2, 3]))]


def _in_lockstep(layouts: Sequence[Sequence[bool]]) -> list[Rank]:
    ranks = [Rank(layout) for layout in layouts]
    for rank in ranks:
        rank.all_ranks = ranks
    return ranks


@pytest.mark.filterwarnings("ignore:The data of another rank ended")
@pytest.mark.parametrize(("fetched_ahead", "heard_ahead"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 4)])
def test_ranks_without_lengths_agree_and_ask_for_every_other_batch(fetched_ahead: int, heard_ahead: int) -> None:
    for seed in range(400):
        draw = Random(seed)
        ranks = _in_lockstep(_layouts(draw))
        fewest = min(len(rank.stream.real) for rank in ranks)
        if not any(rank.stream.real for rank in ranks):
            continue  # the executor ends with the batch that it does not get
        iteration = -fetched_ahead
        while not all(rank.end.num_batches is not None and iteration >= rank.end.num_batches for rank in ranks):
            for rank in ranks:
                if heard_ahead == fetched_ahead:
                    rank.fetch_to(iteration + fetched_ahead)
            for rank in ranks:
                rank.end.hear(iteration + heard_ahead, {})
            assert len({rank.end.num_batches for rank in ranks}) == 1, seed
            for rank in ranks:
                if iteration >= 0 and fewest > 0:
                    assert rank.end.is_last(iteration, 0) is (iteration + 1 == fewest), seed
                if heard_ahead != fetched_ahead:
                    rank.fetch_to(iteration + fetched_ahead)
            iteration += 1
            assert iteration <= 30, seed
        assert {rank.end.num_batches for rank in ranks} == {fewest}, seed
        assert len({len(rank.asked) for rank in ranks}) == 1, seed
        if all(all(rank.stream.layout) for rank in ranks):
            assert len(ranks[0].asked) <= fewest / 2 + 2, seed


def _walk(ranks: Sequence[Rank], num_batches: int) -> None:
    for index in range(num_batches):
        for rank in ranks:
            rank.fetch_to(index)
        for rank in ranks:
            rank.end.hear(index, {})


def test_ranks_without_lengths_tell_of_the_first_batch_that_is_none_on_one_of_them() -> None:
    for seed in range(200):
        draw = Random(seed)
        layouts = [[True] * 12, [True] * 12]
        alike, alone, rank = draw.randint(0, 11), draw.randint(0, 10), draw.randint(0, 1)
        for layout in layouts:
            layout[alike] = False
        layouts[rank][alone] = False
        if alone == alike or not any(layouts[rank][alone + 1 :]):
            continue  # at the end of its data the ranks compare what is left (`plugin/loops/batch_stream.py`)
        ranks = _in_lockstep(layouts)
        last = alone + (alike == alone + 1)
        with pytest.raises(RuntimeError, match=f"the last one so far is batch {last} on rank {rank}, "):
            _walk(ranks, 12)


def test_one_rank_asks_nobody() -> None:
    end = EndOfData(Data(exhausted=True), None, rank=0, depth=2)
    end.ask(0, lacks=False)
    assert not end.answers
    assert end.is_last(0, num_ahead=0)
    assert not end.is_last(0, num_ahead=1)
