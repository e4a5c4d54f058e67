"""The end of the data, early stops, and sources that hold batches back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_overlap.distributed import MAX_INTERVAL, POLL_LAST, StepFlags
from lightning_overlap.runtime import FetchedBatch, Flight, Streams, Telemetry
from lightning_overlap.runtime.batches import Batches
from lightning_overlap.runtime.run_ahead import RunAhead
from lightning_overlap.schedules import Schedule, Stage, Step, StreamName

from ..support.fakes import check_in_flight
from ..support.schedules import run_schedule
from .setups import FUSED, overlapping


@overlapping
def test_stopping_early_completes_every_collective(schedule: Schedule) -> None:
    for stop_after in range(2 * schedule.depth):
        for ready in (True, False):
            # `run` itself fails on a collective that is in flight after the drain.
            run = run_schedule(schedule, 4 * schedule.depth, ready=ready, stop_after=stop_after)
            assert run.trained == list(range(stop_after))
            assert max(run.stages, default=-1) <= stop_after + schedule.max_offset - 1


def test_a_batch_that_the_source_held_back_is_trained_all_the_same(mode: Schedule) -> None:
    for held in range(1, 2 * mode.depth):
        for until in range(max(0, held - mode.max_offset), held + 1):
            run = run_schedule(mode, 3 * mode.depth, hold={held: until})
            assert run.trained == list(range(3 * mode.depth)), f"batch {held} held back until {until}\n{run}"
            check_in_flight(run)
            for served in run.served:
                staleness = mode.staleness if served.early and served.owner is FUSED else 0
                assert served.saw == tuple(range(served.batch - staleness)), f"held {held} until {until}\n{run}"


GOES_ON = StepFlags(has=True, lacks=False, last=False, stop=False)
COPY = Step(Stage.COPY_BATCH_TO_DEVICE, 0, StreamName.MEMCPY)


def batches_of(source: Any, consensus: Any, depth: int) -> Batches:
    def make_flight(index: int, fetched: FetchedBatch) -> Flight:
        return Flight(index, *fetched)

    streams = Streams()
    return Batches(source, make_flight, consensus, depth, streams, Telemetry(rank=1), RunAhead(streams, None))


def beside(results: Sequence[StepFlags], **data: Any) -> tuple[Batches, mock.Mock]:
    """Return a rank's batches beside ranks that say what they are told to, and the polls of this rank."""
    consensus = mock.Mock()
    consensus.poll.return_value.wait.side_effect = results
    source: Any = SimpleNamespace(
        exhausted=False, length_known=False, num_certain=0, stop_requested=False, save_requested=False
    )
    source.fetch = lambda index, timer: FetchedBatch(None, index, 0)
    vars(source).update({"num_batches": float("inf"), **data})
    return batches_of(source, consensus, depth=2), consensus.poll


def test_all_ranks_end_where_the_first_of_them_does() -> None:
    batches, polled = beside([GOES_ON, GOES_ON._replace(lacks=True)])
    for index in (0, 1):
        batches.fetch(COPY, index)
    assert batches.get(0) is not None
    assert (batches.num_batches, list(batches.in_flight)) == (None, [0, 1])
    with pytest.warns(UserWarning, match="another rank ended after 1 batches. Rank 1 has more"):
        assert batches.get(1) is None
    assert (batches.num_batches, list(batches.in_flight)) == (1, [0])
    assert batches.is_last(0)
    soon = GOES_ON._replace(requested_interval=MAX_INTERVAL - 1)  # nothing is certain of the next batch
    assert polled.mock_calls[:2] == [mock.call(soon), mock.call(soon)]


def test_ranks_that_know_how_many_batches_they_have_poll_some_and_the_last_ones() -> None:
    """No rank can run out of batches between two polls, unless most of those left are None."""
    batches, _ = beside([GOES_ON] * 100, length_known=True, num_batches=1000)
    polled = []
    for index in range(1000):
        batches.fetch(COPY, index)
        polled += list(batches.polls)
        batches.get(index)
    assert polled == [0, 255, 510, 755, 877, 938, 969, 984, *range(1000 - POLL_LAST, 1000)]


class Rank:
    """One of several ranks in lockstep, and its data: its n-th poll goes with the n-th of each other one."""

    length_known, num_batches, stop_requested, save_requested = False, float("inf"), False, False

    def __init__(self, all_ranks: list[Rank], num: int, draw_certain: Callable[[], int]) -> None:
        self.all_ranks, self.num, self.draw_certain = all_ranks, num, draw_certain
        self.polled: list[StepFlags] = []
        self.num_fetched = 0
        self.batches = batches_of(self, self, depth=3)

    @property
    def exhausted(self) -> bool:
        return self.num_fetched == self.num

    @property
    def num_certain(self) -> int:
        return min(self.draw_certain(), self.num - self.num_fetched)

    def fetch(self, index: int, timer: Any) -> FetchedBatch | None:
        if self.exhausted:
            return None
        self.num_fetched += 1
        return FetchedBatch(None, index, 0)

    def poll(self, flags: StepFlags) -> Any:
        self.polled.append(flags)
        return SimpleNamespace(wait=partial(self._wait, len(self.polled) - 1))

    def _wait(self, number: int) -> StepFlags:
        all_flags = [rank.polled[number] for rank in self.all_ranks]  # no rank may have polled less often
        return StepFlags(*(max(flags) for flags in zip(*all_flags, strict=True)))

    def fetch_to(self, index: int) -> None:
        while self.num_fetched <= index and self.batches.num_batches is None and not self.exhausted:
            self.batches.fetch(COPY, self.num_fetched)
        if self.num_fetched <= index and self.batches.num_batches is None:
            self.batches.fetch(COPY, self.num_fetched)


@pytest.mark.filterwarnings("ignore:The data of another rank ended")
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_ranks_without_lengths_agree_and_poll_every_other_batch(ahead: int) -> None:
    for seed in range(400):
        draw = Random(seed)
        certain = draw.choice([[2], [0, 1, 2]])  # they have up to two batches at hand beyond the one fetched last
        nums = [draw.randint(0, 25) for _ in range(draw.choice([2, 3]))]
        if not any(nums):
            continue  # the walker ends with the batch that it does not get
        ranks: list[Rank] = []
        ranks += [Rank(ranks, num, partial(draw.choice, certain)) for num in nums]
        for iteration in range(-ahead, 27):
            for rank in ranks:
                rank.fetch_to(iteration + ahead)
            for rank in ranks:
                rank.batches.get(iteration + ahead)
            assert len({rank.batches.num_batches for rank in ranks}) == 1, seed
            if iteration >= 0 and min(nums) > 0:
                assert {rank.batches.is_last(iteration) for rank in ranks} == {iteration + 1 == min(nums)}, seed
        assert {rank.batches.num_batches for rank in ranks} == {min(nums)}, seed
        assert len({len(rank.polled) for rank in ranks}) == 1, seed
        if certain == [2]:
            assert len(ranks[0].polled) <= min(nums) / 2 + 2, seed
