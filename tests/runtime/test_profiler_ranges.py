"""TorchRec's ranges are left out of a run that no profiler sees, and are there in one that it does."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.profiler import record_function
from torchrec.distributed import comm_ops, types, utils
from torchrec.sparse import jagged_tensor

from ..support.cases import TABLE_WISE
from ..support.fits import fit
from ..support.ranks import Ranks

MODULES = (comm_ops, types, utils, jagged_tensor)
RANGE = "all2all_pooled"


def ranges_of_a_fit(profiled: bool) -> tuple[bool, bool]:
    """Whether TorchRec names its all-to-alls in a fit, and whether it has its own names back after that."""
    made: list[str] = []
    real = record_function.__init__

    def init(self: record_function, name: str, args: str | None = None) -> None:
        made.append(name)
        real(self, name, args)

    profile: Any = torch.profiler.profile() if profiled else nullcontext()
    with mock.patch.object(record_function, "__init__", init), profile:
        fit(TABLE_WISE, "fused_sparse_dist", num_steps=4)
    back = all(module.record_function is record_function for module in MODULES)  # type: ignore[attr-defined]
    return any(RANGE in name.lower() for name in made), back


@pytest.mark.parametrize("profiled", [False, True])
def test_a_fit_has_them_where_it_is_profiled(two_ranks: Ranks, profiled: bool) -> None:
    assert two_ranks.run(ranges_of_a_fit, profiled) == [(profiled, True)] * 2
