"""Pairings leave out products, and no pair that a test of a mode or of a number of ranks rests on."""

import itertools

import pytest

from lightning_overlap import MODES

from .pairs import HELD, pairwise, rotated

EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]


@pytest.mark.parametrize("modes", [list(MODES), EXACT, ["base"]], ids=["all", "exact", "one"])
@pytest.mark.parametrize("num", [1, 2, 5, len(MODES), 19])
def test_every_pair_of_ranks_and_of_held_modes_is_there(num: int, modes: list[str]) -> None:
    names = [f"case{index}" for index in range(num)]
    found = rotated(names, modes)
    assert len(set(found)) == len(found)
    assert {(name, num_ranks) for name, _, num_ranks in found} == {(name, n) for name in names for n in (1, 2)}
    assert {(mode, num_ranks) for _, mode, num_ranks in found} == {(mode, n) for mode in modes for n in (1, 2)}
    held = {(name, mode) for name, mode, num_ranks in found if num_ranks == 2}
    assert held >= {(name, mode) for name in names for mode in modes if mode in HELD}


def test_every_mode_meets_several_cases() -> None:
    found = rotated([f"case{index}" for index in range(10)])
    for mode in MODES:
        assert len({name for name, other, _ in found if other == mode}) >= 2


def test_a_list_of_cases_gives_one_list_of_pairings() -> None:
    assert rotated("abc") == rotated("abc")
    assert [(name, mode) for name, mode, num_ranks in rotated("ab", ["base", "semi_sync"]) if num_ranks == 2] == [
        ("a", "semi_sync"),
        ("a", "base"),
        ("b", "semi_sync"),
        ("b", "base"),
    ]


@pytest.mark.parametrize("sizes", [(3, 4, 2, 2), (2, 5, 2, 2), (7, 2, 2), (5, 8, 3), (3, 3, 2, 2), (4, 1)], ids=str)
def test_any_two_values_of_two_axes_meet(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{place}" for place in range(size)] for axis, size in zip("abcd", sizes, strict=False)]
    found = pairwise(*axes)
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(values[one], values[other]) for values in found} == set(itertools.product(axes[one], axes[other]))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(found) <= largest * second + 2
    assert found == pairwise(*axes)
