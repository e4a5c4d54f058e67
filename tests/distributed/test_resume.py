"""Going on in the middle of an epoch equals not stopping: no batch is lost, none comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_overlap import MODES

from .ranks import Ranks
from .resumes import EPOCH, EPOCHS, train_from

EXACT = [name for name, mode in MODES.items() if mode.staleness == 0]


def assert_same(ranks: Ranks, pipeline: str, kind: str, stops: tuple[int, ...], folder: str) -> None:
    all_at_once = ranks.run(train_from, pipeline, kind, folder, None, stops)
    for name, stop in [*((f"step={stop}", stop) for stop in stops), ("epoch=0", EPOCH)]:
        resumed = ranks.run(train_from, pipeline, kind, folder, name)
        for (whole, (all_seen, epochs, progress)), (rest, (seen, later_epochs, later)) in zip(
            all_at_once, resumed, strict=True
        ):
            assert len(all_seen) == EPOCHS * EPOCH
            assert seen == all_seen[stop:], name
            assert later_epochs == epochs[-len(later_epochs) :], name
            assert later == progress, name
            expected = whole.losses
            whole.losses = whole.losses[stop:]
            assert rest.differences(whole) == [], name
            whole.losses = expected


@pytest.mark.parametrize("kind", ["own-sized", "own-unsized"])
@pytest.mark.parametrize("pipeline", EXACT)
def test_every_exact_mode(two_ranks: Ranks, pipeline: str, kind: str, tmp_path: Path) -> None:
    assert_same(two_ranks, pipeline, kind, (1, EPOCH - 1, EPOCH, EPOCH + 1), str(tmp_path))


@pytest.mark.parametrize("kind", ["sized-0", "unsized-0", "shuffled-0"])
def test_torchdata(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    assert_same(ranks, "fused_sparse_dist", kind, (3, EPOCH - 1, EPOCH, EPOCH + 2), str(tmp_path))


@pytest.mark.parametrize("kind", ["sized-2", "unsized-2", "shuffled-2"])
def test_torchdata_with_workers(two_ranks: Ranks, kind: str, tmp_path: Path) -> None:
    assert_same(two_ranks, "fused_sparse_dist", kind, (3, EPOCH), str(tmp_path))
