"""Learning rates that move: the fused update of a batch takes the rate of that batch's step, in every mode."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import MODES, Stage
from lightning_overlap.tables.combined_optimizer import DenseAndFused

from ..support import reference
from ..support.cases import TABLE_WISE, Case
from ..support.pairs import in_turn, rotated
from ..support.ranks import Ranks
from ..support.reference import Delayed
from . import optimizers
from .optimizers import CASES, NUM_STEPS, factor

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and mode.has_sparse_stages]
BY_NAME = {case.name: case for case in CASES}


def _differences(ranks: Ranks, case: Case, pipeline: str) -> list[list[str]]:
    staleness = MODES[pipeline].staleness
    loop = (reference.train_delayed, case, Delayed(staleness)) if staleness else (reference.train, case)
    expected = ranks.run_once(*loop, num_steps=NUM_STEPS, factor=factor)
    actual = ranks.run(optimizers.fit, case, pipeline)
    assert all(len(result.losses) == NUM_STEPS for result in actual)
    return [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(BY_NAME))
def test_the_update_of_a_batch_takes_the_rate_of_its_step(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """Equal to a plain loop that sets the rates before each batch; in a stale mode to the delayed loop."""
    assert _differences(get_ranks(num_ranks), BY_NAME[name], pipeline) == [[]] * num_ranks


def test_beside_a_table_of_a_dense_kernel(ranks: Ranks) -> None:
    """Such a part belongs to the dense optimizer altogether; its fused table still goes by its own step's rate."""
    expected = ranks.run(optimizers.fit_beside_a_dense_kernel, "base")
    for pipeline in ("sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"):
        actual = ranks.run(optimizers.fit_beside_a_dense_kernel, pipeline)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)), pipeline


