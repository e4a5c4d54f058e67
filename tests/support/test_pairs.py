"""Pairings leave out products, and no pair that a test of a mode or of a number of ranks rests on."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES

from .pairs import HELD, pairwise, rotated


@settings(max_examples=30)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4))
def test_any_two_values_of_two_axes_meet(sizes: list[int]) -> None:
    axes = [[f"{axis}{place}" for place in range(size)] for axis, size in zip("abcd", sizes, strict=False)]
    found = pairwise(*axes)
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(values[one], values[other]) for values in found} == set(itertools.product(axes[one], axes[other]))
    *_, second, largest = sorted(sizes)
    assert largest * second <= len(found) <= 2 * largest * second
    assert found == pairwise(*axes), "each worker of a run has to find the same tests"


@given(st.integers(1, 20), st.lists(st.sampled_from([*MODES]), min_size=1, unique=True))
def test_every_pair_of_ranks_and_of_held_modes_is_there(num: int, modes: list[str]) -> None:
    names = [f"case{index}" for index in range(num)]
    found = rotated(names, modes)
    assert len(set(found)) == len(found)
    assert {(name, num_ranks) for name, _, num_ranks in found} >= {(name, 1) for name in names}
    assert {(mode, num_ranks) for _, mode, num_ranks in found} == {(mode, n) for mode in modes for n in (1, 2)}
    held = {(name, mode) for name, mode, num_ranks in found if num_ranks == 2}
    assert held >= {(name, mode) for name in names for mode in modes if mode in HELD}
