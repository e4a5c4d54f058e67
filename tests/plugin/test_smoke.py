"""A short walk through everything, for every supported version of Lightning and TorchRec: `make smoke`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_overlap import MODES

from ..checkpoint import resumes
from ..support import reference, traces
from ..support.cases import MIXED, ROWWISE_ADAGRAD, Case
from ..support.fits import fit
from ..support.ranks import Ranks
from . import features
from .features import Setting
from .test_fit_loop import CONFIGS

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("case", [MIXED, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_laws(two_ranks: Ranks, case: Case) -> None:
    for pipeline, schedule in MODES.items():
        expected = reference.on_ranks(two_ranks, case, schedule.staleness)
        assert reference.differences(two_ranks.run(fit, case, pipeline), expected) == [[], []], pipeline


@pytest.mark.parametrize("config", ["epochs", "unsized", "val_check_interval", "max_steps", "none_batches"])
def test_hooks(two_ranks: Ranks, config: str) -> None:
    expected = two_ranks.run(traces.trace, None, *CONFIGS[config])
    actual = two_ranks.run(traces.trace, "fused_sparse_dist", *CONFIGS[config])
    for (mine, _), (theirs, _) in zip(actual, expected, strict=True):
        assert mine == theirs


def test_resume(ranks: Ranks, tmp_path: Path) -> None:
    loader = ("fused_sparse_dist", "own-unsized", str(tmp_path))
    whole = ranks.run(resumes.train_from, *loader, None, (5,))
    resumed = ranks.run(resumes.train_from, *loader, "step=5")
    for (expected, (all_seen, *_)), (actual, (seen, *_)) in zip(whole, resumed, strict=True):
        assert seen == all_seen[5:]
        expected.losses = expected.losses[5:]
        assert actual.differences(expected) == []


def test_evaluation(two_ranks: Ranks, tmp_path: Path) -> None:
    calls = ("validate", "fit", "test", "predict", "fit more")
    setting = Setting({"val_check_interval": 4, "max_epochs": 1}, evaluate="evaluate_several", calls=calls)
    expected, actual = (two_ranks.run(features.run, p, setting, str(tmp_path)) for p in (None, "fused_sparse_dist"))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.trace == theirs.trace
        assert mine.logged == theirs.logged
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)
