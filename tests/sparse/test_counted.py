"""How many ids of row-wise tables go to each rank: a device counts them, and the host reads that with the sizes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap import MODES
from lightning_overlap.sparse.input_sizes import PartForm, _Counted

from ..support import reference
from ..support.cases import Case, TableSpec
from ..support.ranks import Ranks
from ..support.reference import Delayed
from . import counted

TABLES = (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1", "f2"), "row_wise"))
CASES = {
    "bags": Case("counted_bags", TABLES),
    "weighted": Case("counted_weighted", TABLES, weighted=True),
    "sequences": Case("counted_sequences", TABLES, sequence=True),
}


@pytest.mark.parametrize(
    ("name", "pipeline"), [("bags", "fused_sparse_dist"), ("weighted", "sparse_dist"), ("sequences", "semi_sync")]
)
def test_losses_are_those_of_the_plain_loop(two_ranks: Ranks, name: str, pipeline: str) -> None:
    case, staleness = CASES[name], MODES[pipeline].staleness
    if staleness:
        expected = two_ranks.run_once(reference.train_delayed, case, Delayed(staleness))
    else:
        expected = two_ranks.run_once(reference.train, case)
    actual = two_ranks.run(counted.fit, case, pipeline)
    assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[], []]


def test_the_host_reads_nothing_but_the_sizes(two_ranks: Ranks) -> None:
    for found in two_ranks.run(counted.syncs_of_steps, CASES["bags"], "fused_sparse_dist"):
        assert len(found) == counted.syncs.NUM
        assert all("input_sizes.py" in text for text in found)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [((2, 2), [[7, 4, 4, 7, 1, 3], [7, 11, 11, 7, 5, 6]]), ((1, 3), [[7, 1, 1, 7, 1, 0, 0], [7, 14, 14, 7, 3, 5, 6]])],
)
def test_what_a_device_adds(splits: tuple[int, ...], expected: list[list[int]]) -> None:
    """For each rank the numbers of ids and of weights, and the lengths of its features; other sizes stay."""
    lengths = torch.tensor([0, 1, 2, 1, 4, 1, 0, 6])
    kjt = KeyedJaggedTensor(["a", "b", "c", "d"], torch.arange(15), lengths=lengths, stride=2)
    part = PartForm(4, splits, with_lengths=True)
    meta: Any = SimpleNamespace(_input=kjt, input_splits=[[7, 7], [0, 0], [0, 0]])
    rows = torch.full((2, 4 + max(splits)), 7)
    rows[:, 4:] = 0
    one = _Counted(0, part, meta)
    one.add_to(rows)
    assert rows.tolist() == expected
    one.tell(expected)
    assert meta.input_splits == [[7, 7], *[[row[1] for row in expected]] * 2]
