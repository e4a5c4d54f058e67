"""Profilers, loggers' files, progress bars, writers and summaries show what they show under DDPStrategy."""

import csv
import importlib.util
from collections import Counter
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from packaging.version import Version
from torch import Tensor

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .test_features import (
    NUM_TRAIN,
    Data,
    Recorded,
    Setting,
    TakesIterator,
    early_embeddings,
    indices,
    make_strategy,
    run,
)

PROFILERS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def fit(pipeline: str | None, train: str = "train", **kwargs: Any) -> Trainer:
    trainer = make_trainer(make_strategy(pipeline), **{"max_epochs": 2, **kwargs})
    trainer.fit(Recorded(fused=pipeline is not None), datamodule=Data(train, "evaluate"))
    return trainer


def profiled_actions(pipeline: str | None, kind: str, folder: str) -> dict[str, int]:
    """Return the actions that a profiler was told of, each with its count; the strategy's own name left out."""
    actions: list[str] = []

    def start(self: Any, action: str, own: Any = PROFILERS[kind].start) -> None:
        actions.append(action)
        own(self, action)

    with mock.patch.object(PROFILERS[kind], "start", start):
        trainer = fit(pipeline, profiler=PROFILERS[kind](dirpath=folder, filename="profile"))
    return Counter(action.replace(type(trainer.strategy).__name__, "TheStrategy") for action in actions)


class ReadsBar(Callback):
    def _read(self, module: Recorded, bar: Any) -> None:
        module.seen.trace.append((bar.n, bar.total, bar.desc, bar.disable))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._read(module, trainer.progress_bar_callback.train_progress_bar)

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._read(module, trainer.progress_bar_callback.val_progress_bar)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._read(module, trainer.progress_bar_callback.train_progress_bar)
        metrics = trainer.progress_bar_callback.get_metrics(trainer, module)
        module.seen.trace.append({name: value for name, value in metrics.items() if "loss" not in name})


class Writer(BasePredictionWriter):
    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Tensor, *given: Any) -> None:
        batch_indices, batch, batch_idx, dataloader_idx = given
        module.seen.trace.append(("writes", batch_indices, indices(batch), batch_idx, dataloader_idx))
        module.seen.losses.append(prediction.item())

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        module.seen.trace.append(("writes", len(predictions), batch_indices))
        module.seen.losses += [prediction.item() for prediction in predictions]


class _Summary(ModelSummary):
    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        super().on_fit_start(trainer, module)
        self.made = self._summary(trainer, module)


def summary_of_sharded_module() -> tuple[dict[str, int], int, int]:
    """Return the parameters by layer that ModelSummary counts on this rank, in all, and the tables' own count."""
    summary, model = _Summary(max_depth=2), Model(TABLE_WISE)
    num_table_parameters = sum(p.numel() for p in model.ebc.parameters())
    trainer = make_trainer(make_strategy("fused_sparse_dist"), enable_model_summary=True, callbacks=[summary])
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 1))
    counts = dict(zip(summary.made.layer_names, summary.made.param_nums, strict=True))
    return counts, summary.made.total_parameters, num_table_parameters


def fit_compiled(pipeline: str) -> list[tuple[list[float], int]]:
    """Fit a module, and the same one compiled; return of each losses, and how many early embeddings it used."""
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model = Model(TABLE_WISE)
        given: Any = torch.compile(model, backend="eager") if compile_it else model
        with early_embeddings() as used:
            make_trainer(make_strategy(pipeline)).fit(given, datamodule=Batches(TABLE_WISE, 6))
        results.append(([loss.item() for loss in model.losses], len(used)))
    return results


def message_of_sequential(pipeline: str | None) -> tuple[str, int]:
    """Train on a sequential CombinedLoader; return what the user reads, then the steps of a fit that is right."""
    with pytest.raises(ValueError, match="sequential") as caught:
        fit(pipeline, "one_sequential")
    return str(caught.value), fit(pipeline, "one_min_size").global_step


def validates_by_the_clock(pipeline: str) -> list[Any]:
    """Fit with a validation every two "seconds"; the clock of a rank is the slower the higher its number."""
    ticks = iter(range(10_000))
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / (1 + dist.get_rank()))
    with ExitStack() as patches:
        for loop in (training_epoch_loop, fit_loop, evaluation_loop):
            if hasattr(loop, "time"):
                patches.enter_context(mock.patch.object(loop, "time", clock))
        trace = fit(pipeline, val_check_interval="00:00:00:02").lightning_module.seen.trace
    return [entry[:2] for entry in trace if isinstance(entry, tuple) and entry[0] in ("training_step", "validate")]


EARLY = "fused_sparse_dist"


