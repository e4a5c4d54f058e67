"""A project as it was: plain Lightning, DDPStrategy, whole tables on every rank.

python examples/move_over/before.py --data adult.data.gz
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_overlap.data import AdultDataModule, SyntheticDataModule


class IncomeModel(LightningModule):
    """Predicts from what is known of people, or of clicks, whether the label is 1."""

    def __init__(self, table_sizes: dict, num_dense: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=16)
                for name, rows in table_sizes.items()
            ]
        )
        width = 16 * len(table_sizes) + num_dense
        self.top = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.auc = BinaryAUROC(thresholds=1000)

    def forward(self, batch) -> torch.Tensor:
        pooled = self.ebc(batch.sparse).to_dict()
        features = [batch.dense, *(pooled[name] for name in self.hparams.table_sizes)]
        return self.top(torch.cat(features, dim=1)).squeeze(1)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self(batch), batch.labels)
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx: int) -> None:
        self.auc.update(torch.sigmoid(self(batch)), batch.labels.long())
        self.log("auc", self.auc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def make_data(path: str | None):
    """Rows of UCI Adult, or synthetic clicks."""
    if path is not None:
        return AdultDataModule(path, batch_size=128)
    return SyntheticDataModule(num_tables=6, rows_per_table=2000, batch_size=128, num_batches=100)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="adult.data, plain or .gz (default: synthetic data)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser.parse_args()


def main() -> None:
    options = parse()
    seed_everything(0, verbose=False)
    data = make_data(options.data)
    model = IncomeModel(data.table_sizes, data.num_dense)
    strategy = "ddp"
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, datamodule=data, ckpt_path=options.resume)
    trainer.save_checkpoint("before.ckpt")
    [result] = trainer.test(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print(f"epoch {trainer.current_epoch}: test AUC {result['auc']:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
