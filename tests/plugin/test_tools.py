"""Profilers, loggers' files, progress bars, writers and summaries show what they show under DDPStrategy."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..support.ranks import Ranks
from . import tools
from .features import NUM_TRAIN

EARLY = "fused_sparse_dist"
_FETCHES = re.compile(r"_transfer$|_to_device$|batch_to_device$|val_next$")


@pytest.mark.parametrize("kind", tools.PROFILERS)
def test_profilers_see_the_same_actions(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    expected, actual = (ranks.run(tools.profiled_actions, p, kind, str(tmp_path)) for p in (None, EARLY))
    for mine, theirs in zip(actual, expected, strict=True):
        assert any("batch_to_device" in action for action in theirs)
        if kind == "pytorch":
            # It records a window of steps; the batches of the validation have been fetched before its window.
            theirs = {action: num for action, num in theirs.items() if not _FETCHES.search(action)}
            mine = {action: num for action, num in mine.items() if not _FETCHES.search(action)}
            assert any("validation_step" in action for action in mine)
        assert mine == theirs


def test_csv_logger_writes_the_same_rows(ranks: Ranks, tmp_path: Path) -> None:
    expected, base, early = (ranks.run(tools.csv_rows, p, str(tmp_path)) for p in (None, "base", EARLY))
    assert early == base
    for mine, theirs in zip(early, expected, strict=True):
        assert [row["step"] for row in mine][-1] == str(2 * NUM_TRAIN - 1)
        mine, theirs = ([{k: v for k, v in row.items() if "loss" not in k} for row in rows] for rows in (mine, theirs))
        assert mine == theirs


@pytest.mark.parametrize(
    ("kwargs", "train"),
    [({}, "train"), ({"limit_train_batches": 5, "val_check_interval": 2}, "train"), ({}, "unsized_min_size")],
    ids=["sized", "val_check_interval", "unsized"],
)
def test_progress_bar_shows_the_same(ranks: Ranks, kwargs: dict[str, Any], train: str) -> None:
    expected = ranks.run(tools.shown_by_bar, None, kwargs, train)
    assert expected[0]
    assert ranks.run(tools.shown_by_bar, EARLY, kwargs, train) == expected


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_rich_progress_bar(two_ranks: Ranks) -> None:
    assert two_ranks.run(tools.fits_with_rich_bar, EARLY) == [9, 9]


@pytest.mark.parametrize("fit_first", [False, True], ids=["predict", "fit_then_predict"])
def test_prediction_writer_is_handed_the_same(ranks: Ranks, fit_first: bool) -> None:
    expected, base, early = (ranks.run(tools.written_predictions, p, fit_first) for p in (None, "base", EARLY))
    assert early == base
    for (mine, predictions), (theirs, others) in zip(early, expected, strict=True):
        assert mine == theirs
        assert predictions == pytest.approx(others, **({"rel": 1e-3} if fit_first else {"abs": 1e-6}))


def test_model_summary_counts_the_shards_of_a_rank(ranks: Ranks) -> None:
    seen = ranks.run(tools.summary_of_sharded_module)
    assert sum(counts["ebc"] for counts, _, _ in seen) == seen[0][2]
    for counts, total, _ in seen:
        assert total == sum(counts[name] for name in ("ebc", "bottom", "top"))


@pytest.mark.slow
def test_compiled_module(two_ranks: Ranks) -> None:
    for plain, compiled in two_ranks.run(tools.compiled, EARLY):
        assert compiled == plain
        assert plain[1] > 0


@pytest.mark.parametrize(
    ("train", "num"),
    [("train", NUM_TRAIN - 1), ("one_max_size_cycle", 6), ("one_max_size", 4), ("both_min_size", 0)],
)
def test_early_embeddings_with_several_loaders(two_ranks: Ranks, train: str, num: int) -> None:
    """All batches with ids but the first, which shows which input feeds which module."""
    assert [early for _, _, early in two_ranks.run(tools.train_only, EARLY, train, False)] == [num, num]


def test_dataloader_iter_runs_plain(ranks: Ranks) -> None:
    hows = (("base", "train", False), (EARLY, "train", True))
    expected, actual = (ranks.run(tools.train_only, *how, max_epochs=2) for how in hows)
    assert actual == [(theirs, 2 * NUM_TRAIN, 0) for theirs, _, _ in expected]


def test_sequential_train_loader_is_refused_by_lightning(ranks: Ranks) -> None:
    expected = ranks.run(tools.message_of_sequential, None)
    assert '_FitLoop` does not support the `CombinedLoader(mode="sequential")`' in expected[0][0]
    assert ranks.run(tools.message_of_sequential, EARLY) == expected


@pytest.mark.skipif(Version(metadata.version("lightning")) < Version("2.6"), reason="Lightning 2.6 and later")
def test_validation_by_the_clock_comes_at_the_same_step_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(tools.validates_by_the_clock, EARLY)
    assert first == second
    assert first.count(("validate", 0)) > 2
