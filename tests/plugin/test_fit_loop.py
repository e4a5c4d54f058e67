"""The loop override keeps Lightning's meaning of everything: hook by hook the same as with DDPStrategy."""

from collections.abc import Callable
from typing import Any

import pytest

from ..support import traces
from ..support.ranks import Ranks

CONFIGS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "epochs": ("sized", None, {"max_epochs": 3}),
    "unsized": ("unsized", None, {}),
    "persistent_workers": ("workers", None, {"max_epochs": 3}),
    "none_batches": ("none_batches", None, {}),
    "none_at_the_end": ("last_are_none", None, {"val_check_interval": 3}),
    "none_unsized": ("unsized_with_none", None, {"max_epochs": 3}),
    "none_accumulate": ("none_batches", None, {"accumulate_grad_batches": 3}),
    "limit_int": ("sized", None, {"limit_train_batches": 5}),
    "limit_float": ("sized", None, {"limit_train_batches": 0.5}),
    "limit_1": ("sized", None, {"limit_train_batches": 1, "max_epochs": 3}),
    "max_steps": ("sized", None, {"max_steps": 13, "max_epochs": -1}),
    "val_check_interval": ("sized", None, {"val_check_interval": 4}),
    "val_check_across_epochs": ("sized", None, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "accumulate_max_steps": ("sized", None, {"accumulate_grad_batches": 2, "max_steps": 3}),
    "no_validation": ("sized", None, {"limit_val_batches": 0}),
    "batch_start_returns_minus_one": ("sized", "minus_one", {}),
    "should_stop": ("sized", "should_stop", {}),
}
SMOKE = ("epochs", "unsized", "val_check_interval", "max_steps", "none_batches")


@pytest.mark.parametrize("config", [pytest.param(c, marks=[pytest.mark.smoke] * (c in SMOKE)) for c in CONFIGS])
def test_same_hooks_as_ddp(get_ranks: Callable[..., Ranks], config: str) -> None:
    modes = (None, "fused_sparse_dist", ("base", "semi_sync")[list(CONFIGS).index(config) % 2])
    for ranks in (get_ranks(1), get_ranks(2)):
        expected, early, by_turns = (ranks.run_once(traces.trace, mode, *CONFIGS[config]) for mode in modes)
        for (theirs, _), (mine, _), (others, _) in zip(expected, early, by_turns, strict=True):
            assert mine == theirs
            assert others == theirs


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync"])
def test_batches_are_transferred_once_in_order_and_none_too_many(two_ranks: Ranks, pipeline: str) -> None:
    sized = {"epochs": [9, 9, 9], "limit_int": [5, 5], "max_steps": [9, 4], "accumulate_max_steps": [6]}
    for config, nums in {**sized, "unsized": [9, 9]}.items():
        for _, transfers in two_ranks.run_once(traces.trace, pipeline, *CONFIGS[config]):
            assert transfers == [index for num in nums for index in range(num)], config


def test_a_users_loop_is_not_changed(get_ranks: Callable[..., Ranks]) -> None:
    """The fit calls its methods and keeps its state; its class stays, and the trainer has it back at the end."""
    [kept] = get_ranks(1).run(traces.fit_with_own_loop)
    assert kept == [True] * (traces.NUM_TRAIN + 1)


def test_a_step_without_loss_on_one_rank(get_ranks: Callable[..., Ranks]) -> None:
    """training_step returns None in automatic optimization (one rank only, as in Lightning): no step, no hang."""
    modes = (None, "fused_sparse_dist", "semi_sync")
    [(ddp, _)], [(early, _)], [(stale, _)] = (get_ranks(1).run(traces.trace, m, "sized", "no_loss", {}) for m in modes)
    assert stale == early == ddp


@pytest.mark.parametrize("none_at", [0, 2])
@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_a_step_that_returns_none_before_its_lookups(
    get_ranks: Callable[..., Ranks], pipeline: str, none_at: int
) -> None:
    """The warning is about the call that is missing, not about the input; after the lookups nothing is missing."""
    [early], [late] = (get_ranks(1).run(traces.warnings_of_skipped_step, pipeline, none_at, b) for b in (True, False))
    assert late == []
    if pipeline == "base":
        assert early == []
        return
    [warning] = early
    assert "it was not called for " + ("the first batch" if none_at == 0 else "a batch that has its input") in warning
    assert "call it first, then return (None, say, to skip the batch)" in warning
    assert "part of the batch" not in warning
