"""Checkpoints keep every shard and the fused optimizers' state; going on from one equals not stopping."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import checkpoints
from .cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, Case
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


def test_a_remote_path_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(checkpoints.save_to, "memory://bucket/a.ckpt"):
        assert "a checkpoint of sharded tables is a local folder, got 'memory://bucket/a.ckpt'" in message


def test_another_sharding_plan(two_ranks: Ranks, tmp_path: Path) -> None:
    """Tables go from one plan to another; row-wise state of column shards does not, which is said."""
    for message in two_ranks.run(
        checkpoints.saved_then_loaded_under, TABLE_WISE, "table_wise", "column_wise", str(tmp_path / "a")
    ):
        assert message == "loaded"
    for message in two_ranks.run(
        checkpoints.saved_then_loaded_under, ROWWISE_ADAGRAD, "table_wise", "column_wise", str(tmp_path / "b")
    ):
        assert "under a sharding plan that gives the fused optimizer's state other shapes" in message


def test_a_folder_becomes_a_file_for_the_unsharded_module(two_ranks: Ranks, tmp_path: Path) -> None:
    """By Lightning's own command."""
    two_ranks.run(checkpoints.save_to, str(tmp_path / "a.ckpt"))
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(tmp_path / "a.ckpt")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    weights = checkpoints.load_unsharded(TABLE_WISE, str(tmp_path / "a.ckpt.consolidated"))
    assert weights["ebc.embedding_bags.t1.weight"].shape == (120, 8)


def test_overwriting_keeps_one_whole_folder(two_ranks: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        assert two_ranks.run(checkpoints.save_to, str(tmp_path / "last.ckpt")) == ["saved", "saved"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "fused_sparse_dist"])
def test_resume_in_the_middle_of_an_epoch(two_ranks: Ranks, pipeline: str, sized: bool, tmp_path: Path) -> None:
    """Looked-ahead batches are not consumed: a stateful loader goes on behind the trained one."""
    for save_at in (3, 5):
        folder = str(tmp_path / str(save_at))
        whole = two_ranks.run(checkpoints.train_from, pipeline, sized, save_at, folder, None)
        resumed = two_ranks.run(
            checkpoints.train_from, pipeline, sized, save_at, folder + "_", f"{folder}/step={save_at}.ckpt"
        )
        for (expected, _), (actual, seen) in zip(whole, resumed, strict=True):
            assert seen == [*range(save_at, 8), *range(8)]
            expected.losses = expected.losses[save_at:]
            assert actual.differences(expected) == []