@pytest.mark.parametrize("kind", PROFILERS)
def test_profilers_see_the_same_actions(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    expected, actual = (ranks.run(profiled_actions, p, kind, str(tmp_path)) for p in (None, EARLY))
    assert actual == expected
    assert any("batch_to_device" in action for action in expected[0])


def test_csv_logger_writes_the_same_rows(ranks: Ranks, tmp_path: Path) -> None:
    rows = []
    for pipeline in (None, "base", EARLY):
        logger = CSVLogger(tmp_path, name=str(pipeline), version="", flush_logs_every_n_steps=3)
        ranks.run(run, pipeline, Setting({"logger": logger, "log_every_n_steps": 2}))
        with (tmp_path / str(pipeline) / "metrics.csv").open(newline="") as file:
            rows.append(list(csv.DictReader(file)))
    assert rows[1] == rows[2]
    assert rows[0][-1]["step"] == str(2 * NUM_TRAIN - 1)
    theirs, ours, _ = ([{k: v for k, v in row.items() if "loss" not in k} for row in found] for found in rows)
    assert ours == theirs


@pytest.mark.parametrize(
    ("kwargs", "train"),
    [({}, "train"), ({"limit_train_batches": 5, "val_check_interval": 2}, "train"), ({}, "unsized_min_size")],
    ids=["sized", "val_check_interval", "unsized"],
)
def test_progress_bar_shows_the_same(ranks: Ranks, kwargs: dict[str, Any], train: str) -> None:
    callbacks = (TQDMProgressBar(refresh_rate=2), ReadsBar())
    setting = Setting({"enable_progress_bar": True, **kwargs}, train, callbacks=callbacks)
    expected, actual = (ranks.run(run, p, setting) for p in (None, EARLY))
    assert [mine.trace for mine in actual] == [theirs.trace for theirs in expected]


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_rich_progress_bar(two_ranks: Ranks) -> None:
    from lightning.pytorch.callbacks import RichProgressBar

    seen, _ = two_ranks.run(run, EARLY, Setting({"enable_progress_bar": True}, callbacks=(RichProgressBar(),)))
    assert len(seen.losses) > 2 * NUM_TRAIN


@pytest.mark.parametrize("fit_first", [False, True], ids=["predict", "fit_then_predict"])
def test_prediction_writer_is_handed_the_same(ranks: Ranks, fit_first: bool) -> None:
    calls, trainer = ("fit", "predict")[not fit_first :], {"use_distributed_sampler": True}
    setting = Setting(trainer, "samples", "evaluate_samples", callbacks=(Writer("batch_and_epoch"),), calls=calls)
    expected, base, early = (ranks.run(run, p, setting) for p in (None, "base", EARLY))
    for mine, plain, theirs in zip(early, base, expected, strict=True):
        assert any("writes" in entry for entry in theirs.trace)
        assert mine.trace == plain.trace == theirs.trace
        assert mine.losses == plain.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-6)


def test_model_summary_counts_the_shards_of_a_rank(ranks: Ranks) -> None:
    seen = ranks.run(summary_of_sharded_module)
    assert sum(counts["ebc"] for counts, _, _ in seen) == seen[0][2]
    for counts, total, _ in seen:
        assert total == sum(counts[name] for name in ("ebc", "bottom", "top"))


@pytest.mark.slow
def test_compiled_module(two_ranks: Ranks) -> None:
    for plain, compiled in two_ranks.run(fit_compiled, EARLY):
        assert compiled == plain
        assert plain[1] > 0


@pytest.mark.parametrize(
    ("train", "num"),
    [("train", NUM_TRAIN - 1), ("one_max_size_cycle", 6), ("one_max_size", 4), ("both_min_size", 0)],
)
def test_early_embeddings_with_several_loaders(two_ranks: Ranks, train: str, num: int) -> None:
    """All batches with ids but the first, which shows which input feeds which module."""
    setting = Setting({"limit_val_batches": 0, "max_epochs": 1}, train)
    assert [seen.num_early for seen in two_ranks.run(run, EARLY, setting)] == [num, num]


def test_dataloader_iter_runs_plain(ranks: Ranks) -> None:
    expected = ranks.run(run, "base", Setting({"limit_val_batches": 0}))
    actual = ranks.run(run, EARLY, Setting({"limit_val_batches": 0}, model=TakesIterator))
    assert [(seen.num_early, seen.losses) for seen in actual] == [(0, seen.losses) for seen in expected]


def test_sequential_train_loader_is_refused_by_lightning(ranks: Ranks) -> None:
    expected = ranks.run(message_of_sequential, None)
    assert '_FitLoop` does not support the `CombinedLoader(mode="sequential")`' in expected[0][0]
    assert ranks.run(message_of_sequential, EARLY) == expected


@pytest.mark.skipif(Version(metadata.version("lightning")) < Version("2.6"), reason="Lightning 2.6 and later")
def test_validation_by_the_clock_comes_at_the_same_step_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(validates_by_the_clock, EARLY)
    assert first == second
    assert first.count(("validate", 0)) > 2
