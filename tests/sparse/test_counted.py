"""How many ids of row-wise tables go to each rank: a device counts them, and the host reads that with the sizes."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_overlap import MODES
from lightning_overlap.sparse import described_input
from lightning_overlap.sparse.input_sizes import PartForm, _Counted

from ..profiling import syncs
from ..support import fits
from ..support.cases import Case, TableSpec
from ..support.ranks import Ranks
from ..support.reference import Result, differences, on_ranks

TABLES = (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1", "f2"), "row_wise"))
CASES = {
    "bags": Case("counted_bags", TABLES),
    "weighted": Case("counted_weighted", TABLES, weighted=True),
    "sequences": Case("counted_sequences", TABLES, sequence=True),
}


def _fit(case: Case, pipeline: str) -> Result:
    """Train as on a device; fail if no sizes were counted there."""
    counted = mock.patch.object(_Counted, "add_to", autospec=True, side_effect=_Counted.add_to)
    with mock.patch.object(described_input, "is_device", return_value=True), counted as calls:
        result = fits.fit(case, pipeline)
    assert calls.call_count > 0
    return result


@pytest.mark.parametrize(
    ("name", "pipeline"), [("bags", "fused_sparse_dist"), ("weighted", "sparse_dist"), ("sequences", "semi_sync")]
)
def test_losses_are_those_of_the_plain_loop(two_ranks: Ranks, name: str, pipeline: str) -> None:
    expected = on_ranks(two_ranks, CASES[name], MODES[pipeline].staleness)
    assert differences(two_ranks.run(_fit, CASES[name], pipeline), expected) == [[], []]


def _syncs(case: Case, pipeline: str) -> list[str]:
    with mock.patch.object(described_input, "is_device", return_value=True):
        return syncs.of_steps(case, pipeline)


def test_the_host_reads_nothing_but_the_sizes(two_ranks: Ranks) -> None:
    for found in two_ranks.run(_syncs, CASES["bags"], "fused_sparse_dist"):
        assert len(found) == syncs.NUM
        assert all("input_sizes.py" in text for text in found)


def test_what_a_device_adds_where_ranks_have_other_numbers_of_features() -> None:
    """For each rank the numbers of ids and of weights, and the lengths of its features; other sizes stay."""
    kjt = KeyedJaggedTensor(["a", "b", "c", "d"], torch.arange(15), lengths=torch.tensor([0, 1, 2, 1, 4, 1, 0, 6]))
    meta: Any = SimpleNamespace(input=kjt, input_splits=[[7, 7], [0, 0], [0, 0]])
    one = _Counted(0, PartForm(4, (1, 3), with_lengths=True), meta)
    rows = torch.tensor([[7] * 4 + [0] * 3] * 2)
    one.add_to(rows)
    assert rows.tolist() == [[7, 1, 1, 7, 1, 0, 0], [7, 14, 14, 7, 3, 5, 6]]
    one.write_splits(rows.t().tolist())
    assert meta.input_splits == [[7, 7], [1, 14], [1, 14]]
