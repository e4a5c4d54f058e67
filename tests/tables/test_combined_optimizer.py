"""`combined_optimizer`: one optimizer whose groups are the dense ones and the fused tables, for any scheduler."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap.tables.combined_optimizer import DenseAndFused

from ..sparse.update_rates import factor
from ..support.ranks import Ranks
from . import combined_optimizers


def test_learning_rate_monitor_shows_both(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(combined_optimizers.monitor, str(tmp_path))
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
        for state in get_ranks(world_size).run(combined_optimizers.state_dict, sharding)
    ]
    for state in states:
        dense, fused = combined_optimizers.hyperparameters(state)
        assert (dense["lr"], dense["initial_lr"], dense["momentum"]) == (0.2 * factor(3), 0.2, 0.5)
        assert (fused["lr"], fused["initial_lr"], fused["name"]) == (1.0 * factor(3), 1.0, "fused")
        tensors = [value for values in state["state"].values() for value in values.values()]
        assert {type(value) for value in tensors} == {torch.Tensor}
        assert combined_optimizers.hyperparameters(state) == combined_optimizers.hyperparameters(states[0])
    assert torch.load(io.BytesIO(_saved(states[0])), weights_only=True).keys() == states[0].keys()


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"])
def test_resume_in_the_middle_of_a_schedule(ranks: Ranks, pipeline: str, tmp_path: Path) -> None:
    whole = ranks.run(combined_optimizers.train_from, pipeline, str(tmp_path / "whole"), None)
    resumed = ranks.run(
        combined_optimizers.train_from, pipeline, str(tmp_path / "on"), str(tmp_path / "whole" / "step=4.ckpt")
    )
    for (expected, rates), (actual, rates_on) in zip(whole, resumed, strict=True):
        assert rates == pytest.approx([factor(step) for step in range(12)])
        assert rates_on == rates[4:]
        expected.losses = expected.losses[4:]
        assert actual.differences(expected) == []


def test_a_frozen_table_stays_beside_one_whose_rate_rises_from_zero(get_ranks: Callable[..., Ranks]) -> None:
    assert get_ranks(1).run(combined_optimizers.frozen_beside_zero) == [(True, False)]


def test_a_rate_that_was_not_given_is_the_kernels(get_ranks: Callable[..., Ranks]) -> None:
    [(groups, kernels)] = get_ranks(1).run(combined_optimizers.rate_without_one_given)
    assert groups == pytest.approx([0.01])
    assert kernels == pytest.approx([0.01])


def test_a_second_fit_begins_with_the_first_rates(two_ranks: Ranks) -> None:
    """The kernels still have the rates that the first schedule ended with."""
    assert two_ranks.run(combined_optimizers.fit_again) == [[[2.0, 2.0 * factor(3)]] * 2] * 2


@pytest.mark.parametrize("dense", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", combined_optimizers.SCHEDULERS)
def test_schedulers(get_ranks: Callable[..., Ranks], name: str, dense: str) -> None:
    """Those that cycle momentum too; the kernels have the scheduler's own numbers."""
    [(seen, expected)] = get_ranks(1).run(combined_optimizers.schedule_with, name, dense)
    assert seen == expected
    assert len(set(seen)) > 1


def test_a_run_without_tables_is_named_as_the_reason() -> None:
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    saved = DenseAndFused(dense, {0.3: []}).state_dict()
    with pytest.raises(ValueError, match="This run has no fused tables, as under another strategy"):
        DenseAndFused(dense, {}).load_state_dict(saved)


def test_without_tables_and_without_the_strategy(two_ranks: Ranks) -> None:
    for plain, combined in two_ranks.run(combined_optimizers.without_the_strategy):
        assert torch.equal(plain, combined)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("torchrec", ["ValueError", "TorchRec's CombinedOptimizer", "combined_optimizer(self, "]),
        ("keyed", ["TypeError", "got KeyedOptimizerWrapper"]),
        ("two", ["ValueError", "2 optimizers", "for one optimizer"]),
        ("add", ["RuntimeError", "Add the group to the dense optimizer before"]),
        ("load", ["ValueError", "has 1 parameter groups, this optimizer has 1 dense and 1 fused"]),
    ],
)
def test_refused_on_every_rank(two_ranks: Ranks, what: str, parts: list[str]) -> None:
    for message in two_ranks.run(combined_optimizers.refused, what):
        assert [part for part in parts if part not in message] == [], message


def test_prints_its_groups() -> None:
    combined = DenseAndFused(torch.optim.Adam([torch.zeros(1)], 0.1), {0.5: [], 2.0: []})
    text = repr(combined)
    assert text.startswith("DenseAndFused (")
    assert all(name in text for name in ("fused_0.5", "fused_2.0", "lr: 0.1"))
    assert repr(pickle.loads(pickle.dumps(combined))) == text
