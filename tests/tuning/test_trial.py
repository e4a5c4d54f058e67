"""Which arm is chosen, from the blocks of all ranks."""

import copy
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_overlap.runtime import Streams
from lightning_overlap.tuning import Arm, Auto, Tuner, tuner
from lightning_overlap.tuning.arms import Block, choose, modes_on, streams_of, table, times_of

FUSED, AFTER, SPARSE, BASE = ARMS = modes_on("data_dist", splits=False)


def blocks(
    *ms: float, arms: Sequence[Arm] = ARMS, void: tuple[int, ...] = (), data: dict[int, float] | None = None
) -> list[Block]:
    """Three blocks of each arm, in turns; those at some places void, or waiting for data."""
    return [
        Block(arm, one, (data or {}).get(place, 0.0), "validation_step" if place in void else "")
        for place, (arm, one) in enumerate(list(zip(arms, ms, strict=False)) * 3)
    ]


@pytest.mark.parametrize(
    ("ms", "arm"),
    [
        ((8.0, 9.0, 10.0, 11.0), FUSED),
        ((9.0, 8.0, 10.0, 11.0), AFTER),
        # Within 5 %: `base` has one batch in flight, the others three; `sparse_dist` holds no embeddings ahead.
        ((8.0, 9.0, 10.0, 8.4), BASE),
        ((8.0, 9.0, 8.4, 11.0), SPARSE),
        ((8.0, 9.0, 10.0, 8.5), FUSED),
        # As much is held: the faster one.
        ((8.0, 7.7, 10.0, 11.0), AFTER),
        ((8.0, 8.1, 10.0, 11.0), FUSED),
    ],
)
def test_the_fastest_or_what_holds_less(ms: tuple[float, ...], arm: Arm) -> None:
    assert choose(times_of([blocks(*ms)]), 0.05) == arm


def test_a_stream_that_holds_less_is_as_good() -> None:
    arms = streams_of(FUSED)
    assert [arm.stream for arm in arms] == ["data_dist", "current", "dedicated"]
    assert choose(times_of([blocks(8.0, 8.1, 7.9, arms=arms)]), 0.05) == Arm("fused_sparse_dist", "current")
    assert choose(times_of([blocks(8.0, 9.0, 7.0, arms=arms)]), 0.05) == Arm("fused_sparse_dist", "dedicated")
    assert streams_of(BASE) == [BASE]
    assert streams_of(SPARSE) == [SPARSE]


def test_of_equal_arms_all_ranks_take_the_first() -> None:
    """By the order in which they are tried; sets have another order in each process."""
    assert FUSED.held == AFTER.held
    for order in ([FUSED, AFTER], [AFTER, FUSED]):
        assert choose({arm: [8.0] * 2 for arm in order}, 0.05) == order[0]


def test_the_slowest_rank_counts_and_a_block_void_on_one_rank_is_void() -> None:
    ranks = [blocks(8.0, 5.0, void=(0,)), blocks(7.0, 6.0, data={3: 1.0})]
    found = times_of(ranks)
    assert found == {FUSED: [8.0] * 2, AFTER: [6.0] * 2}
    assert choose(found, 0.05) == AFTER
    steady = times_of([blocks(8.0, 8.0, data=dict.fromkeys(range(6), 7.0))])
    assert [len(times) for times in steady.values()] == [3, 3], "waits for data that are as long in every block"


def test_nothing_to_choose_from() -> None:
    found = times_of([blocks(8.0, 9.0, void=tuple(range(6)))])
    assert found == {FUSED: [], AFTER: []}
    assert [row.split()[2:5] for row in table(found, None).splitlines()[2:]] == [["-", "-", "0"]] * 2
    assert choose(found, 0.05) is None


@pytest.mark.parametrize(("num_steps", "has_chosen"), [(5, False), (60, True)])
def test_after_a_fit_no_time_stamps_are_held(num_steps: int, has_chosen: bool) -> None:
    """On CUDA they are events, which cannot be copied; a trainer can be copied after a fit."""

    class Mark(float):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("a time stamp is copied")

    clock = mock.Mock(zero=Mark(), mark=lambda: Mark(time.perf_counter() * 1e3), ms=float)
    tuned = Tuner(Auto(warm_up=1, settle=1, block=2, rounds=2), "data_dist")
    with mock.patch.object(tuner, "timestamps_of", return_value=clock):
        tuned.begin(torch.device("cpu"), Streams(), lambda value: [value], lambda text: None)
        tuned.timed(mock.Mock())
        for _ in range(num_steps):
            tuned.step()
        tuned.stop()
    assert tuned.has_chosen is has_chosen
    copy.deepcopy(tuned)
