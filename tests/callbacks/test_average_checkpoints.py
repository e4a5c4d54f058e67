"""Averages in checkpoints: a resumed fit goes on exactly, on other ranks too, and evaluations load the averages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES

from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import averaging
from .averaging import ALL, case_of, load_and_validate, save_averages, train, train_saving

FORMATS = ("sharded", "full")


def same(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert averaging.differing(one.averages, other.averages) == []
        assert averaging.differing(one.weights, other.weights) == []
        assert one.num_samples == other.num_samples


@pytest.mark.parametrize(
    ("resume", "pipeline"), in_turn(["step=4", "step=6", "step=8", "step=11"], ["fused_sparse_dist", "base"])
)
@pytest.mark.parametrize("saved_as", FORMATS)
def test_a_resumed_fit_equals_one_that_did_not_stop(
    ranks: Ranks, tmp_path: Path, saved_as: str, resume: str, pipeline: str
) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}, "ema": {"every_n_steps": 2}}
    args = (ALL, pipeline, str(tmp_path), (4, 6, 8, 11))
    straight = ranks.run(train_saving, *args, None, **kwargs)
    same(ranks.run(train_saving, *args, resume, **kwargs), straight)


def test_a_resumed_fit_in_a_mode_that_defers_updates(two_ranks: Ranks, tmp_path: Path) -> None:
    """The first step of a fit defers nothing, and samples are the same all the same."""
    args = (ALL, "semi_sync_deferred", str(tmp_path), (8,))
    straight = two_ranks.run(train_saving, *args, None)
    same(two_ranks.run(train_saving, *args, "step=8"), straight)


def test_a_checkpoint_that_is_saved_before_the_sample_of_its_step(two_ranks: Ranks, tmp_path: Path) -> None:
    args = (ALL, "fused_sparse_dist", str(tmp_path), (4, 6))
    straight = two_ranks.run(train_saving, *args, None, first=True)
    same(two_ranks.run(train_saving, *args, "step=4", first=True), straight)


@pytest.mark.parametrize("saved_as", FORMATS)
def test_a_save_in_the_middle_of_a_validation_has_the_trained_weights(
    two_ranks: Ranks, tmp_path: Path, saved_as: str
) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}}
    found = two_ranks.run(train_saving, ALL, "fused_sparse_dist", str(tmp_path), (6,), None, **kwargs)
    for one in found:
        assert averaging.differing(one.seen["saved"]["validating=6"], one.seen["saved"]["step=6"]) == []
    by_name = {}
    for name in ("step=6", "validating=6"):
        by_name[name] = two_ranks.run(train_saving, ALL, "base", str(tmp_path), (), name, max_steps=6)
    same(*by_name.values())
    for mine, theirs in zip(by_name["step=6"], found, strict=True):
        assert averaging.differing(mine.weights, theirs.seen["saved"]["step=6"]) == []


PLANS = {"others": "column_wise row_wise table_wise row_wise", "one": "table_wise table_wise table_wise table_wise"}
FOUR = case_of("table_wise column_wise row_wise table_wise")


@pytest.mark.parametrize("saved_as", FORMATS)
@pytest.mark.parametrize(("plan", "num_ranks"), [("others", 2), ("one", 1), ("others", 3)])
def test_another_plan_and_number_of_ranks(
    get_ranks: Callable[..., Ranks], tmp_path: Path, saved_as: str, plan: str, num_ranks: int
) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}, "max_steps": 6}
    kwargs["data"] = averaging.Evaluations  # the states of loaders belong to their ranks
    args = ("fused_sparse_dist", str(tmp_path), (6,))
    saved = get_ranks(2).run(train_saving, wide(FOUR), *args, None, **kwargs)
    case = wide(case_of(PLANS[plan]))
    loaded = get_ranks(num_ranks).run(train_saving, case, *args, "step=6", **kwargs)
    for what in ("averages", "weights"):
        mine, theirs = averaging.whole(loaded, what), averaging.whole(saved, what)
        assert averaging.differing(mine, theirs) == []


def wide(case: Any) -> Any:
    """All tables with 16 columns, so that any plan fits."""
    return replace(case, tables=tuple(replace(table, dim=16) for table in case.tables))


@pytest.mark.parametrize("saved_as", FORMATS)
def test_validate_loads_the_averages_of_a_checkpoint(two_ranks: Ranks, tmp_path: Path, saved_as: str) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}, "max_steps": 6}
    saved = two_ranks.run(train_saving, ALL, "semi_sync", str(tmp_path), (6,), None, **kwargs)
    path = str(tmp_path / "step=6.ckpt")
    for one, other in zip(two_ranks.run(load_and_validate, ALL, path), saved, strict=True):
        assert averaging.differing(one.averages, {**other.weights, **other.averages}) == []
        assert averaging.differing(one.weights, other.weights) == []
        assert one.num_samples == 6
    for one, other in zip(two_ranks.run(load_and_validate, ALL, path, averages=False), saved, strict=True):
        assert averaging.differing(one.averages, other.weights) == []


@pytest.mark.parametrize("saved_as", FORMATS)
def test_a_checkpoint_without_averages_begins_new_ones(two_ranks: Ranks, tmp_path: Path, saved_as: str) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}}
    args = (ALL, "fused_sparse_dist", str(tmp_path), (6,))
    two_ranks.run(train_without, *args, **kwargs)
    found = two_ranks.run(train_saving, *args, "step=6", max_steps=7, **kwargs)
    assert "has no averages of ExponentialMovingAverage" in found[0].warned[0]
    assert not found[1].warned
    loaded = two_ranks.run(load_and_validate, ALL, str(tmp_path / "step=6.ckpt"))
    for one, before in zip(found, loaded, strict=True):  # they begin with the loaded weights
        assert averaging.differing(before.averages, before.weights) == []
        assert one.num_samples == 2
        for name, average in one.averages.items():
            first, second = before.weights[name], one.weights[name]
            expected = first + 0.1 * (second - first) if first.is_floating_point() else second
            assert torch.allclose(average, expected, atol=1e-6), name


def train_without(case: Any, pipeline: str, folder: str, steps: Any, options: Any) -> None:
    model = averaging.Norm(case)
    trainer = averaging.make_trainer(averaging.make_strategy(model, pipeline, **options), max_steps=6)
    trainer.fit(model, datamodule=averaging.StatefulData(case, 8))
    trainer.save_checkpoint(f"{folder}/step=6.ckpt")


def test_tables_that_are_asked_for_later_begin_with_the_loaded_weights(two_ranks: Ranks, tmp_path: Path) -> None:
    args = (ALL, "fused_sparse_dist", str(tmp_path), (6,))
    two_ranks.run(train_saving, *args, None, ema={"tables": ["t0"]})
    found = two_ranks.run(train_saving, *args, "step=6", max_steps=6, ema={"tables": ["t1"]})
    assert "t1.weight: averages begin with the loaded weights" in found[0].warned[0]
    assert "t0.weight: saved averages are not used" in found[0].warned[0]
    for one in found:
        new = {name: part for name, part in one.averages.items() if ".t1." in name}
        assert averaging.differing(new, {name: one.weights[name] for name in new}) == []


@pytest.mark.parametrize("in_fit", [True, False])
def test_averages_saved_as_weights_are_for_serving(two_ranks: Ranks, tmp_path: Path, in_fit: bool) -> None:
    path, kwargs = tmp_path / "served.ckpt", {"options": {"checkpoint_format": "full"}}
    found = two_ranks.run(save_averages, ALL, str(path), in_fit=in_fit, **kwargs)
    file = torch.load(path, weights_only=True)
    assert averaging.differing(file["state_dict"], found[0].seen["state"]) == []
    averaging.Norm(ALL).load_state_dict(file["state_dict"])
    weights = averaging.whole(found, "weights")
    assert averaging.differing(weights, file["state_dict"])


def test_an_asynchronous_save_keeps_the_averages_of_its_step(two_ranks: Ranks, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"options": {"async_checkpoint": True}}
    args = (ALL, "fused_sparse_dist", str(tmp_path), (4, 6))
    straight = two_ranks.run(train_saving, *args, None, **kwargs)
    same(two_ranks.run(train_saving, *args, "step=4", **kwargs), straight)


def test_the_last_checkpoint_is_found(two_ranks: Ranks, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"callbacks": [averaging.saves_last(str(tmp_path))], "enable_checkpointing": True}
    kwargs |= {"data": averaging.StatefulData, "num_steps": 8, "model": averaging.Norm}
    straight = two_ranks.run(train, ALL, max_epochs=2, **kwargs)
    for path in tmp_path.glob("*"):
        assert path.name == "last.ckpt" or path.name.startswith("epoch")
    again = two_ranks.run(train, ALL, max_epochs=2, ckpt_path="last", **kwargs)
    same(again, straight)


EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pipeline=st.sampled_from([*EXACT, "semi_sync", "semi_sync_deferred", "async_lookup"]),
    shardings=st.lists(
        st.sampled_from(["table_wise", "column_wise", "row_wise", "data_parallel"]), min_size=1, max_size=3
    ),
    ema=st.fixed_dictionaries(
        {
            "decay": st.sampled_from([0.0, 0.3, 0.9, 0.999]),
            "every_n_steps": st.integers(1, 4),
            "start_step": st.integers(0, 5),
            "tables": st.sampled_from([True, True, False, ["t0"]]),
        }
    ),
    accumulate=st.integers(1, 3),
    validates=st.integers(1, 8),
    resume=st.integers(1, 5),
    saved_as=st.sampled_from(FORMATS),
    first=st.booleans(),
)
def test_whatever_is_combined(
    two_ranks: Ranks,
    tmp_path: Path,
    pipeline: str,
    shardings: list[str],
    ema: dict[str, Any],
    accumulate: int,
    validates: int,
    resume: int,
    saved_as: str,
    first: bool,
) -> None:
    kwargs: dict[str, Any] = {"options": {"checkpoint_format": saved_as}, "ema": ema, "first": first}
    kwargs |= {"val_check_interval": validates, "accumulate_grad_batches": accumulate}
    args = (case_of(" ".join(shardings)), pipeline, str(tmp_path), (resume,))
    straight = two_ranks.run(train_saving, *args, None, **kwargs)
    assert all(one.off_by < 1e-6 for one in straight)
    again = two_ranks.run(train_saving, *args[:3], (), f"step={resume}", **kwargs)
    if pipeline in EXACT:
        same(again, straight)
