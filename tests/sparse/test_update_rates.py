"""Learning rates that move: the fused update of a batch takes the rate of that batch's step, in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_overlap import MODES, Stage

from ..support import reference
from ..support.cases import TABLE_WISE, Case
from ..support.pairs import in_turn, rotated
from ..support.ranks import Ranks
from . import update_rates
from .update_rates import CASES, NUM_STEPS, factor

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and mode.has_sparse_stages]
BY_NAME = {case.name: case for case in CASES}


def _differences(ranks: Ranks, case: Case, pipeline: str, fit: Callable[..., Any]) -> list[list[str]]:
    expected = reference.on_ranks(ranks, case, MODES[pipeline].staleness, num_steps=NUM_STEPS, factor=factor)
    actual = ranks.run(fit, case, pipeline)
    assert all(len(result.losses) == NUM_STEPS for result in actual)
    return reference.differences(actual, expected)


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(BY_NAME))
def test_the_update_of_a_batch_takes_the_rate_of_its_step(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """Equal to a plain loop that sets the rates before each batch; in a stale mode to the delayed loop."""
    assert _differences(get_ranks(num_ranks), BY_NAME[name], pipeline, update_rates.fit) == [[]] * num_ranks


def test_beside_a_table_of_a_dense_kernel(ranks: Ranks) -> None:
    """Such a part belongs to the dense optimizer altogether; its fused table still goes by its own step's rate."""
    expected = ranks.run(update_rates.fit_beside_a_dense_kernel, "base")
    for pipeline in ("sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"):
        actual = ranks.run(update_rates.fit_beside_a_dense_kernel, pipeline)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)), pipeline


@pytest.mark.parametrize(
    ("pipeline", "num_ranks"),
    [("fused_sparse_dist", 1), ("semi_sync", 1), *((name, 2) for name in MODES if name != "base")],
)
def test_a_rate_that_is_one_step_old_is_seen(get_ranks: Callable[..., Ranks], pipeline: str, num_ranks: int) -> None:
    """Guards the test above."""
    early = MODES[pipeline].step_of(Stage.EMBEDDING_LOOKUP).offset > 0
    for found in _differences(get_ranks(num_ranks), TABLE_WISE, pipeline, update_rates.fit_at_the_rate_of_the_lookup):
        assert any(text.startswith("losses from step") for text in found) == early


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("Scheduled", {"accumulate_grad_batches": 3}),
    ("Scheduled", {"gradient_clip_val": 0.01}),
    ("Scheduled", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ("Scheduled", {"precision": "bf16-mixed"}),
    ("Scheduled", {"detect_anomaly": True}),
    ("Scheduled", {"limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}),
    ("Scheduled", {"max_steps": 9}),
    ("Manual", {}),
    ("TwoBackwards", {}),
    ("TwoDense", {}),
    ("SeveralGroups", {}),
    ("TwoClosures", {}),
    ("LBFGS", {}),
    ("Unscheduled", {}),
    ("Plateau", {"max_epochs": 3}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "other"),
    [(*way, other) for way, other in in_turn(WAYS, [name for name in EARLY if name != "fused_sparse_dist"])],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_early_lookups_change_nothing(two_ranks: Ranks, model: str, kwargs: dict[str, Any], other: str) -> None:
    """However the module trains: losses, tables and rates of `base`, which the first test ties to a plain loop."""
    expected = two_ranks.run(update_rates.run, model, "base", **kwargs)
    assert all((len({tuple(rates) for rates in mine.rates}) > 1) == (model != "Unscheduled") for mine in expected)
    for pipeline in ("fused_sparse_dist", other):
        for mine, theirs in zip(two_ranks.run(update_rates.run, model, pipeline, **kwargs), expected, strict=True):
            assert torch.equal(mine.losses, theirs.losses), pipeline
            assert all(torch.equal(mine.tables[name], table) for name, table in theirs.tables.items()), pipeline
            assert mine.rates == theirs.rates


@pytest.mark.parametrize("pipeline", MODES)
def test_a_repeated_lookup_is_not_counted(two_ranks: Ranks, pipeline: str) -> None:
    for counts in two_ranks.run(update_rates.counts_of_updates, pipeline):
        assert counts == [NUM_STEPS] * 2
