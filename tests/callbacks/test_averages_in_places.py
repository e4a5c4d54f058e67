"""Which weights are read and saved within `averaged()`: at any place, in any format, in any order of callbacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_overlap import AVERAGES
from lightning_overlap.checkpoint import read_folder
from lightning_overlap.deltas import Replica

from ..support.pairs import pairwise
from ..support.ranks import Ranks
from . import averages_in_places
from .averages_in_places import AT, HOOKS, NESTED, Draw, Found

ROUNDING = 1e-5
FORMATS = (("full", False), ("sharded", False), ("sharded", True), ("incremental", False), ("incremental", True))
DRAWS = [Draw(*saved, hook, first, nested) for saved, hook, first, nested in pairwise(FORMATS, HOOKS, (0, 1), NESTED)]


def content(path: Path) -> dict[str, Any]:
    return read_folder(path, weights_only=False) if path.is_dir() else torch.load(path, weights_only=False)


def tables_in(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.split(".")[-2]: value for name, value in state.items() if name.startswith("ebc.")}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return sorted(name for name in mine.keys() | theirs.keys() if not torch.equal(mine[name], theirs[name]))


def off_by(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((value - theirs[name]).abs().max()) for name, value in mine.items())


def check(draw: Draw, found: Found, folder: Path, plain: Any) -> None:
    weights = tables_in(plain[AT - 1][0])
    averages = tables_in(plain[AT - 1][1])
    assert off_by(weights, averages) > 100 * ROUNDING
    expected, trained = averages if draw.reads_averages else weights, found.trained[AT]
    assert off_by(trained, weights) < ROUNDING
    assert off_by(found.read, expected) < ROUNDING
    assert same(found.chunks, found.read) == []
    served = content(folder / "read.ckpt")
    kept = {name: value for name, value in served["state_dict"].items() if name.startswith("top.")}
    if draw.served:
        assert same(tables_in(served["state_dict"]), found.read) == []
        assert same({f"top.{name}": value for name, value in found.copied.items()}, kept) == []
        assert not served.get(AVERAGES)
        assert Path(found.bridge).name != "read.ckpt"
    else:
        assert same(tables_in(served["state_dict"]), trained) == []
        assert off_by(tables_in(served[AVERAGES]), averages) < ROUNDING
    for step in found.trained.keys() - {AT}:
        saved = content(folder / f"step={step}.ckpt")
        assert same(tables_in(saved["state_dict"]), found.trained[step]) == [], step
        assert saved[AVERAGES].keys() == saved["state_dict"].keys()
    replica = Replica(None, folder / "deltas")
    replica.update()
    assert same(tables_in(replica.state_dict()), found.in_the_end) == []


def test_the_key_of_averages_in_files_stays() -> None:
    assert AVERAGES == "lightning_overlap_averages"


@pytest.mark.slow
def test_reads_and_saves_are_of_what_was_asked_for_and_the_training_goes_on(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = averages_in_places.history(2)
    of_ranks = two_ranks.run(averages_in_places.fit_all, DRAWS, str(tmp_path), timeout_s=400)
    for number, draw in enumerate(DRAWS):
        for found in of_ranks:
            check(draw, found[number], tmp_path / str(number), plain)


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "base", "split_backward"])
def test_a_teacher_looks_up_averages_and_its_student_trained_weights(two_ranks: Ranks, pipeline: str) -> None:
    """Early lookups have trained weights: they are not served to the teacher, and stay for the student."""
    for rank, losses in enumerate(two_ranks.run(averages_in_places.teach, pipeline)):
        expected = averages_in_places.losses_of_a_plain_teacher(rank, 2)
        assert float((losses - expected).abs().max()) < ROUNDING


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("lookup", "was called with gradients while ExponentialMovingAverage.averaged"),
        ("step", "an optimizer's step would train averages: ExponentialMovingAverage.averaged"),
        ("load", "a checkpoint would be loaded into averages: ExponentialMovingAverage.averaged"),
        ("fail", ""),
    ],
)
def test_what_would_mix_weights_is_refused_and_a_save_after_it_has_trained_ones(
    two_ranks: Ranks, tmp_path: Path, what: str, match: str, is_first: bool
) -> None:
    for said, trained in two_ranks.run(averages_in_places.refused, what, str(tmp_path), is_first):
        assert match in said
        saved = content(tmp_path / "failed.ckpt")
        assert same(tables_in(saved["state_dict"]), trained) == []
        assert saved[AVERAGES]
