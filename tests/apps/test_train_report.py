"""The verdict on losses, and what a sweep is told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap.apps import train_report
from lightning_overlap.apps.step_timers import samples_in


def result(mode: str, losses: list[float], staleness: int = 0) -> train_report.ModeResult:
    summary = {
        **{"mode": mode, "stream": "-", "staleness": staleness, "num_ranks": 1},
        **{"step_ms_median": 1.0, "step_ms_p90": 1.0, "samples_per_s": None, "losses_sha256": "0" * 64},
        **{"num_steps": len(losses), "final_loss": losses[-1], "peak_memory": {"resident": 2**20}},
        "metrics": {"test_auc": 0.75},
    }
    return train_report.ModeResult(summary, np.array([losses], dtype=np.float32), [1.0] * len(losses))


@pytest.mark.parametrize(
    ("one", "other", "line", "exact"),
    [
        ([0.5, 0.25], result("two", [0.5, 0.25]), "losses identical: yes", True),
        ([float("nan")], result("two", [float("nan")]), "losses identical: yes", True),
        ([0.5, 0.25], result("two", [0.5, 0.125]), "no; two (staleness 0) differs from one from step 1 on", False),
        ([0.0, 0.5], result("two", [-0.0, 0.5]), "no; two (staleness 0) differs from one from step 0 on", False),
        ([0.5], result("two", [0.0], staleness=1), "no; two (staleness 1) differs from one from step 0 on", True),
    ],
)
def test_equal_means_each_bit_and_stale_modes_may_differ(
    one: list[float], other: train_report.ModeResult, line: str, exact: bool
) -> None:
    verdict, kept = train_report.compare([result("one", one), other])
    assert verdict.endswith(line)
    assert kept == exact


def test_samples_of_any_batch_are_counted() -> None:
    """Data modules of a user need no `batch_size`."""
    kjt = KeyedJaggedTensor(["one", "two"], torch.arange(5), lengths=torch.tensor([1, 2, 0, 1, 1, 0]))
    assert samples_in({"weights": torch.ones(7), "deeper": [kjt]}) == 3
    assert samples_in((torch.tensor(2.0), torch.ones(7, 2))) == 7
    assert samples_in([None, "text"]) is None


def test_metrics_are_named_as_they_were_logged() -> None:
    """So that a name of the table is one for `metric=`."""
    one = result("one", [0.5])
    logged = replace(one, summary={**one.summary, "metrics": {"test/auc_of_clicks": 0.75}})
    assert "\ntest/auc_of_clicks " in train_report.table([logged])


def test_runs_of_a_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    train_report.write(tmp_path, [result("one", [0.5])], "test_auc")
    runs = [(("experiment=mine", f"data.batch_size={size}"), tmp_path) for size in (8, 16)]
    lines = train_report.compare_runs(runs).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["data.batch_size=8", "data.batch_size=16"]
    assert "all runs: experiment=mine" in lines


def test_a_sweep_is_told_the_metric_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_report.write(tmp_path, [result("one", [0.5])], "test_auc")
    assert train_report.read_metric(tmp_path) == 0.75
    train_report.write(tmp_path, [result("one", [0.5])], "test_acc")
    assert train_report.read_metric(tmp_path) is None  # the training is over: no error of a name that is a default
    assert "warning: unknown metric 'test_acc'. Did you mean 'test_auc'" in capsys.readouterr().err
    train_report.write(tmp_path, [result("one", [0.5]), result("two", [0.25])], "test_auc")
    with pytest.raises(ValueError, match="differs from one from step 0 on"):
        train_report.read_metric(tmp_path)
    validated = replace(result("one", [0.5]), summary={**result("one", [0.5]).summary, "metrics": {"val_auc": 0.5}})
    train_report.write(tmp_path, [validated], "test_auc")
    assert train_report.read_metric(tmp_path) == 0.5
    assert train_report.compare_runs([((), tmp_path)]).splitlines()[2].endswith("val_auc 0.500000")
