"""The laws of a schedule: `check_laws(my_schedule)` trains a small model by it."""

from __future__ import annotations

import warnings

from ..data import SyntheticDataModule
from ..models import DLRM
from ..schedules import STREAMS, Schedule
from .check_module import check_module

_SHARDING = {"cat_0": "table_wise", "cat_1": "column_wise", "cat_2": "data_parallel"}
"""Of each table; the dense optimizer writes the last one."""


def check_laws(schedule: Schedule) -> None:
    """Check that a schedule does what it says, with real tables on one rank of a CPU.

    `check_module` trains a small DLRM by it, over 2 x depth + 1 batches, with early lookups on each of the streams that
    they may run on, and checks its laws: tables of the fused backward are seen with the schedule's staleness, those of
    the dense optimizer always fresh.

    Args:
        schedule: A schedule of yours.

    Raises:
        AssertionError: A law is broken; the message names it, above the report. A race of streams says what is missing.
    """
    num_steps = 2 * schedule.depth + 1
    data = SyntheticDataModule(
        *(len(_SHARDING), 50), num_dense=2, batch_size=8, num_batches=num_steps, num_val_batches=2, num_test_batches=0
    )

    def make_model() -> DLRM:
        return DLRM(data.table_sizes, data.num_dense, 4, (4,), (4,), fused_optimizer="sgd", table_learning_rate=1.0)

    for stream in STREAMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the data-parallel table loses its fused optimizer, as is meant here
            check_module(make_model, data, schedule, num_steps=num_steps, stream=stream, sharding=_SHARDING)
