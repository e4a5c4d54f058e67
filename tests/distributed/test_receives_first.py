"""The backend whose all-to-alls post receives first: it gives what gloo gives."""

from __future__ import annotations

import pytest
import torch

from . import exchanges
from .ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((6,), None),
        ((4, 3), None),
        ((0,), None),
        ((5,), [[2, 3], [4, 1]]),
        ((5, 2), [[0, 5], [5, 0]]),
        ((3,), [[3, 0], [0, 3]]),
        ((2,), [[0, 2], [0, 2]]),
    ],
    ids=str,
)
def test_gives_what_gloo_gives(
    two_ranks: Ranks, shape: tuple[int, ...], splits: list[list[int]] | None, dtype: torch.dtype
) -> None:
    for gloos, ours in two_ranks.run(exchanges.of_gloo_and_ours, shape, dtype, splits):
        assert torch.equal(gloos, ours)


def test_receives_are_posted_before_sends(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanges.order_of_posts) == [["recv", "send"]] * 2


def test_other_collectives_are_gloos(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanges.others_work) == [[3.0, 0.0, [0, 1], 2.0]] * 2


def test_a_run_uses_it_for_tables_and_input_dist(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanges.groups_of_a_run) == [[True, True, False]] * 2


def test_everyone_who_waits_hears_of_a_failure() -> None:
    ranks = Ranks(2)  # of its own: the group is of no more use
    try:
        text, _ = ranks.run(exchanges.waits_in_vain)
    finally:
        ranks.close()
    assert text.startswith("['RuntimeError', 'RuntimeError']") or text.startswith("['DistBackendError'")
    assert text.endswith("True False")
