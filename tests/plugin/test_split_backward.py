"""`split_backward` under Lightning: every fit equals `base` bit for bit, split or whole, and says which."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..support import reference
from ..support.ranks import RankError, Ranks
from . import split_backwards

SPLIT_NORMS = "weight gradients of bottom, top.0, top.3, top.6, top.9 come after the backward"
SPLIT = "split backward: weight gradients of bottom, top.0, top.3, top.5 come after the backward"
ATTENTION = "MultiheadAttention uses in_proj_weight, in_proj_bias itself; only weights of Linear, Conv1d, Conv2d and"


WHOLE = "the backward runs whole: "
CLIPPED_BY_VALUE = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
FITS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any], str]] = {
    "split": ("", {}, False, {}, SPLIT),
    "hooks": ("", {}, True, {}, SPLIT),
    "small_buckets": ("", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, True, {}, SPLIT),
    "accumulated_and_clipped": ("", {}, True, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, SPLIT),
    "kept": ("kept_gradients", {"gradient_as_bucket_view": True}, True, {"accumulate_grad_batches": 2}, SPLIT),
    "autocast": ("", {}, False, {"precision": "bf16-mixed"}, SPLIT),
    "hook_of_a_weight": ("post_hook", {}, False, CLIPPED_BY_VALUE, SPLIT),
    "tied": ("tied", {}, False, {}, "top.3: whole, its weight is used outside of its forward"),
    "attention": ("attention", {}, False, {}, f"{SPLIT}\n  top.4.attention: whole, {ATTENTION}"),
    "compiled": ("compiled", {}, False, {}, "top.3._orig_mod: whole, it is compiled"),
    "used_between_steps": ("used_between_steps", {}, False, {}, SPLIT),
    "own_all_reduce": ("own_all_reduce", {}, True, {}, SPLIT),
    "own_gradients": ("own_gradients", {}, False, {}, "top.3, top.5: whole, its gradient is computed within the step"),
    "lbfgs": ("lbfgs", {}, False, {}, f"{WHOLE}LBFGS runs several backwards in a step"),
    "combined_lbfgs": ("combined_lbfgs", {}, False, {}, f"{WHOLE}LBFGS runs several backwards in a step"),
    "manual": ("manual", {}, False, {}, f"{WHOLE}with manual optimization"),
    "sparse_gradients": ("sparse", {}, False, {}, f"{WHOLE}an embedding of torch.nn has sparse gradients"),
    "static_graph": ("", {"static_graph": True}, False, {}, f"{WHOLE}static_graph=True"),
    "find_unused_parameters": ("", {"find_unused_parameters": True}, False, {}, f"{WHOLE}find_unused_parameters=True"),
    "one_rank": ("", {"bucket_cap_mb": 0.001}, False, {}, f"{WHOLE}one rank on a CPU waits for nobody"),
    # DistributedDataParallel's buckets are those of a whole backward: the sums of three ranks round alike.
    "three_ranks": ("", {"bucket_cap_mb": 0.001}, False, {}, SPLIT),
    # The first backward that sends gradients gives DistributedDataParallel the order of its buckets: it runs whole.
    "three_ranks_norms": ("norms", {"bucket_cap_mb": 0.002}, False, {"accumulate_grad_batches": 2}, SPLIT_NORMS),
}
NUM_RANKS = {"one_rank": 1, "three_ranks": 3, "three_ranks_norms": 3}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_equals_base(get_ranks: Callable[..., Ranks], name: str) -> None:
    """Also what hooks see between the backward and the step: whole gradients, updated tables."""
    (kind, options, hooks, kwargs, words), ranks = FITS[name], get_ranks(NUM_RANKS.get(name, 2))
    expected = ranks.run(split_backwards.fit, kind, "base", options, hooks, **kwargs)
    actual = ranks.run(split_backwards.fit, kind, "split_backward", options, hooks, **kwargs)
    for (mine, seen, told), (theirs, seen_in_base, _) in zip(actual, expected, strict=True):
        assert reference.differences([mine], [theirs]) == [[]]
        assert len(seen) == len(seen_in_base)
        assert all(torch.equal(a, b) for a, b in zip(seen, seen_in_base, strict=True))
        assert words in told or told == ""
    assert words in actual[0][2]


def test_between_hosts_a_part_is_looked_up_before_the_next_part_is_updated(get_ranks: Callable[..., Ranks]) -> None:
    """Gradients are sent in the same order, so those of the second part travel while the first part is looked up."""
    ranks = get_ranks(2, num_nodes=2)
    expected, actual = (ranks.run(split_backwards.fit_noting_parts, mode) for mode in ("base", "split_backward"))
    assert reference.differences([result for result, _ in actual], [result for result, _ in expected]) == [[], []]
    for _, done in actual:
        in_a_step = ["sent", "sent", "updated 0", "looked up 0", "updated 1", "looked up 1"]
        assert done[-len(in_a_step) * 3 - 4 : -4] == in_a_step * 3
        assert done[-4:] == [*in_a_step[:3], "updated 1"]  # no batch follows the last one


def test_the_dense_all_reduce_is_waited_for_after_the_backward(two_ranks: Ranks) -> None:
    """In every step; DistributedDataParallel would wait for it within the backward of the weights."""
    for late in two_ranks.run(split_backwards.fit_counting_late_buckets):
        assert len(late) == split_backwards.NUM_STEPS
        assert all(late)


def test_a_hook_that_raises_in_the_second_half_ends_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="a hook of the user's in the second half"):
        two_ranks.run(split_backwards.fit, "raises", "split_backward", {}, False)


@pytest.mark.parametrize(
    ("of_rank_1", "hooked", "message"),
    [
        ("fused_sparse_dist", None, "rank 0: 'split_backward', rank 1: 'fused_sparse_dist'"),
        ("split_backward", 1, "others cannot (rank 1: on_before_backward may compute gradients)"),
    ],
)
def test_ranks_that_differ_are_an_error_before_the_first_step(
    two_ranks: Ranks, of_rank_1: str, hooked: int | None, message: str
) -> None:
    for text in two_ranks.run(split_backwards.fit_of_ranks_that_differ, ("split_backward", of_rank_1), hooked):
        assert message in text
        assert text.endswith("after 0 steps")
