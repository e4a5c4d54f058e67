"""Law 1 where embeddings and gradients are sent in fewer bits: equal to plain loops with TorchRec's codecs."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from lightning_overlap import MODES

from ..support.cases import COLUMN_WISE, MIXED, SEQUENCE, TABLE_WISE, TWO_COLLECTIONS, Case, TableSpec
from ..support.fits import fit
from ..support.pairs import in_turn, rotated
from ..support.ranks import Ranks
from ..support.reference import differences, on_ranks

ROW_WISE = Case("row_wise", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1", "f2"), "row_wise")))
SEQUENCE_ROWS = Case("sequence_rows", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")), sequence=True)


def _sent(case: Case, forward: str, backward: str) -> Case:
    return dataclasses.replace(case, name=f"{case.name}-{forward}-{backward}", comms=(forward, backward))


CASES = {
    case.name: case
    for case in (
        _sent(TABLE_WISE, "fp16", "fp16"),
        _sent(COLUMN_WISE, "mx4", "fp32"),
        _sent(ROW_WISE, "fp16", "fp16"),
        _sent(MIXED, "fp32", "fp16"),
        _sent(TWO_COLLECTIONS, "fp16", "int8"),
        _sent(SEQUENCE, "fp16", "fp16"),
        _sent(SEQUENCE_ROWS, "fp16", "fp16"),
    )
}
STALE = [name for name, schedule in MODES.items() if schedule.staleness > 0]


def _differences(ranks: Ranks, case: Case, pipeline: str) -> list[list[str]]:
    expected = on_ranks(ranks, case, MODES[pipeline].staleness)
    return differences(ranks.run(fit, case, pipeline), expected)


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), [pair for pair in rotated(CASES) if pair.num_ranks == 2])
def test_a_mode_equals_the_plain_loop(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    assert _differences(get_ranks(num_ranks), CASES[name], pipeline) == [[]] * num_ranks


@pytest.mark.parametrize(("name", "pipeline"), in_turn(CASES, STALE))
def test_stale_modes_between_hosts(get_ranks: Callable[..., Ranks], name: str, pipeline: str) -> None:
    """There all-to-alls are made of sends and receives, and updates are deferred to the end of the backward."""
    assert _differences(get_ranks(2, num_nodes=2), CASES[name], pipeline) == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_precision_shows(two_ranks: Ranks, name: str) -> None:
    """Guards the tests above: full precision gives other losses."""
    case = CASES[name]
    full = on_ranks(two_ranks, dataclasses.replace(case, comms=None))
    for mine, theirs in zip(on_ranks(two_ranks, case), full, strict=True):
        assert not torch.equal(mine.losses, theirs.losses)


def test_one_rank_sends_nothing(get_ranks: Callable[..., Ranks]) -> None:
    case = CASES["table_wise-fp16-fp16"]
    assert _differences(get_ranks(1), case, "fused_sparse_dist") == [[]]
    assert differences(on_ranks(get_ranks(1), case), on_ranks(get_ranks(1), TABLE_WISE)) == [[]]
