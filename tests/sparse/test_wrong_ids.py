"""Ids that an unsharded module refuses: named on the rank that has them, and no other rank waits for it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.sparse.watchers import stale_rows
from lightning_overlap.tables import IdRanges

from ..support.cases import (
    COLUMN_WISE,
    NUM_ROWS,
    SEQUENCE,
    TABLE_WISE,
    WEIGHTED,
    Batches,
    Case,
    Model,
    TableSpec,
    make_plan,
)
from ..support.ranks import RankError, Ranks
from . import caller_fits, callers
from .caller_inputs import with_id

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
    "half_weights": r"TypeError: the weights of the ids for 'ebc' .* are torch.float16, .* row-wise tables: t0, t1, t2",
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
        ("half_weights", "base", 1),
        ("half_weights", "fused_sparse_dist", 2),
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


_BY_ROWS = Case("by_rows", tuple(TableSpec(f"t{at}", (f"f{at}",), "row_wise") for at in range(2)))
_COPIED = Case("copied", (TableSpec("t0", ("f0",)), TableSpec("d0", ("f1",), "data_parallel")))


@dataclass
class _Wrong:
    case: Case
    pipeline: str
    num_ranks: int = 2
    replicated: bool = False
    row: int = 0  # that the id stands for
    id: int = -1

    def __str__(self) -> str:
        kind = "replicated" if self.replicated else self.case.name
        return f"{self.id}-{kind}-{self.pipeline}-{self.num_ranks}"


def _train_with(id: int, wrong: _Wrong, out_of_range_ids: str) -> caller_fits.Outcome:
    module, data = Model(wrong.case), Batches(wrong.case, callers.NUM_STEPS)
    data.make = with_id(id)
    options: dict[str, Any] = {"out_of_range_ids": out_of_range_ids}
    if wrong.replicated:
        options |= {"replicate_tables": ["d0"], "fused_optimizer": (torch.optim.SGD, {"lr": 2.0})}
    plan = make_plan(wrong.case, module, dist.get_world_size())
    return caller_fits.fit(module, plan, data, wrong.pipeline, options, limit_val_batches=0)


@pytest.mark.parametrize(
    "wrong",
    [
        *(_Wrong(TABLE_WISE, pipeline, num) for pipeline in ("base", "fused_sparse_dist") for num in (1, 2)),
        _Wrong(TABLE_WISE, "semi_sync_deferred"),
        *(_Wrong(COLUMN_WISE, pipeline) for pipeline in ("base", "semi_sync")),
        # FBGEMM sends -1 to the shard of the last rank.
        *(_Wrong(_BY_ROWS, pipeline, row=NUM_ROWS // 2) for pipeline in ("base", "fused_sparse_dist")),
        # An id that is too large goes to the rank of its remainder.
        *(_Wrong(_BY_ROWS, "base", row=NUM_ROWS // 2 * rank, id=1000 + rank) for rank in (0, 1)),
        _Wrong(_BY_ROWS, "sparse_dist", 1),
        *(_Wrong(SEQUENCE, pipeline, num) for pipeline, num in (("base", 1), ("fused_sparse_dist", 2))),
        *(_Wrong(_COPIED, pipeline, id=id) for pipeline in ("base", "fused_sparse_dist") for id in (-1, 1000)),
        *(_Wrong(_COPIED, "semi_sync", num, replicated=True) for num in (1, 2)),
        _Wrong(_COPIED, "base", replicated=True, id=1000),
        _Wrong(WEIGHTED, "fused_sparse_dist"),
    ],
    ids=str,
)
def test_an_id_outside_stands_for_the_first_row_of_a_shard(get_ranks: Callable[..., Ranks], wrong: _Wrong) -> None:
    """FBGEMM's own check leaves -1 to its kernels, and its dense kernels check nothing: both raise an error."""
    ranks = get_ranks(wrong.num_ranks)
    expected = ranks.run(_train_with, wrong.row, wrong, "error")
    for choice in ("warning", "fbgemm"):
        for mine, theirs in zip(ranks.run(_train_with, wrong.id, wrong, choice), expected, strict=True):
            assert mine.result.differences(theirs.result) == []
            assert mine.early == theirs.early


def test_stale_rows_of_ids_outside_stay_in_their_table() -> None:
    """The ids are counted as they came: FBGEMM may have corrected a copy."""
    kjt = KeyedJaggedTensor(["f0", "f1"], torch.tensor([3, -1, -1, 2**62, 2]), lengths=torch.tensor([2, 3]))
    rows = stale_rows._rows([kjt], [(0, 0, 0), (0, 1, 1)])
    assert [divmod(row, 1 << stale_rows.ROW_BITS) for row in rows.tolist()] == [
        *((0, 3), (0, 0), (1, 0), (1, 0), (1, 2))
    ]


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
