"""Learning rates that move: the fused update of a batch takes the rate of that batch's step, in every mode."""

from __future__ import annotations

import pytest

from lightning_overlap import MODES, Stage

from . import optimizers, reference
from .cases import TABLE_WISE, Case
from .optimizers import CASES, NUM_STEPS, factor
from .ranks import Ranks

EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]
STALE = [name for name, mode in MODES.items() if mode.staleness == 1]


def _differences(ranks: Ranks, case: Case, pipeline: str) -> list[list[str]]:
    loop = reference.train_delayed if pipeline in STALE else reference.train
    expected = ranks.run(loop, case, num_steps=NUM_STEPS, factor=factor)
    actual = ranks.run(optimizers.fit, case, pipeline)
    assert all(len(result.losses) == NUM_STEPS for result in actual)
    return [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("pipeline", MODES)
def test_the_update_of_a_batch_takes_the_rate_of_its_step(ranks: Ranks, case: Case, pipeline: str) -> None:
    """Equal to a plain loop that sets the rates before each batch; in a stale mode to the delayed loop."""
    assert _differences(ranks, case, pipeline) == [[]] * ranks.world_size


@pytest.mark.parametrize("pipeline", [name for name in MODES if name != "base"])
def test_a_rate_that_is_one_step_old_is_seen(ranks: Ranks, pipeline: str) -> None:
    """Guards the test above."""
    expected = ranks.run(optimizers.fit, TABLE_WISE, pipeline)
    for old, new in zip(
        ranks.run(optimizers.fit_at_the_rate_of_the_lookup, TABLE_WISE, pipeline), expected, strict=True
    ):
        early = MODES[pipeline].row(Stage.EMBEDDING_LOOKUP).offset > 0
        assert any(text.startswith("losses from step") for text in old.differences(new)) == early
