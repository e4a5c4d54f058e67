"""Which rank gets which samples: equal numbers, costs near those of the best assignment, few samples moved."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap.balance import assign
from lightning_overlap.balance.assignment import CLOSE, loads

Costs = np.ndarray


@st.composite
def drawn(draw: st.DrawFn, most_ranks: int = 6, most_samples: int = 12) -> Costs:
    shape = draw(st.integers(1, most_ranks)), draw(st.integers(0, most_samples))
    numbers = draw(st.sampled_from([st.integers(0, 9), st.integers(0, 10**6), st.floats(0, 1e30), st.just(3)]))
    values = draw(st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(values, np.float64).reshape(shape)


@settings(max_examples=200, deadline=None)
@given(drawn())
def test_ranks_get_equal_numbers_and_no_rank_more_than_the_heaviest_had(costs: Costs) -> None:
    ranks = assign(costs)
    num_ranks, num_samples = costs.shape
    assert np.bincount(ranks.ravel(), minlength=num_ranks).tolist() == [num_samples] * num_ranks
    assert loads(costs, ranks).max(initial=0) <= costs.sum(axis=1).max(initial=0) * (1 + 1e-9)
    assert (assign(costs) == ranks).all()
    if num_samples and (costs.sum(axis=1) == costs.sum(axis=1)[0]).all():
        assert (ranks == np.arange(num_ranks)[:, None]).all()  # nothing is sent where nothing is gained


@settings(max_examples=100, deadline=None)
@given(drawn(most_ranks=2, most_samples=5))
def test_two_ranks_come_near_the_best_assignment(costs: Costs) -> None:
    """BLDM on two ranks is at most 7/6 of the best one; exchanges of pairs make it better."""
    if costs.shape[0] < 2 or not costs.sum():
        return
    flat, num = costs.ravel(), costs.shape[1]
    halves = [flat[list(places)].sum() for places in itertools.combinations(range(2 * num), num)]
    best = min(max(half, flat.sum() - half) for half in halves)
    assert loads(costs, assign(costs)).max() <= max(7 / 6 * best, (1 + CLOSE) * flat.sum() / 2) * (1 + 1e-6)


def test_many_ranks_with_lengths_by_zipf_are_close_and_few_samples_move() -> None:
    generator = np.random.default_rng(0)
    for num_ranks, num_samples in ((2, 64), (8, 256), (64, 512)):
        costs = np.minimum(generator.zipf(1.3, (num_ranks, num_samples)), 500).astype(np.float64) ** 2
        ranks = assign(costs)
        after = loads(costs, ranks)
        assert after.max() <= (1 + CLOSE) * after.mean()
        assert (ranks != np.arange(num_ranks)[:, None]).mean() < 0.2


def test_one_giant_sample_gets_the_lightest_companions() -> None:
    costs = np.ones((3, 4))
    costs[1] = [100, 5, 5, 5]
    ranks = assign(costs)
    assert loads(costs, ranks).max() == 103
