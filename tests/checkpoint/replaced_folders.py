"""A fit whose checkpoints' folders get files of the user. Functions that ranks run."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.cases import ROWWISE_ADAGRAD, Batches, Model
from ..support.fits import QUIET


class PutsFiles(Callback):
    """Puts a file, and a link to a folder, into each new checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.strategy.finish_save()  # type: ignore[attr-defined]
        for path in self._folder.glob("*.ckpt"):
            if not (path / "notes.txt").exists():
                (path / "notes.txt").write_text("mine")
                (path / "elsewhere").symlink_to("/dev", target_is_directory=True)  # another file system


def fit_among_files(folder: str) -> None:
    """Fit, saving increments after each step; each second one is whole."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = OverlapEmbeddingStrategy(
        sharding="table_wise", checkpoint_format="incremental", async_checkpoint=True, most_increments=0
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=strategy,
        callbacks=[PutsFiles(Path(folder)), saver],
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(Model(ROWWISE_ADAGRAD), datamodule=Batches(ROWWISE_ADAGRAD, 5))
