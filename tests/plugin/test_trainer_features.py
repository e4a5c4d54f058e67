"""Lightning's callbacks and Trainer arguments: what works equals `base`, what does not is refused by name."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import callbacks

from lightning_overlap import MODES

from ..support.cases import MIXED, TABLE_WISE, Case
from ..support.ranks import Ranks
from . import trainer_features

EARLY = [name for name, mode in MODES.items() if mode.staleness == 0 and name != "base"]


@pytest.mark.parametrize("callback", trainer_features.WORKING)
def test_a_callback_works_in_every_mode(two_ranks: Ranks, callback: str) -> None:
    expected = two_ranks.run(trainer_features.train, callback, "base")
    without = two_ranks.run_once(trainer_features.train, None, "base")
    for pipeline in EARLY:
        for mine, theirs in zip(two_ranks.run(trainer_features.train, callback, pipeline), expected, strict=True):
            assert mine[0].differences(theirs[0]) == [], pipeline
            assert mine[1] is theirs[1] is None or torch.equal(mine[1], theirs[1])
    assert (expected[0][0].differences(without[0][0]) != []) == (callback != "AveragesDense")  # which only watches


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("swa", ["StochasticWeightAveraging cannot be used with sharded tables", "AveragedModel(module.top)"]),
        ("ema", ["EMAWeightAveraging cannot be used with sharded tables", "AveragedModel(module.top)"]),
        ("frozen_backbone", ["BackboneFinetuning cannot", "rate with combined_optimizer", "'Tables that train later'"]),
        ("prunes_tables", ["ModelPruning cannot be used", "parameters_to_prune="]),
        ("prunes_everything", ["ModelPruning cannot be used", "parameters_to_prune="]),
        ("batch_size_finder", ["MisconfigurationException", "not supported with distributed strategies"]),
        ("16-true", ["precision='16-true'", "bf16-mixed"]),
        ("bf16-true", ["precision='bf16-true'", "bf16-mixed"]),
        ("64-true", ["precision='64-true'", "32-true"]),
    ],
)
def test_refused_on_every_rank_before_the_first_step(two_ranks: Ranks, what: str, parts: list[str]) -> None:
    if what == "ema" and not hasattr(callbacks, "WeightAveraging"):
        pytest.skip("Lightning 2.6 has it")
    for message, num_steps in two_ranks.run(trainer_features.refuse, what):
        assert [part for part in parts if part not in message] == [], message
        assert num_steps == 0


def test_a_table_cannot_be_frozen_once_it_is_sharded(ranks: Ranks) -> None:
    for message, num_steps in ranks.run(trainer_features.refuse, "freezes_later"):
        assert ".weight cannot be frozen (requires_grad=False) any more: the table is sharded" in message
        assert "Freeze it before fit" in message
        assert num_steps == 0


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_learning_rate_finder_leaves_no_trace(ranks: Ranks, pipeline: str, tmp_path: Path) -> None:
    for without, with_it, searched, ended in ranks.run(trainer_features.find_rate, str(tmp_path), pipeline):
        assert len(set(searched)) == 5
        assert ended == [16, 5, 16]  # the search is a fit of its own
        assert with_it.differences(without) == []


@pytest.mark.parametrize("case", [TABLE_WISE, MIXED], ids=lambda case: case.name)
@pytest.mark.parametrize("how", ["init_module", "init_module, empty", "configure_model on cpu"])
def test_wherever_the_module_is_made(ranks: Ranks, how: str, case: Case) -> None:
    expected = ranks.run_once(trainer_features.train_made, "plain", case)
    for (mine, meta), (theirs, _) in zip(ranks.run(trainer_features.train_made, how, case), expected, strict=True):
        assert not meta
        assert mine.differences(theirs) == []


def test_tables_made_on_meta_in_configure_model(ranks: Ranks) -> None:
    """They come to life as shards, with weights of their own, and train."""
    for result, meta in ranks.run(trainer_features.train_made, "configure_model on meta", TABLE_WISE):
        assert not meta
        assert result.losses.isfinite().all()
        assert len(result.losses.unique()) == trainer_features.NUM_STEPS
