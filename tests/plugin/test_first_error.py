"""The error that came first is printed once, and last, whichever way the ranks were started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support import interpreters

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")

SCRIPT = """
import sys
import lightning.pytorch as pl
from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM
import torch

way = sys.argv[1]

class Data(SyntheticDataModule):
    def train_dataloader(self):
        for index, batch in enumerate(super().train_dataloader()):
            if way == "data of rank 1" and self.rank == 1 and index == 5:
                raise OSError("the disk of a rank " + "is gone")
            yield batch

class Model(DLRM):
    def training_step(self, batch, batch_idx):
        if way == "step of rank 0" and self.global_rank == 0 and batch_idx == 5:
            raise OSError("the disk of a rank " + "is gone")
        return super().training_step(batch, batch_idx)

data = Data(num_tables=2, rows_per_table=50, batch_size=8, num_batches=20, num_val_batches=0, num_test_batches=0)
strategy = OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {"lr": 0.1}), sharding="table_wise")
callbacks = [pl.callbacks.StochasticWeightAveraging(0.1)] if way == "all ranks" else []
quiet = dict(logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
trainer = pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, callbacks=callbacks, **quiet)
trainer.fit(Model(table_sizes=data.table_sizes, num_dense=data.num_dense), data)
"""

GONE = "OSError: the disk of a rank is gone"
REFUSED = "ValueError: StochasticWeightAveraging cannot be used with sharded tables"


@pytest.mark.parametrize(
    ("launcher", "way", "cause"),
    [
        ((), "step of rank 0", GONE),  # rank 0 keeps the store by which ranks tell each other
        ((), "data of rank 1", GONE),
        ((), "all ranks", REFUSED),
        (TORCHRUN, "data of rank 1", GONE),
    ],
    ids=lambda value: None if isinstance(value, str) else "torchrun" if value else "script",
)
def test_the_cause_comes_once_and_last(tmp_path: Path, launcher: tuple[str, ...], way: str, cause: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    _run([*launcher, str(script), way], cause)


def test_so_does_the_command_under_torchrun(tmp_path: Path) -> None:
    command = ["-m", "lightning_overlap.train", "experiment=smoke", "trainer.precision=16-true", "callbacks=none"]
    cause = "ValueError: precision='16-true' converts the module's weights"
    told = _run([*TORCHRUN, *command, "logger=none", f"hydra.run.dir={tmp_path}"], cause)
    assert "meta tensor" not in told


def _run(arguments: list[str], cause: str) -> str:
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE")
    variables = {name: value for name, value in os.environ.items() if name not in launchers}
    done: subprocess.CompletedProcess[str] = interpreters.run(
        [sys.executable, *arguments],
        env=variables | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stdout.count(cause) == 1
    assert cause in [line for line in done.stdout.splitlines() if "Error: " in line][-1]
    assert "closed by peer" not in done.stdout
    return done.stdout