@pytest.mark.parametrize(
    ("pipeline", "num_ranks"),
    [("fused_sparse_dist", 1), ("semi_sync", 1), *((name, 2) for name in MODES if name != "base")],
)
def test_a_rate_that_is_one_step_old_is_seen(get_ranks: Callable[..., Ranks], pipeline: str, num_ranks: int) -> None:
    """Guards the test above."""
    ranks = get_ranks(num_ranks)
    expected = ranks.run(optimizers.fit, TABLE_WISE, pipeline)
    for old, new in zip(
        ranks.run(optimizers.fit_at_the_rate_of_the_lookup, TABLE_WISE, pipeline), expected, strict=True
    ):
        early = MODES[pipeline].step_of(Stage.EMBEDDING_LOOKUP).offset > 0
        assert any(text.startswith("losses from step") for text in old.differences(new)) == early


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("Scheduled", {"accumulate_grad_batches": 3}),
    ("Scheduled", {"gradient_clip_val": 0.01}),
    ("Scheduled", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ("Scheduled", {"precision": "bf16-mixed"}),
    ("Scheduled", {"detect_anomaly": True}),
    ("Scheduled", {"limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}),
    ("Scheduled", {"max_steps": 9}),
    ("Manual", {}),
    ("TwoBackwards", {}),
    ("TwoDense", {}),
    ("SeveralGroups", {}),
    ("TwoClosures", {}),
    ("LBFGS", {}),
    ("Unscheduled", {}),
    ("Plateau", {"max_epochs": 3}),
]


@pytest.mark.parametrize(
    ("model", "kwargs", "other"),
    [(*way, other) for way, other in in_turn(WAYS, [name for name in EARLY if name != "fused_sparse_dist"])],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value,
)
def test_early_lookups_change_nothing(two_ranks: Ranks, model: str, kwargs: dict[str, Any], other: str) -> None:
    """However the module trains: losses, tables and rates of `base`, which the first test ties to a plain loop."""
    expected = two_ranks.run(optimizers.run, model, "base", **kwargs)
    assert all((len({tuple(rates) for rates in mine.rates}) > 1) == (model != "Unscheduled") for mine in expected)
    for pipeline in ("fused_sparse_dist", other):
        for mine, theirs in zip(two_ranks.run(optimizers.run, model, pipeline, **kwargs), expected, strict=True):
            assert torch.equal(mine.losses, theirs.losses), pipeline
            assert all(torch.equal(mine.tables[name], table) for name, table in theirs.tables.items()), pipeline
            assert mine.rates == theirs.rates


def test_learning_rate_monitor_shows_both(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(optimizers.monitor, str(tmp_path))
    expected = {"pg1": 0.2, "fused_0.5": 0.5, "fused_2.0": 2.0}
    assert first == second
    assert first == {
        f"lr-DenseAndFused/{name}": [rate * factor(step) for step in range(5)] for name, rate in expected.items()
    }
    [log] = tmp_path.rglob("metrics.csv")
    columns = log.read_text().splitlines()[0].split(",")
    assert {f"lr-DenseAndFused/{name}" for name in expected} < set(columns)


def test_saved_hyperparameters_do_not_depend_on_ranks_or_plan(get_ranks: Callable[..., Ranks]) -> None:
    states = [
        state
        for world_size, sharding in ((1, "table_wise"), (2, "table_wise"), (2, "column_wise"))
        for state in get_ranks(world_size).run(optimizers.state_dict, sharding)
    ]
    for state in states:
        dense, fused = optimizers.hyperparameters(state)
        assert (dense["lr"], dense["initial_lr"], dense["momentum"]) == (0.2 * factor(3), 0.2, 0.5)
        assert (fused["lr"], fused["initial_lr"], fused["name"]) == (1.0 * factor(3), 1.0, "fused")
        tensors = [value for values in state["state"].values() for value in values.values()]
        assert {type(value) for value in tensors} == {torch.Tensor}
        assert optimizers.hyperparameters(state) == optimizers.hyperparameters(states[0])
    assert torch.load(io.BytesIO(_saved(states[0])), weights_only=True).keys() == states[0].keys()


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"])
def test_resume_in_the_middle_of_a_schedule(ranks: Ranks, pipeline: str, tmp_path: Path) -> None:
    whole = ranks.run(optimizers.train_from, pipeline, str(tmp_path / "whole"), None)
    resumed = ranks.run(optimizers.train_from, pipeline, str(tmp_path / "on"), str(tmp_path / "whole" / "step=4.ckpt"))
    for (expected, rates), (actual, rates_on) in zip(whole, resumed, strict=True):
        assert rates == pytest.approx([factor(step) for step in range(12)])
        assert rates_on == rates[4:]
        expected.losses = expected.losses[4:]
        assert actual.differences(expected) == []


@pytest.mark.parametrize("pipeline", MODES)
def test_a_repeated_lookup_is_not_counted(two_ranks: Ranks, pipeline: str) -> None:
    for counts in two_ranks.run(optimizers.counts_of_updates, pipeline):
        assert counts == [NUM_STEPS] * 2


def test_a_frozen_table_stays_beside_one_whose_rate_rises_from_zero(get_ranks: Callable[..., Ranks]) -> None:
    assert get_ranks(1).run(optimizers.frozen_beside_zero) == [(True, False)]


def test_a_rate_that_was_not_given_is_the_kernels(get_ranks: Callable[..., Ranks]) -> None:
    [(groups, kernels)] = get_ranks(1).run(optimizers.rate_without_one_given)
    assert groups == pytest.approx([0.01])
    assert kernels == pytest.approx([0.01])


def test_a_second_fit_begins_with_the_first_rates(two_ranks: Ranks) -> None:
    """The kernels still have the rates that the first schedule ended with."""
    assert two_ranks.run(optimizers.fit_again) == [[[2.0, 2.0 * factor(3)]] * 2] * 2


@pytest.mark.parametrize("dense", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", optimizers.SCHEDULERS)
def test_schedulers(get_ranks: Callable[..., Ranks], name: str, dense: str) -> None:
    """Those that cycle momentum too; the kernels have the scheduler's own numbers."""
    [(seen, expected)] = get_ranks(1).run(optimizers.schedule_with, name, dense)
    assert seen == expected
    assert len(set(seen)) > 1


def test_without_tables_and_without_the_strategy(two_ranks: Ranks) -> None:
    for plain, combined in two_ranks.run(optimizers.without_the_strategy):
        assert torch.equal(plain, combined)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("torchrec", ["ValueError", "TorchRec's CombinedOptimizer", "combined_optimizer(self, "]),
        ("keyed", ["TypeError", "got KeyedOptimizerWrapper"]),
        ("two", ["ValueError", "2 optimizers", "Combine one of them"]),
        ("add", ["RuntimeError", "Add it to the dense optimizer before"]),
        ("load", ["ValueError", "has 1 parameter groups, this one has 1 dense and 1 fused"]),
    ],
)
def test_refused_on_every_rank(two_ranks: Ranks, what: str, parts: list[str]) -> None:
    for message in two_ranks.run(optimizers.refused, what):
        assert [part for part in parts if part not in message] == [], message


def test_prints_its_groups() -> None:
    combined = DenseAndFused(torch.optim.Adam([torch.zeros(1)], 0.1), {0.5: [], 2.0: []})
    text = repr(combined)
    assert text.startswith("DenseAndFused (")
    assert all(name in text for name in ("fused_0.5", "fused_2.0", "lr: 0.1"))
    assert repr(pickle.loads(pickle.dumps(combined))) == text
