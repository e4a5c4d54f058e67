"""Learning rates that move: the fused update of a batch takes the rate of that batch's step, in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES, STREAMS

from ..support import reference
from ..support.pairs import in_turn, rotated
from ..support.ranks import Ranks
from . import update_rates
from .caller_fits import same_as_in
from .update_rates import CASES, NUM_STEPS, factor

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and mode.has_sparse_stages]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(BY_NAME))
def test_the_update_of_a_batch_takes_the_rate_of_its_step(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """Equal to a plain loop that sets the rates before each batch; in a stale mode to the delayed loop."""
    case, ranks, staleness = BY_NAME[name], get_ranks(num_ranks), MODES[pipeline].staleness
    actual = ranks.run(update_rates.fit, case, pipeline)
    expected = reference.on_ranks(ranks, case, staleness, num_steps=NUM_STEPS, factor=factor)
    assert reference.differences(actual, expected) == [[]] * num_ranks


RATES = st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.0, 2.5]), min_size=NUM_STEPS, max_size=NUM_STEPS)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rates=RATES, name=st.sampled_from([*BY_NAME]), pipeline=st.sampled_from([*MODES]), data=st.data())
def test_any_rates_in_any_mode(two_ranks: Ranks, name: str, pipeline: str, rates: list[float], data: Any) -> None:
    """Rates that stay for some steps, go to zero, and come back before or after the update of a batch."""
    case, staleness = BY_NAME[name], MODES[pipeline].staleness
    stream, defers = data.draw(st.sampled_from([*STREAMS])), bool(staleness) and data.draw(st.booleans())
    options = {"defer_update": True} if defers and not MODES[pipeline].defers_update else {}
    actual = two_ranks.run(update_rates.fit, case, pipeline, stream=stream, factors=rates, mode_options=options)
    delays = [reference.Delayed(staleness)] if staleness else []
    train = reference.train_delayed if staleness else reference.train
    expected = two_ranks.run(train, case, *delays, num_steps=NUM_STEPS, factor=update_rates.Rates(rates))
    assert reference.differences(actual, expected) == [[]] * 2


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("scheduled", {"accumulate_grad_batches": 3}),
    ("scheduled", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ("scheduled", {"detect_anomaly": True}),
    ("scheduled", {"limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}),
    ("scheduled", {"max_steps": 7}),
    ("schedules_by_hand", {}),
    ("two_dense", {}),
    ("several_groups", {}),
    ("unscheduled", {}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "other"),
    [(*way, other) for way, other in in_turn(WAYS, [name for name in EARLY if name != "fused_sparse_dist"])],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_early_lookups_change_nothing(two_ranks: Ranks, model: str, kwargs: dict[str, Any], other: str) -> None:
    """However the module trains, it equals `base`, which the first test ties to a plain loop."""
    for pipeline in ("fused_sparse_dist", other):
        same_as_in(two_ranks, model, pipeline, "base", **kwargs)


def test_a_fused_table_beside_one_of_a_dense_kernel(two_ranks: Ranks) -> None:
    """Such a part belongs to the dense optimizer altogether; its fused table still goes by its own step's rate."""
    expected = two_ranks.run(update_rates.fit_beside_a_dense_kernel, "base")
    for pipeline in EARLY:
        actual = two_ranks.run(update_rates.fit_beside_a_dense_kernel, pipeline)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)), pipeline
