"""Fits with `frozen_window=True`. Functions that ranks run."""

from __future__ import annotations

from typing import Any

from ..support.cases import Case, TableSpec
from ..support.fits import fit
from ..support.reference import Result

ALL_KINDS = Case(
    "all_kinds",
    (
        TableSpec("t0", ("f0",)),
        TableSpec("t1", ("f1", "f0")),
        TableSpec("wide", ("w",), "column_wise", dim=16),
        TableSpec("rows", ("f2",), "row_wise"),
        TableSpec("d0", ("f1",), "data_parallel"),
        TableSpec("u0", ("f1", "f2"), collection="second"),
    ),
)
"""Table-, column- and row-wise, data-parallel, and two collections."""


def train(case: Case, k: int, pipeline: str = "fused_sparse_dist", **kwargs: Any) -> Result:
    """Train an epoch of 30 batches, k for each optimizer step."""
    options = {"frozen_window": True}
    return fit(case, pipeline, options=options, accumulate_grad_batches=k, **kwargs)
