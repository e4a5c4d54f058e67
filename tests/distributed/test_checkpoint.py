"""Checkpoints keep every shard and the fused optimizers' state; going on from one equals not stopping."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from . import checkpoints
from .cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, Case
from .ranks import Ranks


@pytest.mark.parametrize("case", [ROWWISE_ADAGRAD, MIXED, SEQUENCE], ids=lambda case: case.name)
def test_resume_equals_not_stopping(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    whole = ranks.run(checkpoints.train, case, "fused_sparse_dist", 3, str(tmp_path / "whole"))
    first = ranks.run(checkpoints.train, case, "fused_sparse_dist", 2, str(tmp_path / "first"))
    resumed = ranks.run(checkpoints.train, case, "fused_sparse_dist", 3, str(tmp_path / "second"), resume=first[0][1])
    for (expected, _), (actual, _) in zip(whole, resumed, strict=True):
        assert len(actual.losses) == checkpoints.EPOCH
        expected.losses = expected.losses[-checkpoints.EPOCH :]
        assert actual.differences(expected) == []


def test_a_folder_above_one_rank_and_a_plain_file_on_one(ranks: Ranks, tmp_path: Path) -> None:
    result = ranks.run(checkpoints.train, ROWWISE_ADAGRAD, "fused_sparse_dist", 1, str(tmp_path))
    path = Path(result[0][1])
    assert path.is_dir() == (ranks.world_size > 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]  # nothing unfinished left
    if ranks.world_size == 1:
        [weights] = ranks.run(checkpoints.load_unsharded, ROWWISE_ADAGRAD, str(path))
        for name, trained in result[0][0].tables.items():
            assert torch.equal(weights[f"ebc.embedding_bags.{name.split()[0]}.weight"], trained)
