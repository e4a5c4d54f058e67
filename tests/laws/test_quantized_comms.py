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


SENT = (
    *((TABLE_WISE, "fp16", "fp16"), (COLUMN_WISE, "mx4", "fp32"), (ROW_WISE, "fp16", "fp16"), (MIXED, "fp32", "fp16")),
    *((TWO_COLLECTIONS, "fp16", "int8"), (SEQUENCE, "fp16", "fp16"), (SEQUENCE_ROWS, "fp16", "fp16")),
)
CASES = {case.name: dataclasses.replace(case, comms=(forward, backward)) for case, forward, backward in SENT}
STALE = [name for name, schedule in MODES.items() if schedule.staleness > 0]
FITS = [
    *((name, pipeline, 1) for name, pipeline, num_ranks in rotated(CASES) if num_ranks == 2),
    # Between hosts all-to-alls are made of sends and receives, and updates are deferred to the end of the backward.
    *((name, pipeline, 2) for name, pipeline in in_turn(CASES, STALE)),
]


@pytest.mark.parametrize(("name", "pipeline", "num_hosts"), FITS)
def test_a_mode_equals_the_plain_loop(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_hosts: int
) -> None:
    ranks, case = get_ranks(2, num_nodes=num_hosts), CASES[name]
    expected = on_ranks(ranks, case, MODES[pipeline].staleness)
    assert differences(ranks.run(fit, case, pipeline), expected) == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_the_precision_shows(two_ranks: Ranks, name: str) -> None:
    """Guards the test above."""
    rounded, full = (on_ranks(two_ranks, case) for case in (CASES[name], dataclasses.replace(CASES[name], comms=None)))
    assert all(not torch.equal(mine.losses, theirs.losses) for mine, theirs in zip(rounded, full, strict=True))


def test_one_rank_sends_nothing(get_ranks: Callable[..., Ranks]) -> None:
    ranks, case = get_ranks(1), CASES[TABLE_WISE.name]
    expected = on_ranks(ranks, dataclasses.replace(case, comms=None))
    assert differences(ranks.run(fit, case, "fused_sparse_dist"), expected) == [[]]
