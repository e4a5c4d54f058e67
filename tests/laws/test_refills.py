"""Law 11: a loader that fills the memory of a batch anew for a later one trains as one that gives each its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_overlap import MODES

from ..support import reference
from ..support.pairs import pairwise, rotated
from ..support.ranks import Ranks
from ..support.reference import Delayed
from ..support.windows import train_windows, windows_of
from . import refills
from .refills import CASE, KINDS, NUM, Kind


def _expected(ranks: Ranks, pipeline: str) -> list[reference.Result]:
    staleness = 0 if pipeline == "auto" else MODES[pipeline].staleness
    if staleness:
        return ranks.run_once(reference.train_delayed, CASE, Delayed(staleness), num_steps=NUM)
    return ranks.run_once(reference.train, CASE, num_steps=NUM)


def _differences(actual: list[reference.Result], expected: list[reference.Result]) -> list[list[str]]:
    return [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(("kind", "pipeline", "num_ranks"), rotated(KINDS, [*MODES, "auto"]), ids=str)
def test_every_mode_equals_the_plain_loop(
    get_ranks: Callable[..., Ranks], kind: Kind, pipeline: str, num_ranks: int
) -> None:
    ranks = get_ranks(num_ranks)
    for sized in (True, False):
        actual = ranks.run(refills.train, kind, pipeline, sized)
        assert _differences(actual, _expected(ranks, pipeline)) == [[]] * num_ranks, sized


@pytest.mark.parametrize(("kind", "sized", "frozen"), pairwise(KINDS, [True, False], [True, False]), ids=str)
def test_accumulated_gradients(two_ranks: Ranks, kind: Kind, sized: bool, frozen: bool) -> None:
    options: dict[str, Any] = {"frozen_window": frozen}
    actual = two_ranks.run(refills.train, kind, "fused_sparse_dist", sized, options, accumulate_grad_batches=3)
    expected = two_ranks.run_once(train_windows, CASE, windows_of(NUM, 3), updates_in_backward=not frozen)
    assert _differences(actual, expected) == [[], []]


@pytest.mark.parametrize(("kind", "sized"), pairwise(KINDS, [True, False]), ids=str)
def test_validation(two_ranks: Ranks, kind: Kind, sized: bool) -> None:
    for found, expected in two_ranks.run(refills.validate, kind, "fused_sparse_dist", sized):
        assert len(found) == len(expected) == 10
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_without_copies_it_would_be_seen(get_ranks: Callable[..., Ranks], sized: bool) -> None:
    """Two batches are in flight while a third is made, and without a length a fourth: rings of more are not seen."""
    harmless = {Kind("ring", 3), Kind("ring", 4)} if sized else {Kind("ring", 4)}
    for kind in KINDS:
        assert get_ranks(1).run(refills.is_wrong_without_copies, kind, sized) == [kind not in harmless], kind
