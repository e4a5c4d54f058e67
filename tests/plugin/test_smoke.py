"""Laws and checkpoints, for every supported version of Lightning and TorchRec; `make smoke` runs other files' too."""

from pathlib import Path

import pytest

from lightning_overlap import MODES

from ..checkpoint import resumes
from ..support import reference
from ..support.cases import MIXED, ROWWISE_ADAGRAD, Case
from ..support.fits import fit
from ..support.ranks import Ranks

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("case", [MIXED, ROWWISE_ADAGRAD], ids=lambda case: case.name)
def test_laws(two_ranks: Ranks, case: Case) -> None:
    for pipeline, schedule in MODES.items():
        expected = reference.on_ranks(two_ranks, case, schedule.staleness)
        assert reference.differences(two_ranks.run(fit, case, pipeline), expected) == [[], []], pipeline


def test_resume(ranks: Ranks, tmp_path: Path) -> None:
    loader = ("fused_sparse_dist", "own-unsized", str(tmp_path))
    whole = ranks.run(resumes.train_from, *loader, None, (5,))
    resumed = ranks.run(resumes.train_from, *loader, "step=5")
    for (expected, (all_seen, *_)), (actual, (seen, *_)) in zip(whole, resumed, strict=True):
        assert seen == all_seen[5:]
        expected.losses = expected.losses[5:]
        assert actual.differences(expected) == []
