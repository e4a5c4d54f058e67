"""Ways to train that touch the order of lookup, backward and step: each equals `base`, bit for bit."""

from typing import Any

import pytest

from lightning_overlap import MODES

from ..support.cases import Model
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import caller_fits, update_rates

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and name != "base"]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("mixed", {"accumulate_grad_batches": 3}),
    ("mixed", {"gradient_clip_val": 0.01}),
    ("mixed", {"precision": "bf16-mixed"}),
    ("manual", {}),
    ("made_in_hook", {}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "other"),
    [(*way, other) for way, other in in_turn(WAYS, [name for name in EARLY if name != "fused_sparse_dist"])],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_exact_modes(two_ranks: Ranks, model: str, kwargs: dict[str, Any], other: str) -> None:
    for pipeline in ("fused_sparse_dist", other):
        for outcome in caller_fits.same_as_in(two_ranks, model, pipeline, "base", **kwargs):
            assert outcome.early > 0
            assert outcome.messages == []


@pytest.mark.parametrize(("model", "num_ranks"), [("two_closures", 2), ("steps_over_none", 1)])
def test_two_backwards_or_none_in_a_step(get_ranks: Any, model: str, num_ranks: int) -> None:
    """What is looked up between two backwards is stale: it is dropped, and the plain forward runs."""
    for pipeline in EARLY:
        caller_fits.same_as_in(get_ranks(num_ranks), model, pipeline, "base")


@pytest.mark.parametrize("pipeline", MODES)
@pytest.mark.parametrize("model_class", [Model, update_rates.Scheduled])
def test_fused_optimizers_count_updates_and_nothing_else(
    two_ranks: Ranks, pipeline: str, model_class: type[Model]
) -> None:
    """Adam corrects its bias by this count; evaluations, dropped and repeated lookups must not show in it."""
    kwargs = {"val_check_interval": 3, "limit_val_batches": 2, "max_epochs": 2, "max_steps": 18}
    for counts in two_ranks.run(update_rates.lookup_counts, pipeline, model_class, **kwargs):
        assert counts == [[step, step] for step in range(1, 19)]
