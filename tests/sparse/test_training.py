"""Ways to train that touch the order of lookup, backward and step: each equals `base`, bit for bit."""

from typing import Any

import pytest
import torch

from lightning_overlap import MODES

from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import variants
from .variants import NUM_STEPS

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and name != "base"]


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"accumulate_grad_batches": 3}),
    ("plain", {"gradient_clip_val": 0.01}),
    ("plain", {"precision": "bf16-mixed"}),
    ("manual", {}),
    ("made_in_hook", {}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "other"),
    [(*way, other) for way, other in in_turn(WAYS, [name for name in EARLY if name != "fused_sparse_dist"])],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_exact_modes(two_ranks: Ranks, model: str, kwargs: dict[str, Any], other: str) -> None:
    expected = two_ranks.run(variants.run, model, "base", **kwargs)
    for pipeline in ("fused_sparse_dist", other):
        for mine, theirs in zip(two_ranks.run(variants.run, model, pipeline, **kwargs), expected, strict=True):
            assert torch.equal(mine.losses, theirs.losses), pipeline
            assert mine.early > 0
            assert mine.messages == []


def test_validation_in_the_middle_changes_nothing(two_ranks: Ranks) -> None:
    for pipeline in ("fused_sparse_dist", "semi_sync_deferred"):
        without = two_ranks.run(variants.run, "plain", pipeline)
        with_it = two_ranks.run(variants.run, "plain", pipeline, limit_val_batches=2, val_check_interval=3)
        for mine, theirs in zip(with_it, without, strict=True):
            assert torch.equal(mine.losses, theirs.losses), pipeline
            assert mine.early == theirs.early


@pytest.mark.parametrize(("model", "num_ranks"), [("two_closures", 2), ("steps_over_none", 1)])
def test_two_backwards_or_none_in_a_step(get_ranks: Any, model: str, num_ranks: int) -> None:
    """What is looked up between two backwards is stale: it is dropped, and the plain forward runs."""
    ranks = get_ranks(num_ranks)
    expected = ranks.run(variants.run, model, "base")
    for pipeline in EARLY:
        for mine, theirs in zip(ranks.run(variants.run, model, pipeline), expected, strict=True):
            assert torch.equal(mine.losses, theirs.losses), pipeline


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_a_users_error_reaches_the_user_and_the_next_fit_works(two_ranks: Ranks, pipeline: str) -> None:
    for losses in two_ranks.run(variants.fail_then_fit, pipeline):
        assert len(losses) == NUM_STEPS
        assert losses.isfinite().all()


@pytest.mark.parametrize("pipeline", MODES)
def test_fused_optimizers_count_updates_and_nothing_else(two_ranks: Ranks, pipeline: str) -> None:
    """Adam corrects its bias by this count; evaluations and dropped lookups must not show in it."""
    kwargs = {"val_check_interval": 3, "limit_val_batches": 2, "max_epochs": 2, "max_steps": 20}
    for counts in two_ranks.run(variants.lookup_counts, pipeline, **kwargs):
        assert counts == [[step, step] for step in range(1, 21)]
