"""Pairs in the place of products: which of many cases meets which mode on how many ranks."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning_overlap import MODES

HELD = ("fused_sparse_dist", "semi_sync")
"""Modes that each case meets on two ranks: the default one, and the plainest one with a staleness."""


class Pairing(NamedTuple):
    name: Any
    pipeline: str
    num_ranks: int


def rotated(names: Iterable[Any], modes: Iterable[str] = MODES) -> list[Pairing]:
    """Give each case the modes of `HELD` on two ranks, and others in rotation: by its place in the list, not by chance.

    So each case runs on both numbers of ranks, and each mode runs on both, with several cases.
    """
    names, modes = list(names), list(modes)
    held = [mode for mode in modes if mode in HELD]
    others = [mode for mode in modes if mode not in HELD]
    return [
        Pairing(name, mode, num_ranks)
        for index, name in enumerate(names)
        for num_ranks, found in ((1, _turn(modes, index, len(names))), (2, [*held, *_turn(others, index, len(names))]))
        for mode in found
    ]


def _turn(modes: list[str], index: int, num_names: int) -> list[str]:
    num = -(-len(modes) // num_names)
    return [modes[place % len(modes)] for place in range(index * num, (index + 1) * num)]


def in_turn(names: Iterable[Any], modes: Iterable[Any]) -> list[tuple[Any, Any]]:
    return list(zip(names, itertools.cycle(modes), strict=False))


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, one value of each axis, in which any two values of two axes meet at least once."""
    values = [list(axis) for axis in axes]
    product = list(itertools.product(*(range(len(axis)) for axis in values)))
    missing = {pair for places in product for pair in _pairs(places)}
    chosen = []
    while missing:
        best = max(product, key=lambda places: len(missing.intersection(_pairs(places))))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return [tuple(axis[place] for axis, place in zip(values, places, strict=True)) for places in sorted(chosen)]


def _pairs(places: tuple[int, ...]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(places), 2))
