"""Lightning's features under the strategy: hooks, logs and counts of DDPStrategy, losses of `base`."""

from pathlib import Path
from typing import Any

import pytest

from ..support import traces
from ..support.ranks import Ranks
from . import features
from .features import Setting
from .test_fit_loop import CONFIGS

SETTINGS: dict[str, Setting] = {
    "limit_val_batches": Setting({"limit_val_batches": 2}),
    "limit_train_batches_0": Setting({"limit_train_batches": 0}),
    "limit_test_batches": Setting({"limit_test_batches": 2}, calls=("test",)),
    "limit_predict_batches": Setting({"limit_predict_batches": 2}, calls=("predict",)),
    "overfit_batches": Setting({"overfit_batches": 0.34}),
    "overfit_batches_shuffled": Setting({"overfit_batches": 2, "use_distributed_sampler": True}, train="samples"),
    "fast_dev_run": Setting({"fast_dev_run": True}, calls=("fit", "test", "predict")),
    "max_time": Setting({"max_time": {"seconds": 5}}),
    "min_epochs": Setting({"min_epochs": 3, "max_epochs": 4}, callbacks=("early_stopping",)),
    "max_steps_between_epochs": Setting({"max_steps": 11, "max_epochs": 3}),
    "max_steps_0": Setting({"max_steps": 0}),
    "check_val_every_n_epoch": Setting({"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "val_check_interval_float": Setting({"val_check_interval": 0.45}),
    "num_sanity_val_steps": Setting({"num_sanity_val_steps": 2}),
    "reload_dataloaders_every_n_epochs": Setting({"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}),
    "early_stopping": Setting({"max_epochs": 4}, callbacks=("early_stopping",)),
    "early_stopping_on_train": Setting({"max_epochs": 4}, callbacks=("early_stopping_on_train",)),
    "timer": Setting(callbacks=("timer",)),
    "every_n_train_steps": Setting(callbacks=("every_n_train_steps",)),
    "log_every_n_steps": Setting({"log_every_n_steps": 4}),
    "ends_epoch_early": Setting(model="ends_epoch_early"),
    "asks_for_steps": Setting({"accumulate_grad_batches": 2}, model="asks_for_steps", losses_of_ddp=False),
    "asks_for_steps_max_steps": Setting({"max_steps": 7, "max_epochs": -1}, model="asks_for_steps"),
    "use_distributed_sampler": Setting(
        {"use_distributed_sampler": True}, "samples", "evaluate_samples", calls=("fit", "validate", "predict")
    ),
    "several_val_loaders": Setting({"val_check_interval": 4}, evaluate="evaluate_several", calls=("fit", "test")),
    "combined_val_loader": Setting(evaluate="evaluate_combined", calls=("fit", "test")),
    "no_val_loader": Setting(evaluate="nothing"),
    "nested_loaders": Setting(train="nested"),
    "unsized_min_size": Setting(train="unsized_min_size"),
    "one_max_size": Setting(train="one_max_size"),
    "one_max_size_cycle": Setting(train="one_max_size_cycle"),
    "both_min_size": Setting({"val_check_interval": 0.5}, train="both_min_size"),
    "both_max_size": Setting({"val_check_interval": 0.5}, train="both_max_size"),
    "both_max_size_cycle": Setting({"val_check_interval": 0.5}, train="both_max_size_cycle"),
    "inference_mode": Setting({"inference_mode": True}, calls=("validate", "fit", "test", "fit more")),
    "no_inference_mode": Setting({"inference_mode": False}, calls=("validate", "fit", "test", "fit more")),
    "detect_anomaly": Setting({"detect_anomaly": True}),
    "fit_more": Setting(calls=("fit", "fit more", "fit more")),
    "fit_more_unsized": Setting(train="unsized_min_size", calls=("fit", "fit more")),
    "other_trainer": Setting({"max_epochs": 1}, calls=("fit", "other trainer", "fit", "other trainer", "predict")),
    "there_and_back": Setting(
        {"max_epochs": 1}, calls=("validate", "fit", "validate", "test", "predict", "fit more", "predict", "fit more")
    ),
    "barebones": Setting({"barebones": True}),
    "takes_iterator": Setting({"val_check_interval": 4}, model="takes_iterator"),
}

ON_ONE_RANK = list(SETTINGS)[::2]
ALSO_IN_BASE = [name for name in SETTINGS if name not in ON_ONE_RANK or not SETTINGS[name].losses_of_ddp]
"""By turns: all are compared on two ranks in the default mode."""
SMOKE = ("several_val_loaders", "there_and_back")


def _agree(mine: features.Seen, theirs: features.Seen) -> None:
    for written, expected in ((mine.trace, theirs.trace), (mine.logged, theirs.logged)):
        for index, (one, other) in enumerate(zip(written, expected, strict=False)):
            assert one == other, f"entry {index}, after {written[max(0, index - 3) : index]}"
        assert len(written) == len(expected)
    assert len(mine.losses) == len(theirs.losses)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.smoke] * (n in SMOKE)) for n in SETTINGS])
def test_same_as_ddp(two_ranks: Ranks, name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    expected, early = (two_ranks.run(features.run, p, setting, str(tmp_path)) for p in (None, "fused_sparse_dist"))
    for mine, theirs in zip(early, expected, strict=True):
        _agree(mine, theirs)
        if setting.losses_of_ddp:
            assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)
    if name in ALSO_IN_BASE:
        base = two_ranks.run(features.run, "base", setting, str(tmp_path))
        for mine, plain, theirs in zip(early, base, expected, strict=True):
            _agree(plain, theirs)
            assert mine.losses == plain.losses


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_same_as_ddp_on_one_rank(get_ranks: Any, name: str, tmp_path: Path) -> None:
    ranks, setting = get_ranks(1), SETTINGS[name]
    [theirs], [mine] = (ranks.run(features.run, p, setting, str(tmp_path)) for p in (None, "fused_sparse_dist"))
    _agree(mine, theirs)
    if setting.losses_of_ddp:
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("config", list(CONFIGS)[::2])
def test_same_hooks_as_ddp_on_one_rank(get_ranks: Any, config: str) -> None:
    """By turns: test_fit_loop.py compares all on two ranks."""
    ranks = get_ranks(1)
    [(expected, _)], [(actual, _)] = (ranks.run(traces.trace, p, *CONFIGS[config]) for p in (None, "fused_sparse_dist"))
    assert actual == expected
