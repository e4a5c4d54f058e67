"""Features are found by their names in every batch, wherever they stand in it (law 10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ..support.ranks import Ranks
from . import feature_names, supported_modules

KINDS = ["variable_batch", "feature_processors_row_wise", "managed_bags", "managed_sequences"]


@pytest.mark.parametrize("name", ["mixed_bags_and_sequences", *KINDS])
def test_trained_as_with_every_feature_in_its_place(ranks: Ranks, name: str) -> None:
    expected = ranks.run_once(supported_modules.train, name, 0)
    for mine, theirs in zip(ranks.run(feature_names.fit, name, "fused_sparse_dist"), expected, strict=True):
        assert mine.differences(theirs) == []


def test_a_validation_may_have_another_order(ranks: Ranks) -> None:
    for in_order, elsewhere in ranks.run(
        feature_names.validate_between, "mixed_bags_and_sequences", "fused_sparse_dist"
    ):
        assert len(in_order) == 3
        assert torch.equal(torch.stack(in_order), torch.stack(elsewhere))


def test_a_feature_that_is_not_there_is_named(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(feature_names.lacks_one, "mixed_bags_and_sequences")
    assert "lacks f1" in message
    assert "lengths of zero" in message
