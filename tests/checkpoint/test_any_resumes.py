"""Any number of resumes, at any places, equal no resume: batches, losses, hooks, counters, metrics, rates, weights."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES

from ..support.ranks import Ranks
from . import any_resumes
from .any_resumes import LOADERS, PLACES, SCHEDULERS, Drawn, Stop

EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]
FORMATS = ["full", "sharded", "incremental", "incremental, asynchronous", "incremental, renewed"]
FORMATS += ["incremental, renewed, asynchronous"]
stops = st.builds(Stop, st.sampled_from(PLACES), st.integers(1, 7), st.booleans())


@st.composite
def draws(draw: Callable[..., Any]) -> Drawn:
    num = draw(st.integers(1, 5))
    limit = draw(st.none() | st.integers(1, num))
    every = draw(st.sampled_from([1, 1, 2, None]))
    most = num if limit is None else limit
    intervals = [1.0, *range(1, most + 1)] if every else [1, 2, 3, most + 1]
    loader = draw(st.sampled_from(LOADERS))
    if every and loader != "own-unsized":
        intervals += [0.3, 0.5]
    accumulate = draw(st.sampled_from([1, 1, 1, 2]))
    return Drawn(
        stops=tuple(draw(st.lists(stops, min_size=1, max_size=4))),
        pipeline=draw(st.sampled_from(EXACT)),
        loader=loader,
        num_batches=num,
        epochs=draw(st.integers(1, 3)),
        max_steps=draw(st.just(-1) | st.integers(1, 12)),
        limit=limit,
        accumulate=accumulate,
        doubles=accumulate > 1 and draw(st.booleans()),
        val_interval=draw(st.sampled_from(intervals)),
        val_every_n_epochs=every,
        scheduler=draw(st.sampled_from(SCHEDULERS)),
        frequency=draw(st.sampled_from([1, 1, 2])),
        reload=draw(st.sampled_from([0, 0, 1, 2, 3])),
        format=draw(st.sampled_from(FORMATS)),
        resets=draw(st.booleans()),
    )


def differences(ranks: Ranks, drawn: Drawn) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(any_resumes.compare, drawn, folder)


@pytest.mark.timeout(400)
def test_any_resumes_equal_none(get_ranks: Callable[..., Ranks]) -> None:
    @settings(max_examples=20)
    @given(drawn=draws())
    @example(drawn=Drawn((Stop("batch_end", 4), Stop("batch_end", 3))))  # twice across an epoch's end
    @example(drawn=Drawn((Stop("batch_end", 6),), max_steps=6, val_interval=2))  # in the last step, which is validated
    @example(drawn=Drawn((Stop("batch_start", 3, by_error=True),), num_batches=3, limit=2))  # in an epoch's first batch
    @example(drawn=Drawn((Stop("epoch_end", 2), Stop("epoch_end", 1)), scheduler="plateau_of_validation"))
    @example(drawn=Drawn((Stop("batch_end", 3),), none=1))
    @example(drawn=Drawn((Stop("batch_end", 2),), none=1, epochs=1))  # after the None batch
    @example(drawn=Drawn((Stop("batch_start", 2),), none=1, epochs=1, loader="own-unsized"))
    @example(drawn=Drawn((Stop("batch_end", 1), Stop("batch_start", 1)), none=1, epochs=1, loader="own-unsized"))
    @example(drawn=Drawn((Stop("batch_start", 2), Stop("batch_start", 1)), loader="own-unsized"))  # twice in one batch
    @example(drawn=Drawn((Stop("epoch_end", 1),), epochs=2, format="incremental", resets=True))
    @example(drawn=Drawn((Stop("epoch_end", 1),), num_batches=1, epochs=4, reload=2))
    @example(drawn=Drawn((Stop("val_start", 2), Stop("val_end", 1)), num_batches=2, epochs=4, reload=3))
    @example(drawn=Drawn((Stop("batch_end", 3),), num_batches=2, epochs=4, reload=2, val_every_n_epochs=2))
    @example(drawn=Drawn((Stop("epoch_end", 2),), num_batches=2, reload=1, val_interval=5, val_every_n_epochs=None))
    @example(drawn=Drawn((Stop("batch_end", 6),), accumulate=2, doubles=True))  # after two batches of the second epoch
    def holds(drawn: Drawn) -> None:
        assert differences(get_ranks(1), drawn) == [[]]

    holds()


@pytest.mark.timeout(400)
def test_any_resumes_equal_none_on_two_ranks(get_ranks: Callable[..., Ranks]) -> None:
    @settings(max_examples=4)
    @given(drawn=draws())
    def holds(drawn: Drawn) -> None:
        assert differences(get_ranks(2), drawn) == [[], []]

    holds()


@pytest.mark.parametrize("max_steps", [-1, 10])
@pytest.mark.parametrize("place", ["batch_end", "val_end", "epoch_end"])
def test_a_checkpoint_that_says_nothing_of_its_place(
    get_ranks: Callable[..., Ranks], place: str, max_steps: int
) -> None:
    """As one of another strategy: batches and weights are as without the stop, after a guess that is Lightning's."""
    for nth in (1, 2, 4):
        drawn = Drawn((Stop(place, nth),), val_interval=2, max_steps=max_steps, foreign=True)
        assert differences(get_ranks(1), drawn) == [[]]
