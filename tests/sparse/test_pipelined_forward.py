"""What is replaced in TorchRec while modules are served: nobody sees it who asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..support.ranks import Ranks
from . import profiler_names


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync_deferred"])
def test_torchrec_names_its_work_to_a_profiler_that_is_there(get_ranks: Callable[..., Ranks], pipeline: str) -> None:
    """Those of a plain loop, in the steps that are profiled; in the others nothing is named."""
    ranks = get_ranks(2)
    for (seen, named, left), expected in zip(
        ranks.run(profiler_names.of_a_fit, pipeline), ranks.run(profiler_names.of_a_plain_loop), strict=True
    ):
        assert expected <= seen
        assert len(expected) >= 5
        assert named == 0
        assert left == []
