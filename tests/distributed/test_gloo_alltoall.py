"""The backend whose all-to-alls post receives first: it gives what gloo gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_overlap import MODES
from lightning_overlap.distributed import gloo_alltoall

from ..support import exchanges, reference
from ..support.cases import COLUMN_WISE, EMPTY_FEATURE, MIXED, SEQUENCE, TWO_COLLECTIONS, Case
from ..support.fits import fit
from ..support.pairs import in_turn
from ..support.ranks import Ranks


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


def test_no_collective_is_left_to_the_base_class(two_ranks: Ranks) -> None:
    """Also not by the names that torch 2.13 calls them by; the base class holds Python's lock meanwhile."""
    for asked in two_ranks.run(exchanges.asked_of_gloo):
        assert [name.strip("_").replace("_", "") for name in asked] in (
            ["allgatherbase", "reducescatterbase"],
            ["allgathersingle", "reducescattersingle"],
        )


def test_newer_names_go_to_a_gloo_that_has_them() -> None:
    class Gloo:  # of a later torch
        def all_gather_single(self, *args: Any) -> Any:
            return "all_gather_single", args

        def gather_single(self, *args: Any) -> Any:
            return "gather_single", args

        def _reduce_scatter_base(self, *args: Any) -> Any:
            return "_reduce_scatter_base", args

    class Group:
        _gloo = Gloo()

    gloo_alltoall._hand_on(Group, Gloo)
    group: Any = Group()
    assert group.all_gather_single(1, 2) == ("all_gather_single", (1, 2))
    assert group.gather_single(1) == ("gather_single", (1,))
    assert group.reduce_scatter_single(3) == ("_reduce_scatter_base", (3,))
    assert not hasattr(group, "broadcast")  # which this gloo lacks: the base class answers


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_over_several_hosts_uses_it_for_tables_and_input_dist(num_nodes: int, get_ranks: Any) -> None:
    between_hosts = num_nodes > 1
    ranks = get_ranks(2, num_nodes=num_nodes)
    assert ranks.run(exchanges.groups_of_a_run) == [[between_hosts, between_hosts, False]] * 2


@pytest.mark.parametrize(
    ("case", "pipeline"),
    in_turn(
        [MIXED, SEQUENCE, TWO_COLLECTIONS, COLUMN_WISE, EMPTY_FEATURE],
        [name for name, mode in MODES.items() if mode.staleness == 0],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_two_hosts_train_as_the_plain_loop(case: Case, pipeline: str, get_ranks: Any) -> None:
    ranks = get_ranks(2, num_nodes=2)
    actual = ranks.run(fit, case, pipeline)
    assert reference.differences(actual, reference.on_ranks(ranks, case)) == [[], []]


def test_an_exchange_is_over_without_a_wait(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanges.is_over_without_a_wait) == [(True, [1.0, 2.0])] * 2


@pytest.mark.slow
def test_everyone_who_waits_hears_of_a_failure() -> None:
    ranks = Ranks(2)  # of its own: the group is of no more use
    try:
        text, _ = ranks.run(exchanges.waits_in_vain)
    finally:
        ranks.close()
    assert text.startswith("['RuntimeError', 'RuntimeError']") or text.startswith("['DistBackendError'")
    assert text.endswith("True")
