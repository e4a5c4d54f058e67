"""The groups that the runs of a process share."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import groups

from ..support.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]


def joined_by_turns() -> tuple[bool, bool, bool]:
    joined = []
    for seconds in (31, 32, 31):
        dist.barrier()
        joined.append(groups.join(timedelta(seconds=seconds)))
    dist.barrier()
    if dist.get_rank() == 0:
        groups.forget()
    dist.barrier()
    fresh = groups.join(timedelta(seconds=31))
    return joined[0] is joined[2], joined[0] is not joined[1], fresh is not joined[0]


def test_runs_of_one_timeout_share_their_groups(two_ranks: Ranks) -> None:
    """A group has threads, which gloo wakes a hundred times a second for as long as the process lives."""
    assert two_ranks.run(joined_by_turns) == [(True, True, True)] * 2


def join_with_increments_on_one_rank() -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        groups.join(timedelta(seconds=31), increments=dist.get_rank() == 1)
    return str(caught.value)


def test_increments_on_some_ranks_only_are_an_error_on_all(two_ranks: Ranks) -> None:
    for said in two_ranks.run(join_with_increments_on_one_rank):
        assert said.startswith("rank 1 has the option checkpoint_format='incremental' and rank 0 has not")


PROGRAM = """
import atexit, sys
import torch
import torch.distributed as dist
atexit.register(lambda: print("kept\\n" if dist.is_initialized() else "destroyed\\n", end="", flush=True))  # last
from contextlib import suppress
import lightning.pytorch as pl
from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM

way, devices = sys.argv[1], int(sys.argv[2])

class Model(DLRM):
    def training_step(self, batch, batch_idx):
        if way == "failed fit" and batch_idx == 2 and self.global_rank == 0:
            raise OSError
        return super().training_step(batch, batch_idx)

if way == "group of the user":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
data = SyntheticDataModule(num_tables=2, rows_per_table=50, batch_size=8, num_batches=4, num_val_batches=0)
quiet = dict(logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
with suppress(OSError, RuntimeError):
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {"lr": 0.1}))
    trainer = pl.Trainer(accelerator="cpu", devices=devices, max_epochs=1, strategy=strategy, **quiet)
    trainer.fit(Model(table_sizes=data.table_sizes, num_dense=data.num_dense), data)
if way == "error after it":
    raise OSError
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "num_ranks", "said"),
    [
        ("fit", 2, ["destroyed", "destroyed"]),
        ("error after it", 1, ["kept"]),
        ("failed fit", 2, ["kept", "kept"]),
        ("group of the user", 1, ["kept"]),
    ],
)
def test_a_process_destroys_the_groups_that_a_run_made(
    way: str, num_ranks: int, said: list[str], tmp_path: Path
) -> None:
    """Otherwise a process that ends right after a collective may abort: its exit code says that it failed."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(script), way, str(num_ranks)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert sorted(line for line in done.stdout.splitlines() if line in ("kept", "destroyed")) == said, done.stderr
