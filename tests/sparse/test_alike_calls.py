"""A rank that calls a module less or more often than the others says so; all ranks alike may call it as they like."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import Schedule

from ..laws.fault_runs import run_all
from ..support.ranks import RankError, Ranks
from . import skipped_calls
from .skipped_calls import Skip

BOTH = (0, 1)


@pytest.fixture(autouse=True)
def _end_the_ranks(request: pytest.FixtureRequest, _pools: dict[Any, Ranks]) -> Iterator[None]:
    """A run that failed leaves a rank that waits."""
    yield
    for pool in _pools.values():
        if not pool.alive or pool.worn:
            pool.close()


def _refuses(ranks: Ranks, said: str, *args: Any, **kwargs: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=re.escape(said)):
        ranks.run(skipped_calls.train, *args, **kwargs)
    assert time.monotonic() - began < 28, "ranks wait for each other for 30 s"


def test_a_rank_that_skips_a_collection_says_so_in_every_mode(two_ranks: Ranks, mode: Schedule) -> None:
    said = "RuntimeError: rank 1 does not call 'second' in training_step of batch 4, rank 0 does"
    _refuses(two_ranks, said, "two_collections", Skip("second"), mode.name)


@pytest.mark.parametrize(
    ("case", "pipeline", "skip", "said"),
    [
        ("two_collections", "base", Skip(), "rank 1 does not call 'ebc' in training_step of batch 4, rank 0 does"),
        ("one_collection", "base", Skip(batches=(0,)), "rank 1 does not call 'ebc' in training_step of batch 0"),
        ("one_collection", "semi_sync", Skip(batches=(0,), ranks=(0,)), "rank 0 does not call 'ebc'"),
        ("one_collection", "fused_sparse_dist", Skip(batches=(8,)), "rank 1 does not call 'ebc'"),
        ("sequences", "fused_sparse_dist", Skip("second"), "rank 1 does not call 'second'"),
        ("copied_beside", "fused_sparse_dist", Skip("second"), "rank 1 does not call 'second'"),
        ("copied_beside", "base", Skip(), "rank 1 does not call 'ebc'"),
        (
            "one_collection",
            "fused_sparse_dist",
            Skip(twice=True),
            "rank 0 does not call 'ebc' once more in training_step of batch 4, rank 1",
        ),
        (
            "two_collections",
            "base",
            Skip("second", twice=True, batches=(0,)),
            "rank 0 does not call 'second' once more in",
        ),
    ],
)
def test_the_rank_is_named(two_ranks: Ranks, case: str, pipeline: str, skip: Skip, said: str) -> None:
    _refuses(two_ranks, said, case, skip, pipeline)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_in_an_evaluation(two_ranks: Ranks, pipeline: str) -> None:
    skip = Skip("second", after="validation_step", batches=(2,))
    said = "rank 1 does not call 'second' in validation_step of batch 2"
    _refuses(two_ranks, said, "two_collections", skip, pipeline, validates=True)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
@pytest.mark.parametrize(("collection", "after"), [("ebc", ""), ("second", ", after 1 backwards of the step")])
def test_before_a_backward_by_hand(two_ranks: Ranks, collection: str, after: str, pipeline: str) -> None:
    """It would wait for the other rank inside its step."""
    said = f"rank 1 does not call '{collection}' in training_step of batch 4{after}, rank 0 does"
    _refuses(two_ranks, said, "two_collections", Skip(collection), pipeline, by_hand=True)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
def test_a_call_after_all_ranks_have_skipped_it(get_ranks: Callable[..., Ranks], pipeline: str) -> None:
    """All skip batch 3; then rank 0 calls it in batch 4, before any collective, and rank 1 does not."""
    said = "rank 1 does not call 'second' in training_step of batch 4, rank 0 does"
    _refuses(get_ranks(2), said, "two_collections", _SkipsLonger("second"), pipeline)


class _SkipsLonger(Skip):
    def concerns(self, step: str, collection: str, batch: int) -> bool:
        rank = skipped_calls.dist.get_rank()
        return collection == self.collection and (batch == 3 or (rank == 1 and batch == 4))


_ALIKE = [
    ("two_collections", Skip("second", (0, 3, 4, 7), BOTH), {}),
    ("two_collections", Skip("second", tuple(range(9)), BOTH), {}),
    ("two_collections", Skip("ebc", (2, 5), BOTH, twice=True), {}),
    ("two_collections", Skip("second", (1, 4), BOTH), {"by_hand": True}),
    ("copied_beside", Skip("second", (2, 3), BOTH), {}),
]


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
@pytest.mark.parametrize(("case", "skip", "options"), _ALIKE)
def test_all_ranks_alike_train_as_in_base(
    two_ranks: Ranks, case: str, skip: Skip, options: dict[str, Any], pipeline: str
) -> None:
    exact = "base" if pipeline == "fused_sparse_dist" else "semi_sync"
    expected = two_ranks.run(skipped_calls.losses, case, skip, exact, **options)
    actual = two_ranks.run(skipped_calls.losses, case, skip, pipeline, **options)
    for mine, theirs in zip(actual, expected, strict=True):
        assert len(mine) == skipped_calls.NUM_STEPS
        assert torch.equal(mine, theirs)


def test_what_has_no_collective_may_differ(two_ranks: Ranks) -> None:
    """Data-parallel tables that are read without gradients."""
    skip = Skip("second", (4, 5), no_grad=True)
    assert [len(one) for one in two_ranks.run(skipped_calls.losses, "copied_beside", skip, "base")] == [9, 9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "collection", "batch", "rank"),
    [
        ("base", "second", 0, 1),
        ("base", "ebc", 4, 0),
        ("fused_sparse_dist", "second", 4, 1),
        ("split_backward", "ebc", 4, 0),
        ("semi_sync_deferred", "second", 4, 1),
    ],
)
def test_both_ranks_end_within_seconds(tmp_path: Path, pipeline: str, collection: str, batch: int, rank: int) -> None:
    """The ranks would wait for each other for 300 s."""
    skip = {"collection": collection, "batches": [batch], "ranks": [rank]}
    [ends] = run_all(
        tmp_path, {"case": "two_collections", "pipeline": pipeline, **skip}, program=skipped_calls.__name__
    )
    ended = time.time()
    assert [end.code for end in ends] == [1, 1], ends
    said = f"rank {rank} does not call '{collection}' in training_step of batch {batch}, rank {1 - rank} does"
    assert f"RuntimeError: {said}" in ends[rank].log
    if rank == 1:  # rank 0 keeps the store
        assert said in ends[1 - rank].log
    [skipped] = re.findall(r"skips at ([\d.]+)", ends[rank].log)
    assert ended - float(skipped) < 40
