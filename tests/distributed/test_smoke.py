"""A short walk through everything, for every supported version of Lightning and TorchRec: `make smoke`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_overlap import MODES

from . import checkpoints, features, reference, traces
from .cases import MIXED, ROWWISE_ADAGRAD, Case
from .features import Setting
from .fits import fit
from .ranks import Ranks
from .test_loop import CONFIGS

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("case", [MIXED, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_laws(two_ranks: Ranks, case: Case) -> None:
    exact, delayed = two_ranks.run(reference.train, case), two_ranks.run(reference.train_delayed, case)
    for pipeline, schedule in MODES.items():
        if schedule.staleness <= 1:
            expected = delayed if schedule.staleness else exact
            for mine, theirs in zip(two_ranks.run(fit, case, pipeline), expected, strict=True):
                assert mine.differences(theirs) == [], pipeline


@pytest.mark.parametrize("config", ["epochs", "unsized", "val_check_interval", "max_steps", "none_batches"])
def test_hooks(two_ranks: Ranks, config: str) -> None:
    expected = two_ranks.run(traces.trace, None, *CONFIGS[config])
    actual = two_ranks.run(traces.trace, "fused_sparse_dist", *CONFIGS[config])
    for (mine, _), (theirs, _) in zip(actual, expected, strict=True):
        assert mine == theirs


def test_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = two_ranks.run(checkpoints.train_from, "fused_sparse_dist", False, 5, folder, None)
    resumed = two_ranks.run(
        checkpoints.train_from, "fused_sparse_dist", False, 5, folder + "_", f"{folder}/step=5.ckpt"
    )
    for (expected, _), (actual, seen) in zip(whole, resumed, strict=True):
        assert seen == [*range(5, 8), *range(8)]
        expected.losses = expected.losses[5:]
        assert actual.differences(expected) == []


def test_resume_on_one_rank(get_ranks: object, tmp_path: Path) -> None:
    ranks = get_ranks(1)  # type: ignore[operator]
    [(whole, _)] = ranks.run(checkpoints.train, MIXED, "fused_sparse_dist", 2, str(tmp_path / "whole"))
    [(_, path)] = ranks.run(checkpoints.train, MIXED, "fused_sparse_dist", 1, str(tmp_path / "first"))
    [(resumed, _)] = ranks.run(checkpoints.train, MIXED, "fused_sparse_dist", 2, str(tmp_path / "second"), resume=path)
    whole.losses = whole.losses[-checkpoints.EPOCH :]
    assert resumed.differences(whole) == []


def test_evaluation(two_ranks: Ranks, tmp_path: Path) -> None:
    calls = ("validate", "fit", "test", "predict", "fit more")
    setting = Setting({"val_check_interval": 4, "max_epochs": 1}, evaluate="evaluate_several", calls=calls)
    expected, actual = (two_ranks.run(features.run, p, setting, str(tmp_path)) for p in (None, "fused_sparse_dist"))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.trace == theirs.trace
        assert mine.logged == theirs.logged
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)
