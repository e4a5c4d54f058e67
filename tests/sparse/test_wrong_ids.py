"""Ids that an unsharded module refuses: named on the rank that has them, and no other rank waits for it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import IdRanges

from ..support.ranks import RankError, Ranks
from . import caller_fits

OUTSIDE = r"ValueError: rank {rank}, the input of 'ebc' for batch 3 of training_step: feature 'f1' has id {id}, but "
MISFIT = r"ValueError: rank {rank}, the input of 'ebc' for batch 3 of training_step: it"
TEXTS = {
    "too_large": OUTSIDE.replace("{id}", "1000"),
    "too_large_by_rows": OUTSIDE.replace("{id}", "1000"),
    "negative": OUTSIDE.replace("{id}", "-1"),
    "too_few_ids": rf"{MISFIT}s lengths sum up to \d+ ids \(f0: .*\), but it has \d+: they end within feature 'f2'",
    "too_few_ids_by_rows": rf"{MISFIT}s lengths sum up to .*: they end within feature 'f\d'",
    "too_few_lengths": rf"{MISFIT}s lengths sum up to .*: \d+ are left after the last feature, 'f2'",
    "one_length_less": rf"{MISFIT} has 47 lengths, which is no multiple of its 3 features \(f0, f1, f2\)",
    "too_few_weights": rf"{MISFIT} has \d+ weights for \d+ ids \(features f0, f1, f2\)",
    "floating": r"TypeError: the ids for a Sharded\w+ \(features f0, f1, f2\) must be .* got torch.float32",
    "no_weights": r"ValueError: a Sharded\w+ with is_weighted=True got a KeyedJaggedTensor without weights",
}


@pytest.mark.parametrize(
    ("what", "pipeline", "num_ranks"),
    [
        ("too_large", "base", 2),
        ("too_large_by_rows", "semi_sync_deferred", 2),
        ("negative", "fused_sparse_dist", 2),
        ("too_few_ids", "base", 1),
        ("too_few_ids", "fused_sparse_dist", 2),
        ("too_few_ids_by_rows", "semi_sync", 2),
        ("too_few_lengths", "fused_sparse_dist", 1),
        ("too_few_lengths", "base", 2),
        ("one_length_less", "base", 1),
        ("one_length_less", "split_backward", 2),
        ("too_few_weights", "base", 2),
        ("too_few_weights", "fused_sparse_dist", 1),
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
        get_ranks(num_ranks).run(caller_fits.train, what, pipeline)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_with_a_warning_it_goes_on_with_row_0(ranks: Ranks, pipeline: str) -> None:
    expected = ranks.run(caller_fits.train, "row_0", pipeline)
    warned, silent = (
        ranks.run(caller_fits.train, "too_large", pipeline, {"out_of_range_ids": choice})
        for choice in ("warning", "fbgemm")
    )
    for mine, theirs in zip(warned, expected, strict=True):
        assert mine.result.differences(theirs.result) == []
    [message] = warned[-1].messages
    assert "batch 3 of training_step: feature 'f1' has id 1000, but table" in message
    assert all(outcome.messages == [] for outcome in (*expected, *warned[:-1], *silent))


def test_the_first_feature_with_an_id_outside_is_found() -> None:
    """Against a search id by id: empty features, features of no table, 32 and 64 bits, ids beyond the lengths."""
    found, keys = [], [f"f{index}" for index in range(4)]
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        rows = {key: int(torch.randint(3, 9, (), generator=generator)) for key in keys[:3]}
        lengths = torch.randint(0, 3, (8,), generator=generator)
        values = torch.randint(-1 if seed % 3 == 0 else 0, 8, (int(lengths.sum()) + seed % 2,), generator=generator)
        kjt = KeyedJaggedTensor(keys, values.int() if seed % 4 < 2 else values, lengths=lengths)
        outside = {key: [one for one in kjt[key].values().tolist() if not 0 <= one < num] for key, num in rows.items()}
        found.append(next((key for key, ids in outside.items() if ids), None))
        feature, said = _ranges(rows).first_outside(kjt) or (None, "")
        assert feature == found[-1]
        if feature is not None:
            first, last = outside[feature][0], rows[feature] - 1
            assert f"has id {first}, but table 't_{feature}' has rows 0 to {last} " in said
            assert f"({len(outside[feature])} of " in said
    assert set(found) == {None, "f0", "f1", "f2"}


def _ranges(rows: dict[str, int]) -> IdRanges:
    ranges = IdRanges(torch.nn.Module())
    ranges._tables = {key: SimpleNamespace(num_embeddings=num, name=f"t_{key}") for key, num in rows.items()}
    return ranges


def test_ids_on_a_device_are_not_read() -> None:
    """The host would wait; a read of `meta` raises."""
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    assert _ranges({"f0": 1}).first_outside(KeyedJaggedTensor(["f0"], ids, lengths=ids)) is None


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out_of_range_ids: unknown choice 'warn'.*warning"):
        OverlapEmbeddingStrategy(out_of_range_ids="warn")  # type: ignore[arg-type]
