"""The verdict on losses, and what a sweep is told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_overlap.apps import train_report


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
    assert train_report.compare_runs([("", tmp_path)]).splitlines()[2].endswith("val_auc 0.500000")
