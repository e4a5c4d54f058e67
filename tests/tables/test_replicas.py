"""Replicated tables: trained as the sharded ones are, and alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ..support.ranks import Ranks
from ..support.reference import Result
from . import replicas


def whole(results: list[Result], part: str) -> dict[str, Tensor]:
    """Return what the ranks hold, tables whole; what several hold has to be the same."""
    found: dict[str, Tensor] = {}
    for result in results:
        for key, value in getattr(result, part).items():
            name = key.partition(" [")[0]
            assert torch.equal(found.setdefault(name, value), value), f"ranks differ in {name}"
    return found


def assert_close(ours: list[Result], theirs: list[Result]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.losses, other.losses, rtol=1e-4, atol=1e-5)
    for part in ("tables", "fused_state", "dense"):
        torch.testing.assert_close(whole(ours, part), whole(theirs, part), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", replicas.OPTIMIZERS)
def test_trained_as_the_sharded_table(two_ranks: Ranks, optimizer: str) -> None:
    case = replicas.case_of(optimizer)
    ours = two_ranks.run(replicas.fit, case, "fused_sparse_dist")
    assert_close(ours, two_ranks.run(replicas.reference, case))
    assert set(whole(ours, "tables")) == {table.name for table in case.tables}
