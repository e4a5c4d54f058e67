"""Evaluation is pipelined too, answers from current weights, and training does not notice it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_overlap import MODES

from ..support.cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, TWO_COLLECTIONS
from ..support.fits import fit
from ..support.pairs import pairwise, rotated
from ..support.ranks import Ranks
from . import evaluations
from .evaluations import EVERY, NUM_STEPS, NUM_VAL

EARLY = [name for name, mode in MODES.items() if mode.has_sparse_stages and not mode.staleness]
CASES = {case.name: case for case in (TABLE_WISE, MIXED, SEQUENCE, TWO_COLLECTIONS, ROWWISE_ADAGRAD)}


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(CASES))
def test_validation_inside_a_fit_answers_from_current_weights(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """As a plain DistributedModelParallel module that is evaluated after the same steps; training goes on unmoved."""
    case, mode, ranks = CASES[name], MODES[pipeline], get_ranks(num_ranks)
    expected = ranks.run_once(evaluations.reference_validations, case, mode.staleness)
    trained = ranks.run(fit, case, pipeline, num_steps=NUM_STEPS)
    actual = ranks.run(evaluations.validate_while_training, case, pipeline)
    for (outputs, losses, early), theirs, alone in zip(actual, expected, trained, strict=True):
        assert outputs[2:] == theirs  # the first two are the sanity check's
        assert torch.equal(losses, alone.losses)
        # all but the very first one, which shows what feeds which module
        num_modules = len(case.collections)
        assert early == ((2 + NUM_VAL * (NUM_STEPS // EVERY) - 1) * num_modules if mode.has_sparse_stages else 0)


@pytest.mark.parametrize(
    ("entry", "lengths", "sized", "num_ranks"),
    pairwise(["validate", "test", "predict"], [(6,), (3, 4), (1, 1, 1)], [True, False], [1, 2]),
    ids=str,
)
def test_entries_answer_as_the_unsharded_module(
    get_ranks: Callable[..., Ranks], entry: str, lengths: tuple[int, ...], sized: bool, num_ranks: int
) -> None:
    ranks, modes = get_ranks(num_ranks), ("base", "sparse_dist", "fused_sparse_dist")
    for kwargs in ({}, {f"limit_{entry.removesuffix('idate')}_batches": 2}, {"inference_mode": False}):
        expected = ranks.run(evaluations.evaluate_alone, None, entry, lengths, sized, **kwargs)
        for pipeline in modes[-1:] if kwargs else modes:
            actual = ranks.run(evaluations.evaluate_alone, pipeline, entry, lengths, sized, **kwargs)
            for (mine, my_results, early), (theirs, their_results, _) in zip(actual, expected, strict=True):
                assert [output[:3] for output in mine] == [output[:3] for output in theirs]
                for a, b in zip(mine, theirs, strict=True):
                    assert a[3] == pytest.approx(b[3], abs=1e-6)  # nn.EmbeddingBag adds rows up in another order
                assert _shape(my_results) == _shape(their_results)
                assert early == (0 if pipeline == "base" else len(mine) - 1)


def _shape(results: Any) -> Any:
    if isinstance(results, dict):
        return {key: _shape(value) for key, value in results.items()}
    return [_shape(result) for result in results] if isinstance(results, list) else type(results)


def test_one_trainer_through_all_entries(ranks: Ranks) -> None:
    expected = ranks.run(evaluations.all_entries, "base")
    for first, last in expected:
        assert first != last
    for pipeline in EARLY:
        assert ranks.run(evaluations.all_entries, pipeline) == expected, pipeline
    ranks.run(evaluations.all_entries, "semi_sync_deferred")  # its entries agree with each other


def test_a_step_without_dataloader_idx_is_refused_as_ever(two_ranks: Ranks) -> None:
    for message in two_ranks.run(evaluations.two_loaders_without_index, "fused_sparse_dist"):
        assert "dataloader_idx" in message


@pytest.mark.parametrize(
    ("pipeline", "step_ms"), [("base", 170), ("sparse_dist", 90), ("fused_sparse_dist", 50), ("semi_sync", 50)]
)
def test_what_an_evaluation_hides(two_ranks: Ranks, pipeline: str, step_ms: int) -> None:
    """Three all-to-alls of 40 ms around a forward of 50 ms, under a virtual clock; two of the three are of ids."""
    for steps_ms in two_ranks.run(evaluations.clocked, pipeline):
        assert set(steps_ms[4:]) == {step_ms}


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("lengths", [(7, 4), (3, 6)])
def test_ranks_with_unequal_data_end_together(two_ranks: Ranks, lengths: tuple[int, int], sized: bool) -> None:
    for pipeline in ("base", "fused_sparse_dist"):
        results = two_ranks.run(evaluations.validate_uneven, pipeline, lengths, sized)
        assert [num for num, _ in results] == [min(lengths)] * 2
        assert [bool(said) for _, said in results] == [length > min(lengths) for length in lengths]


@pytest.mark.parametrize(("entry", "rank"), [("validate", 0), ("fit", 1)])
def test_sigterm_on_one_rank_ends_an_evaluation_on_all(two_ranks: Ranks, entry: str, rank: int) -> None:
    first, second = two_ranks.run(evaluations.terminate, entry, "fused_sparse_dist", rank)
    assert first == second
    assert 4 <= first < 12


def test_inputs_made_in_the_step_are_said_once(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(evaluations.warned_once, "fused_sparse_dist")
    assert len(first) == 2
    assert "made inside validation_step" in first[0]
    assert "made inside training_step" in first[1]
    assert second == []
