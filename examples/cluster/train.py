"""A rank of a training that ends and starts again: it saves every few steps, and each start resumes from the newest.

The launchers beside this file start it. Alone it trains on one process: python examples/cluster/train.py
"""

import argparse
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM


def hosts_and_ranks() -> dict[str, int]:
    """Return the number of hosts and of ranks on each, as the launcher says; hosts come and go."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun, also on Kubernetes; mpi.sh
        ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        return {"num_nodes": int(os.environ["WORLD_SIZE"]) // ranks_per_host, "devices": ranks_per_host}
    if "SLURM_NTASKS_PER_NODE" in os.environ:  # a task for each rank
        return {"num_nodes": int(os.environ["SLURM_NNODES"]), "devices": int(os.environ["SLURM_NTASKS_PER_NODE"])}
    return {"num_nodes": 1, "devices": 1}


def newest_checkpoint(folder: Path) -> str:
    """Return the path of Slurm's last preemption if nothing was saved after it, otherwise "last".

    The first start finds no "last": Lightning says so, and trains from the beginning.
    """
    preempted = max(folder.glob("hpc_ckpt_*.ckpt"), key=saved_at, default=None)
    links = list(folder.glob("last*.ckpt"))
    # A link to nothing is an error of "last", which says what to do.
    if preempted is None or any(not last.exists() or saved_at(last) > saved_at(preempted) for last in links):
        return "last"
    return str(preempted)


def saved_at(checkpoint: Path) -> float:
    return checkpoint.stat().st_mtime


def train(folder: Path, steps: int, save_every: int, **launched: Any) -> str:
    """Train one rank, from the newest checkpoint on; rank 0 returns the last step and its loss.

    `launched` are the Trainer's arguments that depend on the launcher.
    """
    seed_everything(0)
    # Your data module. Its loaders are stateful: a resumed epoch goes on after the last trained batch.
    data = SyntheticDataModule(rows_per_table=1000, batch_size=128, num_batches=steps, num_val_batches=0)
    model = DLRM(data.table_sizes, data.num_dense, table_learning_rate=0.05)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=save_every, save_last="link", save_top_k=1)
    trainer = Trainer(
        accelerator="auto",  # GPUs if the host has any: one for each rank
        max_epochs=1,
        callbacks=[saves],
        default_root_dir=folder,  # Slurm's preemption saves here
        logger=False,
        enable_progress_bar=False,
        **launched,
    )
    trainer.fit(model, datamodule=data, ckpt_path=newest_checkpoint(folder))
    if not trainer.is_global_zero or "train_loss" not in trainer.callback_metrics:
        return ""
    return f"step {trainer.global_step}: loss {trainer.callback_metrics['train_loss']:.9f}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoints; all hosts share it")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100, help="steps that a crash costs, at most")
    return parser


if __name__ == "__main__":
    # How long an exchange waits for a host without power. A rank that dies is noticed at once.
    strategy = OverlapEmbeddingStrategy(timeout=timedelta(minutes=5))
    try:
        said = train(**vars(make_parser().parse_args()), **hosts_and_ranks(), strategy=strategy)
    except SIGTERMException:  # its own exit code is 0, which a launcher takes for the end of the work
        sys.exit(128 + signal.SIGTERM)
    if said:
        print(said)
