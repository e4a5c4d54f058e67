"""Which arm is chosen, from the blocks of all ranks."""

import copy
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.runtime import Streams
from lightning_overlap.tuning import Arm, Auto, Tuner, tuner
from lightning_overlap.tuning.arms import Block, choose, modes_on, reason, streams_of, table, times_of, uncertainty

from ..support.draws import few

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


def around(ms: float, noise_ms: float) -> list[float]:
    """Return four blocks with this median, and so much noise."""
    shape = [-1.0, -0.5, 0.5, 1.0]
    return [ms + noise_ms * one / uncertainty(shape) for one in shape]  # type: ignore[operator]


def test_the_noise_of_a_median() -> None:
    """Of many normal numbers it is twice the standard error of their median; one slow block changes it little."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4000, 9, generator=generator)
    found = [uncertainty(times) for times in normal.tolist()]
    assert 0.9 < (torch.tensor(found).median() / (2 * normal.median(1).values.std())).item() < 1.3
    assert uncertainty([8.0, 8.1, 8.0, 8.2, 8.1, 8.0, 8.1, 90.0]) < 0.2  # type: ignore[operator]
    assert uncertainty([8.0]) is None


@pytest.mark.parametrize(
    ("found", "arm", "why"),
    [
        ({FUSED: (33.3, 14.8), SPARSE: (31.1, 28.8)}, FUSED, "no mode is measurably faster than fused_sparse_dist"),
        ({FUSED: (31.1, 28.8), SPARSE: (33.3, 14.8)}, FUSED, "no mode is measurably faster than fused_sparse_dist"),
        ({FUSED: (33.3, 1.4), SPARSE: (31.1, 1.4)}, SPARSE, "it is the fastest"),
        ({FUSED: (33.3, 1.6), SPARSE: (31.1, 1.6)}, FUSED, "no mode is measurably faster than fused_sparse_dist"),
        ({FUSED: (31.1, 1.4), AFTER: (33.3, 1.4)}, FUSED, "it is the fastest"),
        # Another one is faster for sure, beside one whose time says nothing.
        ({FUSED: (33.3, 0.5), AFTER: (31.1, 0.5), BASE: (30.0, 28.8)}, AFTER, "it is measurably faster than fused"),
        ({FUSED: (8.0, 0.1), BASE: (8.3, 0.1)}, BASE, "no other is measurably more than 5% faster; among equally"),
        ({FUSED: (8.0, 0.1), BASE: (8.1, 0.1)}, FUSED, "no mode is measurably faster than fused_sparse_dist"),
    ],
)
def test_a_difference_below_the_noise_keeps_the_default(
    found: dict[Arm, tuple[float, float]], arm: Arm, why: str
) -> None:
    times = {one: around(*numbers) for one, numbers in found.items()}
    assert choose(times, 0.05) == arm
    assert reason(times, 0.05).startswith(why)
    assert f"{found[FUSED][1]:.2f}" in table(times, arm).splitlines()[2]


@few(max_examples=30)
@given(
    ms=st.lists(st.floats(20, 40), min_size=4, max_size=4),
    noise_ms=st.lists(st.floats(0.01, 30), min_size=4, max_size=4),
)
def test_what_differs_from_the_default_by_less_than_the_noise_is_not_chosen(
    ms: list[float], noise_ms: list[float]
) -> None:
    times = {arm: around(*numbers) for arm, *numbers in zip(ARMS, ms, noise_ms, strict=True)}
    chosen = choose(times, 0.05)
    assert chosen is not None
    place = ARMS.index(chosen)
    apart_ms = [(noise_ms[place] ** 2 + one**2) ** 0.5 for one in noise_ms]
    assert place == 0 or abs(ms[0] - ms[place]) > apart_ms[0] - 1e-6
    assert place == 0 or ms[place] < ms[0] or (chosen.held < FUSED.held and ms[place] < 1.05 * ms[0])
    slower = [ms[other] - ms[place] > apart_ms[other] for other in range(4) if other != place]
    said = reason(times, 0.05)
    assert (said == "it is the fastest") == all(slower)
    if place == 0 and not all(slower):
        assert said == "no mode is measurably faster than fused_sparse_dist"


def test_streams_are_kept_within_the_noise_too() -> None:
    arms = streams_of(AFTER)
    times = dict(zip(arms, [around(33.3, 14.8), around(31.1, 28.8), around(34.0, 9.0)], strict=True))
    assert choose(times, 0.05) == arms[0]
    assert reason(times, 0.05) == "no stream is measurably faster than data_dist"


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
