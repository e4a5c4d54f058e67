"""A rank of a run that torchrun started: the same script on one host or on many.

torchrun --nproc-per-node 2 examples/torchrun/train.py
"""

import os
import sys

from lightning.pytorch import Trainer, seed_everything

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.data import SyntheticDataModule
from lightning_overlap.models import DLRM

if __name__ == "__main__":
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit("Start this example with torchrun: torchrun --nproc-per-node 2 examples/torchrun/train.py")
    seed_everything(0)
    data = SyntheticDataModule(num_tables=4, rows_per_table=1000, batch_size=128, num_batches=100)
    model = DLRM(data.table_sizes, data.num_dense, table_learning_rate=0.05)
    strategy = OverlapEmbeddingStrategy(pipeline="fused_sparse_dist", sharding="table_wise")
    trainer = Trainer(
        accelerator="cpu",  # "cuda" with one GPU per process
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"validation AUC: {trainer.callback_metrics['val_auc']:.4f}")
