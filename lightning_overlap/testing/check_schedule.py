"""`check_laws`: checks the laws of a schedule with a small model."""

from __future__ import annotations

import warnings

from ..data import SyntheticDataModule
from ..models import DLRM
from ..schedules import STREAMS, Schedule
from .check_module import check_module

_SHARDING = {"cat_0": "table_wise", "cat_1": "column_wise", "cat_2": "data_parallel"}
"""Table -> sharding; the dense optimizer writes the data-parallel table."""


def check_laws(schedule: Schedule) -> None:
    """Check the laws of your schedule on one CPU rank.

    `check_module` trains a small DLRM for 2 x depth + 1 batches, with each `stream` option: fused tables are read with
    the schedule's staleness, tables of the dense optimizer are never stale.

    Raises:
        AssertionError: A law is broken; the message names it. For a race it names the missing call.
    """
    num_steps = 2 * schedule.depth + 1
    data = SyntheticDataModule(
        *(len(_SHARDING), 50), num_dense=2, batch_size=8, num_batches=num_steps, num_val_batches=2, num_test_batches=0
    )

    def make_model() -> DLRM:
        return DLRM(data.table_sizes, data.num_dense, 4, (4,), (4,), fused_optimizer="sgd", table_learning_rate=1.0)

    for stream in STREAMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the data-parallel table loses its fused optimizer, as intended
            check_module(make_model, data, schedule, num_steps=num_steps, stream=stream, sharding=_SHARDING)
