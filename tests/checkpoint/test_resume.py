"""Going on in the middle of an epoch equals not stopping: no batch is lost, none comes twice."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap import MODES

from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import resumes
from .resumes import EPOCH, EPOCHS, train_from

EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]


def assert_same(
    ranks: Ranks, pipeline: str, kind: str, stops: tuple[int, ...], folder: str, epochs: int = EPOCHS, **kwargs: Any
) -> None:
    all_at_once = ranks.run(train_from, pipeline, kind, folder, None, stops, epochs, **kwargs)
    names = {f"step={stop}": stop for stop in stops} | ({"epoch=0": EPOCH} if epochs > 1 else {})
    for name, stop in names.items():
        resumed = ranks.run(train_from, pipeline, kind, folder, name, (), epochs, **kwargs)
        for (whole, (all_seen, ended, progress)), (rest, (seen, ended_later, later)) in zip(
            all_at_once, resumed, strict=True
        ):
            assert len(all_seen) == epochs * EPOCH
            assert seen == all_seen[stop:], name
            assert ended_later == ended[-len(ended_later) :], name
            assert later == progress, name
            assert rest.differences(dataclasses.replace(whole, losses=whole.losses[stop:])) == [], name


@pytest.mark.parametrize(
    ("pipeline", "kind"), [("fused_sparse_dist", "own-sized"), *in_turn(EXACT, ["own-unsized", "own-sized"])]
)
def test_every_exact_mode(two_ranks: Ranks, pipeline: str, kind: str, tmp_path: Path) -> None:
    assert_same(two_ranks, pipeline, kind, (1, EPOCH - 1, EPOCH, EPOCH + 1), str(tmp_path))


@pytest.mark.parametrize(
    ("saved_in", "resumed_in"), [("base", "split_backward"), ("split_backward", "fused_sparse_dist")]
)
def test_modes_that_divide_the_tables_otherwise(
    get_ranks: Callable[..., Ranks], saved_in: str, resumed_in: str, tmp_path: Path
) -> None:
    """Between hosts `split_backward` divides the table-wise tables into two parts, which no checkpoint shows."""
    case = dataclasses.replace(ROWWISE_ADAGRAD, tables=TABLE_WISE.tables)
    run = partial(get_ranks(2, num_nodes=2).run, train_from, case=case, sharding="table_wise")
    whole = run(saved_in, "own-sized", str(tmp_path), None, (EPOCH,))
    rest = run(resumed_in, "own-sized", str(tmp_path), "epoch=0")
    for (expected, (*_, saved)), (actual, (*_, resumed)) in zip(whole, rest, strict=True):
        assert {saved[-1], resumed[-1]} == {1, 2}
        assert actual.differences(dataclasses.replace(expected, losses=expected.losses[EPOCH:])) == []


@pytest.mark.parametrize("kind", ["sized-0", "unsized-0"])
def test_torchdata(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    assert_same(ranks, "fused_sparse_dist", kind, (3, EPOCH - 1, EPOCH, EPOCH + 2), str(tmp_path))


def test_a_shuffled_epoch_goes_on_in_its_order(two_ranks: Ranks, tmp_path: Path) -> None:
    """The order of the epoch after it is drawn anew: torchdata does not restore the generator itself."""
    assert_same(two_ranks, "fused_sparse_dist", "shuffled-0", (3, EPOCH - 1), str(tmp_path), epochs=1)


@pytest.mark.parametrize("kind", ["sized-2", "unsized-2"])
def test_torchdata_with_workers(get_ranks: Any, kind: str, tmp_path: Path) -> None:
    assert_same(get_ranks(1), "fused_sparse_dist", kind, (3, EPOCH), str(tmp_path))


def test_loaders_made_before_the_checkpoint_was_loaded_are_made_again(two_ranks: Ranks, tmp_path: Path) -> None:
    stops = (3, EPOCH, EPOCH + 2)
    assert_same(two_ranks, "base", "own-sized", stops, str(tmp_path), kind_of_model=resumes.AsksForSteps)


def test_a_resumed_epoch_has_its_own_order(two_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(resumes.seen_in_the_order_of_a_sampler, str(tmp_path), None, (EPOCH + 3,))
    for name, stop in ((f"step={EPOCH + 3}", EPOCH + 3), ("epoch=0", EPOCH), ("epoch=1", 2 * EPOCH)):
        rest = two_ranks.run(resumes.seen_in_the_order_of_a_sampler, str(tmp_path), name)
        for expected, actual in zip(whole, rest, strict=True):
            assert len(expected) == 3 * EPOCH
            assert actual == expected[stop:], name
