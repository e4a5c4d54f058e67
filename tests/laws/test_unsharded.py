"""Law 10: a sharded module computes what the unsharded one does, whatever the plan, the ranks and the mode."""

import itertools
from collections.abc import Callable

import pytest
import torch

from lightning_overlap import MODES

from ..support.ranks import Ranks
from . import unsharded
from .unsharded import KINDS, LEFT_OUT

_MODES = itertools.cycle(MODES)
CASES = {
    (num_ranks, name): [(name, place, next(_MODES)) for place in dict.fromkeys(kind.places[:num_ranks])]
    for name, kind in KINDS.items()
    for num_ranks in (1, 2, 3)
}
"""Modes in turn, not each with each: what a mode does to a kind is `test_supported_modules.py`'s."""


@pytest.mark.parametrize(("num_ranks", "name"), CASES, ids=lambda value: str(value))
def test_a_kind_computes_what_it_does_unsharded(get_ranks: Callable[..., Ranks], num_ranks: int, name: str) -> None:
    assert get_ranks(num_ranks).run(unsharded.check_all, CASES[num_ranks, name]) == [[]] * num_ranks


def test_columns_stand_in_the_order_of_the_configs_in_every_mode(two_ranks: Ranks) -> None:
    """TorchRec answers sharding type by sharding type, and rank by rank."""
    cases = [("bags", "copies_and_whole", pipeline) for pipeline in MODES]
    assert two_ranks.run(unsharded.check_all, cases) == [[], []]


@pytest.mark.parametrize("place", ["every_type", "copies_and_whole"])
def test_dropout_drops_what_it_drops_under_ddp(ranks: Ranks, place: str) -> None:
    """Sharding draws no number of a rank's generators, whichever tables the rank has."""
    expected = ranks.run_once(unsharded.losses_with_dropout, "whole", None)
    for pipeline in (name for name, mode in MODES.items() if mode.staleness == 0):
        found = ranks.run(unsharded.losses_with_dropout, place, pipeline)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_the_answer_of_sequences_is_a_dict_to_its_caller(two_ranks: Ranks, pipeline: str) -> None:
    found = two_ranks.run(unsharded.check, "sequences", "rows", pipeline, unsharded.ReadsAsADict)
    assert [problem for problem, _ in found] == ["", ""]


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync"])
def test_replicas_compute_what_they_do_unsharded(get_ranks: Callable[..., Ranks], pipeline: str) -> None:
    assert get_ranks(3).run(unsharded.check_replicas, pipeline) == [""] * 3


def test_a_gradient_of_rounding_alone_is_left_out_and_a_small_one_is_not(two_ranks: Ranks) -> None:
    for problem, said in two_ranks.run(unsharded.check, "bags", "whole", "fused_sparse_dist", unsharded.Rounds):
        assert problem == ""
        assert "left out: whether training changes shift (its gradient is zero, except for rounding)" in said
    args = ("bags", "whole", "fused_sparse_dist", unsharded.TrainsUnsharded)
    for problem, said in two_ranks.run(unsharded.check, *args):
        assert problem == "shift: changed by training unsharded, not sharded"
        assert "left out" not in said


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_has_no_unsharded_answer_is_left_out_by_name(two_ranks: Ranks, name: str) -> None:
    place, _ = LEFT_OUT[name].places
    for problem, said in two_ranks.run(unsharded.check, name, place, "fused_sparse_dist"):
        assert problem == ""
        assert "left out: tables (" in said


def test_what_torchrec_itself_answers_otherwise_is_seen(two_ranks: Ranks) -> None:
    for problem, _ in two_ranks.run(unsharded.check, "variable_batch_sequences", "rows", "base"):
        assert "'tables' in batch 0: ['f0'].values(): The values for attribute 'shape' do not match" in problem
        assert "tables.embeddings.t2.weight: changed by training unsharded, not sharded" in problem
