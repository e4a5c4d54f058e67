"""Ids that an unsharded module refuses: named on the rank that has them, and no other rank waits for it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import IdRanges

from ..support.ranks import RankError, Ranks
from . import wrong_ids
from .wrong_ids import NUM_STEPS

OUTSIDE = r"ValueError: rank {rank}, the input of 'ebc' for batch 3 of training_step: feature 'f1' has id {id}, but "
TEXTS = {
    "too_large": OUTSIDE.replace("{id}", "1000"),
    "too_large_by_rows": OUTSIDE.replace("{id}", "1000"),
    "negative": OUTSIDE.replace("{id}", "-1"),
    "floating": r"TypeError: the ids for a Sharded\w+ \(features f0, f1, f2\) must be .* got torch.float32",
    "no_weights": r"ValueError: a Sharded\w+ with is_weighted=True got a KeyedJaggedTensor without weights",
}


@pytest.mark.parametrize(
    ("what", "pipeline", "num_ranks"),
    [
        ("too_large", "base", 2),
        ("too_large_by_rows", "semi_sync_deferred", 2),
        ("negative", "fused_sparse_dist", 2),
        ("floating", "base", 1),
        ("floating", "fused_sparse_dist", 2),
        ("no_weights", "base", 2),
        ("no_weights", "fused_sparse_dist", 2),
    ],
)
def test_the_rank_that_has_them_says_so(
    get_ranks: Callable[..., Ranks], what: str, pipeline: str, num_ranks: int
) -> None:
    """It is the last one. As any error on one rank it ends the others."""
    with pytest.raises(RankError, match=TEXTS[what].format(rank=num_ranks - 1)):
        get_ranks(num_ranks).run(wrong_ids.fit, what, pipeline)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_with_a_warning_it_goes_on_with_row_0(ranks: Ranks, pipeline: str) -> None:
    expected = ranks.run(wrong_ids.fit, "row_0", pipeline)
    actual = ranks.run(wrong_ids.fit, "too_large", pipeline, out_of_range_ids="warning")
    for (losses, _), (wanted, nothing) in zip(actual, expected, strict=True):
        assert len(losses) == NUM_STEPS
        assert losses == wanted
        assert nothing == []
    [message] = actual[-1][1]
    assert "batch 3 of training_step: feature 'f1' has id 1000, but table" in message
    assert all(not said for _, said in actual[:-1])
    assert all(not said for _, said in ranks.run(wrong_ids.fit, "too_large", pipeline, out_of_range_ids="fbgemm"))


def test_ids_that_the_step_maps_to_rows_are_no_error(two_ranks: Ranks) -> None:
    expected = two_ranks.run(wrong_ids.fit_raw_ids, "base")
    assert len(expected[0]) == NUM_STEPS
    assert two_ranks.run(wrong_ids.fit_raw_ids, "fused_sparse_dist") == expected


def test_the_first_feature_with_an_id_outside_is_found() -> None:
    """Against a search id by id: empty features, features of no table, 32 and 64 bits, ids beyond the lengths."""
    found = []
    for seed in range(200):
        kjt, rows = wrong_ids.kjt_of_kinds(seed)
        ranges = IdRanges(torch.nn.Module())
        ranges._tables = {key: SimpleNamespace(num_embeddings=num, name=f"t_{key}") for key, num in rows.items()}
        outside = {key: [one for one in kjt[key].values().tolist() if not 0 <= one < num] for key, num in rows.items()}
        expected = next((key for key, ids in outside.items() if ids), None)
        found.append(expected)
        feature, said = ranges.first_outside(kjt) or (None, "")
        assert feature == expected
        if expected is not None:
            first, last = outside[expected][0], rows[expected] - 1
            assert f"has id {first}, but table 't_{expected}' has rows 0 to {last} " in said
            assert f"({len(outside[expected])} of " in said
    assert set(found) == {None, "f0", "f1", "f2"}


def test_ids_on_a_device_are_not_read() -> None:
    """The host would wait; a read of `meta` raises."""
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    ranges = IdRanges(torch.nn.Module())
    ranges._tables = {"f0": SimpleNamespace(num_embeddings=1, name="t0")}
    assert ranges.first_outside(KeyedJaggedTensor(["f0"], ids, lengths=ids)) is None


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out_of_range_ids: unknown choice 'warn'.*warning"):
        OverlapEmbeddingStrategy(out_of_range_ids="warn")  # type: ignore[arg-type]
