"""Law 11: a loader that fills the memory of a batch anew for a later one trains as one that gives each its own."""

from collections.abc import Callable

import pytest
import torch

from lightning_overlap import MODES

from ..support.pairs import in_turn, rotated
from ..support.ranks import Ranks
from ..support.reference import differences, on_ranks
from ..support.windows import train_windows, windows_of
from . import refills
from .refills import CASE, KINDS, NUM, Kind


@pytest.mark.parametrize(("kind", "pipeline", "num_ranks"), rotated(KINDS, [*MODES, "auto"]), ids=str)
def test_every_mode_equals_the_plain_loop(
    get_ranks: Callable[..., Ranks], kind: Kind, pipeline: str, num_ranks: int
) -> None:
    ranks = get_ranks(num_ranks)
    expected = on_ranks(ranks, CASE, 0 if pipeline == "auto" else MODES[pipeline].staleness, num_steps=NUM)
    for sized in (True, False):
        actual = ranks.run(refills.train, kind, pipeline, sized)
        assert differences(actual, expected) == [[]] * num_ranks, sized


@pytest.mark.parametrize(("num_buffers", "sized"), [(1, True), (2, False)], ids=["sized", "unsized"])
@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_batches_that_a_hook_copies(two_ranks: Ranks, pipeline: str, num_buffers: int, sized: bool) -> None:
    """As many buffers as Lightning's own loop needs: batches that wait for the ranks' answers are not overwritten."""
    actual = two_ranks.run(refills.train, Kind("ring", num_buffers), pipeline, sized, data=refills.Copied)
    assert differences(actual, on_ranks(two_ranks, CASE, num_steps=NUM)) == [[], []]


@pytest.mark.parametrize(("kind", "sized"), in_turn(KINDS, [True, False]), ids=str)
def test_accumulated_gradients(two_ranks: Ranks, kind: Kind, sized: bool) -> None:
    actual = two_ranks.run(refills.train, kind, "fused_sparse_dist", sized, accumulate_grad_batches=3)
    expected = two_ranks.run_once(train_windows, CASE, windows_of(NUM, 3))
    assert differences(actual, expected) == [[], []]


@pytest.mark.parametrize(("kind", "sized"), in_turn(KINDS, [True, False]), ids=str)
def test_validation(two_ranks: Ranks, kind: Kind, sized: bool) -> None:
    for found, expected in two_ranks.run(refills.validate, kind, "fused_sparse_dist", sized):
        assert len(found) == len(expected) == 10
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
